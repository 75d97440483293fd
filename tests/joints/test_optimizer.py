"""What the optimizer does with each parameter: decay, groups with their own rate, warm-up, steps on hold."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmrl.config import load
from mmrl.engine import Engine
from mmrl.engine.deepspeed import parameter_groups
from mmrl.errors import UserError
from tests.joints.parts import GIVEN

PPO = ["algorithm={type: ppo}", "rollout={prompts: 2}"]
CRITIC = "optim.groups={critic: {lr: 0.01, warmup_steps: 2}}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.critic = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1)
        for p in self.parameters():
            nn.init.ones_(p)


def optim(*overrides):
    return load(GIVEN, overrides).optim


def by_name(module, groups, values):
    """Which value each parameter gets."""
    place = {id(p): value for group, value in zip(groups, values, strict=True) for p in group["params"]}
    return {name: place[id(p)] for name, p in module.named_parameters()}


def test_biases_and_norms_are_not_decayed():
    net = Net()
    groups, _ = parameter_groups(net, optim("optim.weight_decay=0.1"), 10)
    found = by_name(net, groups, [group["weight_decay"] for group in groups])
    decayed = {"body.weight", "critic.weight"}
    assert found == {name: 0.1 if name in decayed else 0.0 for name in found} and len(found) == 6


def test_a_group_has_its_own_decay():
    net, decay = Net(), "optim.groups={critic: {weight_decay: 0.3}}"
    groups, _ = parameter_groups(net, optim(*PPO, "optim.weight_decay=0.1", decay), 10)
    found = by_name(net, groups, [group["weight_decay"] for group in groups])
    assert (found["body.weight"], found["critic.weight"], found["critic.bias"]) == (0.1, 0.3, 0.0)


def rates(name, steps, *overrides, total=10):
    net = Net()
    groups, by_group = parameter_groups(net, optim(*overrides), total)
    return [by_name(net, groups, [rate(step) for rate in by_group])[name] for step in steps]


def test_a_group_has_its_own_rate_and_warm_up():
    options = [*PPO, CRITIC, "optim.lr=1", "optim.warmup_steps=4"]
    assert rates("body.weight", range(5), *options) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates("body.bias", range(5), *options) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates("critic.weight", range(5), *options) == [0.005, 0.01, 0.01, 0.01, 0.01]
    assert rates("critic.bias", range(5), *options) == [0.005, 0.01, 0.01, 0.01, 0.01]


def test_a_group_is_of_the_parts_of_that_name_alone():
    """`critics` and `critic_norm` are not in the group `critic`."""
    net = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("critic", "critics", "critic_norm")})
    options = optim(*PPO, "optim.lr=1", "optim.groups={critic: {lr: 0.01}}")
    groups, rates = parameter_groups(net, options, 10)
    found = by_name(net, groups, [rate(0) for rate in rates])
    assert found == {"critic.weight": 0.01, "critics.weight": 1.0, "critic_norm.weight": 1.0}


def test_what_a_group_does_not_say_is_the_optimizers():
    options = [*PPO, "optim.groups={critic: {lr: 0.01}}", "optim.lr=1", "optim.warmup_steps=4"]
    assert rates("critic.weight", range(5), *options) == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_steps_on_hold():
    """What has no group waits; its warm-up begins after that. The critic does not wait."""
    options = [*PPO, CRITIC, "optim.lr=1", "optim.warmup_steps=2", "optim.hold_steps=3"]
    assert rates("body.weight", range(6), *options) == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0]
    assert rates("critic.weight", range(4), *options) == [0.005, 0.01, 0.01, 0.01]


def test_schedules_end_at_0_with_the_run():
    linear = rates("body.weight", [0, 5, 10], "optim.lr=1", "optim.schedule=linear")
    assert linear == [1.0, 0.5, 0.0]
    cosine = rates("body.weight", [0, 4, 8], "optim.lr=1", "optim.schedule=cosine", total=8)
    assert cosine == pytest.approx([1.0, 0.5, 0.0])
    # After a hold of 2 and a warm-up of 2 six steps are left.
    held = [*PPO, CRITIC, "optim.lr=1", "optim.warmup_steps=2", "optim.hold_steps=2", "optim.schedule=linear"]
    assert rates("body.weight", [4, 7, 10], *held) == [1.0, 0.5, 0.0]


@pytest.fixture(scope="module")
def alone():
    """This process is a group of one."""
    yield
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()


def test_the_engine_takes_groups_rates_and_decay_as_they_are_asked_for(alone):
    """AdamW's first step is the rate, whatever the gradient's size; where the gradient is 0 only decay is left."""
    options = [*PPO, CRITIC, "optim.lr=0.5", "optim.warmup_steps=2", "optim.weight_decay=0.1", "optim.hold_steps=1"]
    net = Net()
    engine = Engine(net, optim(*options), load(GIVEN).engine, total_steps=10)
    found = []
    for _ in range(2):
        engine.backward((net.body.weight[0].sum() + net.critic.weight[0, 0] + 0.0 * net.body.bias.sum()) / 1)
        engine.step()
        found.append({name: p.detach().flatten().tolist() for name, p in net.named_parameters()})
    first, second = found
    assert first["body.weight"] == [1.0] * 4  # on hold
    # The critic: 1 x (1 - 0.005 x 0.1) - 0.005 where the gradient is 1, and its decay alone where it is 0.
    assert first["critic.weight"] == pytest.approx([0.9945, 0.9995], abs=1e-6)
    # The body's first step after the hold has half its rate: 1 x (1 - 0.25 x 0.1), and by 0.25 less in the first row.
    # Adam's moments are those of two equal gradients.
    assert second["body.weight"] == pytest.approx([0.725, 0.725, 0.975, 0.975], abs=1e-6)
    assert second["body.bias"] == second["norm.weight"] == second["norm.bias"] == [1.0, 1.0]
    assert torch.tensor(second["critic.bias"]).tolist() == [1.0]


@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_loss_does_not_reach_has_a_gradient_of_0(alone, stage):
    """As among several ranks, where another one may have reached it: momentum and decay go on. SGD with momentum 0.5:
    steps of 0.1 x 1, then of 0.1 x 0.5, and 0.1 x 0.5 of the weight itself goes at each of them."""
    net = Net()
    options = ["optim.type=sgd", "optim.lr=0.1", "optim.weight_decay=0.5", "optim.momentum=0.5"]
    whole = load(GIVEN, [f"engine.zero_stage={stage}"]).engine
    engine = Engine(net, optim(*options, "optim.clip_grad_norm=0"), whole, total_steps=10)
    for reached in (net.critic.weight, net.body.weight):
        engine.backward(reached.sum())
        engine.step()
    # The gradient holds the decay, and momentum both: 1 + 0.5 x 1 = 1.5, 1 - 0.15 = 0.85; then 0.5 x 0.85 + 0.5 x 1.5.
    assert net.critic.weight.flatten().tolist() == pytest.approx([0.85 - 0.1 * (0.425 + 0.75)] * 2)
    # Decay alone: 0.5, 1 - 0.05 = 0.95; then 1 + 0.5 x 0.95 and half of what was before.
    assert net.body.weight.flatten().tolist() == pytest.approx([0.95 - 0.1 * (1.475 + 0.25)] * 4)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_reset_optimizer_is_that_of_the_first_step(alone, stage, kind):
    """The first gradient is forgotten: the next step moves what it reaches as far as a first one, and nothing else."""
    net = Net()
    options = [f"optim.type={kind}", "optim.lr=0.1", "optim.weight_decay=0", "optim.clip_grad_norm=0"]
    options += ["optim.momentum=0.5"] if kind == "sgd" else []
    engine = Engine(net, optim(*options), load(GIVEN, [f"engine.zero_stage={stage}"]).engine, total_steps=10)
    for reached in (net.critic.weight, net.body.weight):
        engine.backward(reached.sum() + 0.0 * net.norm.bias.sum())
        engine.step()
        engine.reset_optimizer()
    assert net.critic.weight.flatten().tolist() == pytest.approx([0.9] * 2)
    assert net.body.weight.flatten().tolist() == pytest.approx([0.9] * 4)
    assert engine.updates == 2


def after(steps, *options, stage=0):
    """Weights of `Net`'s body after so many steps whose gradient is (3, 4) for two of its weights and 0 for the others,
    and the engine."""
    net = Net()
    engine = Engine(net, optim(*options), load(GIVEN, [f"engine.zero_stage={stage}"]).engine, total_steps=10)
    for _ in range(steps):
        engine.backward(3 * net.body.weight[0, 0] + 4 * net.body.weight[0, 1] + 0.0 * net.body.bias.sum())
        engine.step()
    return net.body.weight.detach().flatten().tolist(), engine


def test_sgd_goes_against_the_gradient_by_its_size(alone):
    """1 - 0.1 x 3 and 1 - 0.1 x 4; decay takes 0.1 x 0.5 of every matrix, and nothing of biases."""
    free = ["optim.lr=0.1", "optim.clip_grad_norm=0"]
    found, engine = after(1, "optim.type=sgd", *free)
    assert found == pytest.approx([0.7, 0.6, 1.0, 1.0])
    assert not any(engine._engine.optimizer.state.values())  # nothing is kept beside the weights
    assert engine.saved_bytes == 8 * sum(p.numel() for p in engine._engine.module.parameters())
    found, engine = after(1, "optim.type=sgd", *free, "optim.weight_decay=0.5")
    assert found == pytest.approx([0.65, 0.55, 0.95, 0.95])
    assert engine._engine.module.body.bias.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("stage", [0, 1])
def test_sgds_gradient_is_clipped_before_it_is_taken(alone, stage):
    """Its norm is 5 and may be 1: 1 - 0.1 x 3 / 5 and 1 - 0.1 x 4 / 5. ZeRO's own optimizers clip from stage 1 on."""
    found, _ = after(1, "optim={type: sgd, lr: 0.1, clip_grad_norm: 1}", stage=stage)
    assert found == pytest.approx([0.94, 0.92, 1.0, 1.0], abs=1e-6)


def test_momentum_adds_what_earlier_gradients_were(alone):
    """Two equal gradients of 3: 3, then 0.5 x 3 + 3."""
    found, engine = after(2, "optim={type: sgd, lr: 0.1, momentum: 0.5, clip_grad_norm: 0}")
    assert found == pytest.approx([1 - 0.1 * (3 + 4.5), 1 - 0.1 * (4 + 6), 1.0, 1.0], abs=1e-6)
    kept = sum(p.numel() for p in engine._engine.module.parameters())
    assert engine.saved_bytes == 12 * kept  # weights, the optimizer's own and one moment


def test_an_option_of_another_optimizer_is_refused():
    with pytest.raises(UserError, match="unknown key optim.betas"):
        optim("optim.type=sgd", "optim.betas=[0.9, 0.9]")
    with pytest.raises(UserError, match="unknown key optim.momentum"):
        optim("optim.momentum=0.9")
    with pytest.raises(UserError, match="use one of adamw, sgd"):
        optim("optim.type=adam")
