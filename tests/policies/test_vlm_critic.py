"""A critic on a vision-language model: its values are of the states before each token, are saved, and train."""

import shutil

import pytest
import torch

from mmrl import build
from mmrl.config import load
from mmrl.errors import UserError
from tests.whole_runs.parts import TINY, call, distance, final, metrics, timeless, train

PPO = "algorithm={type: ppo, gamma: 1, critic: {width: 8}}"


def policy_of(folder, *overrides):
    config = load(TINY, [f"run_dir={folder}", *overrides])
    task = build.build_task(config)
    return task, build.build_policy(config, task)


def spoken(policy):
    """The last layer begins at 0: gives the critic something to say."""
    torch.manual_seed(3)
    torch.nn.init.normal_(policy.module.critic.layers[-1].weight)


def test_the_value_is_of_what_came_before_the_token(tmp_path):
    task, policy = policy_of(tmp_path, PPO)
    fresh = policy.rollout([task.train[0], task.train[1]], 2, [1, 2, 3, 4], step=0)
    assert not policy.replay(fresh, policy.module).value.any()
    spoken(policy)
    value = policy.replay(fresh, policy.module).value
    assert value.shape == fresh.mask.shape and value.dtype == torch.float32
    for row, tokens in enumerate(fresh.inputs):
        inputs = policy.runner.collate([tokens], padding_side="right")
        with torch.no_grad():
            states = policy.module.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
        first, count = len(tokens.prompt), len(tokens.response)
        with torch.no_grad():
            expected = policy.module.critic.layers(states[first - 1 : first + count - 1])[:, 0]
        torch.testing.assert_close(value[row, :count].detach(), expected, atol=1e-4, rtol=0)
        assert not value[row, count:].any()
    # Sampling does not see it, and likelihoods are what they are without it.
    _, plain = policy_of(tmp_path)
    without = plain.replay(fresh, plain.module)
    assert without.value is None
    torch.testing.assert_close(policy.replay(fresh, policy.module).logp, without.logp, atol=0, rtol=0)


@pytest.mark.parametrize("detach", [False, True])
def test_the_model_learns_from_its_loss_unless_it_is_detached(tmp_path, detach):
    task, policy = policy_of(tmp_path, PPO, f"algorithm.critic.detach={str(detach).lower()}")
    spoken(policy)
    fresh = policy.rollout([task.train[0]], 2, [1, 2], step=0)
    policy.replay(fresh, policy.module).value.sum().backward()
    moved = [p.grad is not None and bool(p.grad.any()) for p in policy.module.model.parameters()]
    assert any(moved) is not detach
    assert all(p.grad.any() for p in policy.module.critic.parameters())


def test_it_is_saved_and_found_again(tmp_path):
    task, policy = policy_of(tmp_path, PPO)
    spoken(policy)
    policy.save(tmp_path / "saved", policy.module.state_dict())
    options = ["model.build=null", f"model.path={tmp_path / 'saved'}"]
    _, again = policy_of(tmp_path, PPO, *options)
    assert distance(policy.module.state_dict(), again.module.state_dict()) == 0
    policy_of(tmp_path, *options)  # who needs no critic, reads none
    with pytest.raises(
        UserError, match=r"critic.safetensors: the shape of layers.0.bias is \[\d+\], but \[16\] in algorithm.critic"
    ):
        policy_of(tmp_path, PPO, *options, "algorithm.critic.width=16")
    with pytest.raises(UserError, match="the shape of layers.2.bias is"):
        policy_of(tmp_path, PPO, *options, "algorithm.critic={width: 8, layers: 2}")


def test_what_it_can_not_be(tmp_path):
    with pytest.raises(UserError, match="algorithm.critic.type=separate does not work with a vision-language model"):
        policy_of(tmp_path, PPO, "algorithm.critic.type=separate")
    with pytest.raises(UserError, match="algorithm.type=ppo needs turns of a conversation"):
        policy_of(tmp_path, PPO, "algorithm.time_step=turn")


OPTIONS = [
    "algorithm={type: ppo, gamma: 1, value_lam: 1, lam: by_length, epochs: 2, minibatches: 2, critic: {width: 8}}",
    "rollout.prompts=16",
    "rollout.group_size=1",
    "optim.groups={critic: {lr: 1e-2}}",
    "checkpoint.every=2",
]


def whole(folder, stage):
    train(folder, *OPTIONS, f"engine.zero_stage={stage}")


def rest(folder, stage):
    train(folder, *OPTIONS, f"engine.zero_stage={stage}", resume=True)


@pytest.mark.slow
def test_it_trains_on_two_ranks_and_goes_on_exactly(tmp_path):
    one, other, third = (tmp_path / name for name in ("whole", "cut", "plain"))
    call(whole, one, 3, log=tmp_path / "whole.log", ranks=2)
    other.mkdir()
    shutil.copytree(one / "checkpoints" / "step-000002", other / "checkpoints" / "step-000002")
    shutil.copy(one / "metrics.jsonl", other)
    call(rest, other, 3, log=tmp_path / "cut.log", ranks=2)
    assert distance(final(one), final(other)) == 0
    rows = [row for row in timeless(metrics(one)) if "loss" in row]
    assert [row for row in timeless(metrics(other)) if "loss" in row] == rows and len(rows) == 4
    assert rows[0]["critic/value"] == 0 and rows[-1]["critic/value"] != 0  # it begins at 0, and learns
    call(whole, third, 0, log=tmp_path / "plain.log", ranks=2)
    assert distance(final(one), final(third)) < 1e-5
