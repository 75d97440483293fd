"""Implicit process rewards on a tiny real model: from the YAML key through the trainer's path to numbers by hand."""

import copy
import math
from pathlib import Path

import pytest
import torch

from mmrl.config import load
from mmrl.core.credit import leave_one_out_returns
from mmrl.doctor.memory_plan import trained_copy_bytes
from mmrl.errors import UserError
from mmrl.measurements.implicit import outcome_loss
from mmrl.protocols.auxiliary import AuxiliaryModule, AuxiliaryModules
from mmrl.training.metrics import Metrics
from tests.joints.parts import close
from tests.whole_runs.parts import ROBOTS, TINY, call, distance, final, make, metrics, release, spread, timeless, train

pytestmark = pytest.mark.usefixtures("alone")
HERE = __name__
OUTCOME = f"task.rewards=[{{name: '{HERE}:half', label: half}}]"
PLAIN = ("algorithm.baseline=leave_one_out", "algorithm.scale=none")


def half(sample):
    return float(spread(sample) > 0.5)


def prime(options=""):
    return f"algorithm.shaping=[{{type: implicit_process, label: reward/half, beta: 0.5, lr: 0.01{options}}}]"


def stepped(folder, *overrides):
    """A trainer, and the rollouts of its first step, prepared."""
    trainer = make(folder, OUTCOME, *PLAIN, *overrides)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    before = copy.deepcopy(trainer.policy.module.state_dict())
    _, batch = trainer.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), Metrics(trainer.engine))
    return trainer, rollouts, batch, before


def column(rollouts):
    (name,) = [name for name in rollouts.extras if name.startswith("implicit")]
    return rollouts.extras[name].values


# --- numbers by hand ---


def test_advantages_by_hand():
    """Means of the group are 1, 3 and 0: baselines 3/2, 1/2 and 2. The fourth rollout is alone, the fifth is out."""
    rewards = torch.tensor([[2.0, 0, 1], [3, 3, 9], [0, 0, 0], [5, 5, 5], [7, 7, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    group = torch.tensor([0, 0, 0, 1, 0])
    shaped = leave_one_out_returns(rewards, mask, group, 1.0)
    close(shaped, [[-1.5, -2.0, -0.5], [5, 2.5, 0], [-2, 0, 0], [0, 0, 0], [0, 0, 0]])
    close(leave_one_out_returns(rewards, mask, group, 0.5)[0], [-0.375, -1.75, -0.5])


def test_returns_and_loss_of_the_public_file():
    """PRIME-RL/PRIME at 18ad596f, compute_rloo_returns of rm_scores alone with n_samples 3 and reward_model_gamma 0.9,
    and compute_ce_dpo_loss_rm with outcomes 1, 0, 1 and beta 0.05, executed."""
    rewards = torch.tensor([[0.3, -0.2, 0.5, 0.1], [-0.4, 0.6, 0, 0], [0.2, -0.1, -0.3, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    returns = leave_one_out_returns(rewards, mask, torch.zeros(3), 0.9, baseline="released")
    close(returns[0], [0.53862071, 0.21420825, 0.68708330, 0.04583332])
    close(returns[1], [0.01208329, 0.79583335, 0, 0])
    close(returns[2], [-0.48179168, -0.75291669, -0.55416667, 0])
    loss = outcome_loss(0.05 * rewards.sum(1), torch.tensor([1.0, 0.0, 1.0])) / 3
    close(loss, 0.6907, atol=5e-5)


def test_the_loss_and_the_sign_of_its_gradient_by_hand():
    """log(1 + e^-1) for the right one, log(1 + e^2) for the wrong one; sigmoid less the outcome; nothing of NaN."""
    logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = outcome_loss(logits, torch.tensor([1.0, 0.0, math.nan]))
    close(loss.detach(), math.log1p(math.exp(-1)) + math.log1p(math.exp(2)))
    loss.backward()
    close(logits.grad, [1 / (1 + math.exp(-1)) - 1, 1 / (1 + math.exp(-2)), 0])


def test_a_step_from_several_losses_is_one_of_their_sum():
    """Adam's first step is its rate against the sign of the sum, 2 - 1 + 0; two ranks alike double what they sum."""
    line = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(line.weight)
    module, sums = AuxiliaryModule(line, lr=0.25), []
    line.weight.grad = torch.full((1, 1), -5.0)  # of a step that ended early
    module.descend((factor * line.weight.sum() for factor in (2.0, -1.0, 0.0)), lambda g: sums.append(g) or 2 * g)
    close(line.weight.detach(), [[0.75]])
    close(sums[0], [[1.0]])
    close(module.optimizer.state[line.weight]["exp_avg"], [[0.2]])
    assert module.updates == 1 and line.weight.grad is None


@pytest.mark.parametrize(
    "step",
    [AuxiliaryModule.update, lambda module, loss: module.descend([loss], lambda g: g)],
    ids=["update", "descend"],
)
def test_small_updates_of_rounded_weights_add_up(step):
    """A step of 2^-10 is lost beside 1 in bfloat16, ten of them are not; a state goes on where it was."""
    line = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.ones_(line.weight)
    module = AuxiliaryModule(line, lr=2**-10)
    for _ in range(5):
        step(module, line.weight.sum())
    other = AuxiliaryModule(torch.nn.Linear(1, 1, bias=False).bfloat16(), lr=2**-10)
    other.load(module.state())
    for _ in range(5):
        step(other, other.module.weight.sum())
    close(other.module.weight.detach().float(), [[0.9922]], atol=1e-4)


def test_memory_of_a_copy():
    assert trained_copy_bytes(10, 10, 4) == 10 * 16 and trained_copy_bytes(10, 2, 2) == 20 + 2 * 18


# --- a tiny real policy ---


def test_after_scores_by_weights_that_have_not_learned(tmp_path):
    """The copy is still the reference: no token earns anything, and the loss is log 2."""
    trainer, rollouts, batch, _ = stepped(tmp_path, prime(", updates: after"))
    close(column(rollouts), torch.zeros(rollouts.mask.shape), atol=1e-6)
    assert batch.reports["implicit_process/loss"] == pytest.approx(math.log(2), abs=1e-6)
    release(trainer)


def test_rewards_are_log_ratios_and_go_into_the_advantages(tmp_path):
    """A step towards the outcomes: right ones earn more than wrong ones, and the policy itself stays as it was."""
    trainer, rollouts, batch, before = stepped(tmp_path, prime(", weight: 2, outcome: 3, gamma: 0.5"))
    policy, outcome = trainer.policy, rollouts.rewards[:, 0]
    assert 0 < outcome.sum() < len(outcome)
    (module,) = [m.module for m in trainer.preparation.modules._modules.values()]
    with torch.no_grad():
        ratio = policy.replay(rollouts, module).logp - policy.replay(rollouts, policy.module).logp
    close(column(rollouts), (0.5 * ratio).where(rollouts.mask, 0), atol=1e-5)
    earned = column(rollouts).sum(1)
    assert earned[outcome == 1].mean() > earned[outcome == 0].mean() + 0.1
    assert batch.reports["implicit_process/loss"] < math.log(2)
    right = ((earned > 0) == (outcome > 0.5)).float().mean()
    assert batch.reports["implicit_process/accuracy"] == pytest.approx(float(right))
    plain = torch.zeros(len(outcome))
    for g in rollouts.group.unique():
        rows = rollouts.group == g
        plain[rows] = outcome[rows] - (outcome[rows].sum() - outcome[rows]) / (rows.sum() - 1)
    process = leave_one_out_returns(column(rollouts), rollouts.mask, rollouts.group, 0.5)
    expected = 3 * plain[:, None] + 2 * process
    close(rollouts.advantages.where(rollouts.mask, 0), expected.where(rollouts.mask, 0), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in policy.module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    release(trainer)


def test_advantages_as_the_released_code_has_them(tmp_path):
    """n / (n - 1) times the distance from the mean of the group's means, of rewards over their largest return."""
    trainer, rollouts, _, _ = stepped(tmp_path, prime(", outcome: 0, baseline: released, normalise: true"))
    earned = column(rollouts)
    largest = max(abs(float(row[t:].sum())) for row in earned for t in range(len(row)))
    expected = torch.zeros_like(earned)
    for g in rollouts.group.unique():
        rows = (rollouts.group == g).nonzero().flatten().tolist()
        mean = sum(float(earned[r].sum() / rollouts.mask[r].sum()) for r in rows) / len(rows)
        for r in rows:
            distances = ((earned[r] - mean) * len(rows) / (len(rows) - 1) / largest).where(rollouts.mask[r], 0)
            expected[r] = distances.flip(0).cumsum(0).flip(0).where(rollouts.mask[r], 0)
    assert largest > 1.5 and expected.abs().max() > 0.1
    close(rollouts.advantages.where(rollouts.mask, 0), expected, atol=1e-4)
    release(trainer)


def test_the_step_is_that_of_the_mean_loss_of_all_rollouts(tmp_path):
    """Adam's first moment is a tenth of the gradient, which torch computes here from one batch of all."""
    trainer, rollouts, _, _ = stepped(tmp_path, prime(", updates: after"))
    policy, outcome = trainer.policy, rollouts.rewards[:, 0]
    ratio = policy.replay(rollouts, policy.module).logp - rollouts.ref_logp
    logits = 0.5 * ratio.where(rollouts.mask, 0).sum(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, outcome)
    gradients = torch.autograd.grad(loss, [p for p in policy.module.parameters() if p.requires_grad], allow_unused=True)
    (module,) = trainer.preparation.modules._modules.values()
    for weight, gradient in zip(module.weights, gradients, strict=True):
        if gradient is not None:
            close(module.optimizer.state[weight]["exp_avg"], 0.1 * gradient, atol=1e-5)
    release(trainer)


def test_the_unscored_teach_nothing_and_earn_nothing(tmp_path):
    """The copy learns from the others alone, and their baseline is of the others alone."""
    trainer, rollouts, _, _ = stepped(tmp_path, prime(", updates: after"))
    policy, parts = trainer.policy, trainer.preparation.cut(rollouts, torch.Generator().manual_seed(0))
    trainer.preparation.modules = AuxiliaryModules()
    rollouts.rewards[0] = torch.nan
    rollouts.filler = torch.arange(len(rollouts)) == 1
    trainer.preparation.measure(rollouts, parts, 0)
    (module,) = trainer.preparation.modules._modules.values()
    ratio = policy.replay(rollouts, policy.module).logp - rollouts.ref_logp
    logits = 0.5 * ratio.where(rollouts.mask, 0).sum(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[2:], rollouts.rewards[2:, 0])
    gradients = torch.autograd.grad(loss, [p for p in policy.module.parameters() if p.requires_grad], allow_unused=True)
    for weight, gradient in zip(module.weights, gradients, strict=True):
        if gradient is not None:
            close(module.optimizer.state[weight]["exp_avg"], 0.1 * gradient, atol=1e-5)
    release(trainer)


def test_credit_falls_on_the_planted_step(tmp_path):
    """A response is wrong where one of its tokens is of a sixth of the vocabulary, wherever it stands. In rollouts that
    it has not learned from, the copy gives the planted token of a wrong response the least process reward."""
    trainer, rollouts, _, _ = stepped(tmp_path, prime(", updates: after"), "rollout.max_response_length=4")
    preparation, seen = trainer.preparation, []
    for step in range(1, 41):
        rollouts = trainer.collector.next(step, Metrics(trainer.engine))
        planted = (trainer.policy.decision_ids(rollouts) % 6 == 0) & rollouts.mask
        rollouts.rewards[:, 0] = (~planted.any(1)).float()
        parts = preparation.cut(rollouts, torch.Generator().manual_seed(step))
        preparation.compute_logprobs(rollouts, parts)
        preparation.measure(rollouts, parts, step)
        if step > 30:
            seen.append((column(rollouts), planted, rollouts.mask))
    credit, planted, mask = (torch.cat(part) for part in zip(*seen, strict=True))
    wrong = planted.sum(1) == 1
    blamed, others = credit[planted & wrong[:, None]], credit[~planted & mask & wrong[:, None]]
    least = credit[wrong].where(mask[wrong], torch.inf).argmin(1)
    share = planted[wrong].gather(1, least[:, None]).float().mean()
    assert blamed.mean() < 0 and blamed.mean() < others.mean() - 0.3 and share > 0.8
    release(trainer)


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    options = (OUTCOME, *PLAIN, prime(", lr: 0.001").replace("lr: 0.01, ", ""), "checkpoint.every=2")
    train(tmp_path / "whole", *options, "steps=4")
    train(tmp_path / "parts", *options, "steps=2")
    train(tmp_path / "parts", *options, "steps=4", resume=True)
    assert distance(final(tmp_path / "whole"), final(tmp_path / "parts")) == 0
    rows, others = ([row for row in timeless(metrics(tmp_path / name)) if "loss" in row] for name in ("whole", "parts"))
    assert rows == others
    assert len({row["implicit_process/loss"] for row in rows}) == len(rows) == 4


def run(folder):
    train(folder, OUTCOME, *PLAIN, prime().replace("lr: 0.01", "lr: 0.001"), "steps=2")


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path):
    """Gradients of the copy are summed over ranks, and its loss is of the rollouts of both."""
    for name, ranks in (("one", 1), ("two", 2)):
        call(run, tmp_path / name, log=tmp_path / f"{name}.log", ranks=ranks)
    rows, others = ([row["implicit_process/loss"] for row in metrics(tmp_path / name)[:2]] for name in ("one", "two"))
    close(rows, others, atol=1e-5)
    assert distance(final(tmp_path / "one"), final(tmp_path / "two")) < 1e-5


# --- refusals ---


def test_outcomes_are_0_or_1(tmp_path):
    with pytest.raises(UserError, match=r"label=reward/spread is 0\.\d+ for a rollout, but must be 0 or 1"):
        stepped(
            tmp_path,
            "task.rewards=[{name: 'tests.whole_runs.parts:spread', label: spread}]",
            prime().replace("half", "spread"),
        )


@pytest.mark.parametrize(
    ("base", "overrides", "message"),
    [
        (TINY, [prime(), "engine.zero_stage=3"], "engine.zero_stage=3 shards the weights"),
        (ROBOTS, [prime()], "implicit_process.* needs decisions that are indices into a list"),
    ],
)
def test_what_does_not_fit_is_refused(base, overrides, message):
    with pytest.raises(UserError, match=message):
        load(Path(base), [f"run_dir={HERE}", *overrides])


def test_an_outcome_that_the_task_lacks_is_refused(tmp_path):
    with pytest.raises(UserError, match="reads reward/other, but the task.s rewards are half"):
        make(tmp_path, OUTCOME, prime().replace("reward/half", "reward/other"))
