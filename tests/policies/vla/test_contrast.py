"""The contrast of good and bad chunks of a flow (DiffusionNFT), from what was played to the loss."""

import pytest
import torch

from mmrl.config import load
from mmrl.core.contrast import contrast, implicit_errors
from mmrl.errors import UserError
from mmrl.settings import SettingsError
from tests.policies.vla.conftest import starts
from tests.policies.vla.test_policy import SEEDS, stir, velocity
from tests.whole_runs.parts import ROBOTS, make, metrics, release

HEAD = "action.head={type: flow, width: 32, depth: 1, steps: 4, evaluation_steps: 4, likelihood: {type: contrast}}"
BETA = 0.5


@pytest.fixture(scope="module")
def moved(make):
    """A policy, what it played, and what it then said; it has moved since."""
    policy = stir(make("flow, contrast"))
    rollouts = policy.rollout(starts(0, 30, 70), 2, SEEDS)
    with torch.no_grad():
        rollouts.old_prediction = policy.replay(rollouts, policy.module).prediction
    return stir(policy, 0.1), rollouts


def by_hand(policy, look, old):
    """[draw] twice: how far from the executed actions both implicit policies lead, old [draw, chunk, action]."""
    found = []
    executed = look.valid[:, None].double()
    for k, (sigma, noise) in enumerate(zip(look.sampled["sigma"], look.sampled["noise"], strict=True)):
        data, s = look.sampled["data"].double(), float(sigma)
        noisy = (1 - s) * data + s * noise
        v = velocity(policy, look, noisy.float(), s)[0][0].double()
        errors = []
        for sign in (1, -1):
            implicit = old[k] + sign * BETA * (v - old[k])
            wrong = (noisy - s * implicit - data) * executed
            errors.append(wrong.square().sum() / wrong.abs().sum())  # a mean of squares over one of absolute values
        found.append(torch.stack(errors))
    return torch.stack(found).T


def test_errors_of_implicit_policies_by_hand(moved):
    policy, rollouts = moved
    replay = policy.replay(rollouts, policy.module)
    positive, negative = implicit_errors(replay.extras["matching"], BETA)
    assert positive.shape == rollouts.mask.shape and not torch.allclose(positive, negative)
    cut = 0
    for row, looks in enumerate(rollouts.inputs):
        for i, look in enumerate(looks):
            here = slice(2 * i, 2 * i + 2)
            with torch.no_grad():
                wanted = by_hand(policy, look, rollouts.old_prediction[row, here].double())
            cut += not look.valid.all()
            torch.testing.assert_close(positive[row, here].double(), wanted[0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(negative[row, here].double(), wanted[1], rtol=1e-4, atol=1e-6)
        assert not positive[row, 2 * len(looks) :].any()
    assert cut  # some episode ended inside a chunk


def test_good_chunks_are_drawn_near_and_bad_ones_pushed_away(make):
    """A step along minus the gradient lowers the flow-matching error of what was good, and raises that of the rest."""
    policy = stir(make("flow, contrast"))
    rollouts = policy.rollout(starts(0, 30), 1, SEEDS[:2])

    def errors():
        with torch.no_grad():
            return -policy.replay(rollouts, policy.module).logp.where(rollouts.mask, 0).sum(1)

    for good, bad in ((0, 1), (1, 0)):
        advantages = torch.full((2,), -5.0)
        advantages[good] = 5.0
        policy.module.zero_grad()
        before = errors()
        pair = implicit_errors(policy.replay(rollouts, policy.module).extras["matching"], BETA)
        values, stats = contrast(*pair, advantages, strength=BETA)
        values[rollouts.mask].sum().backward()
        assert stats["optimality"][:, 0].tolist() == [1.0 - good, float(good)]
        own = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
        with torch.no_grad():
            for p in policy.module.parameters():
                if p.grad is not None:
                    p -= 1e-5 * p.grad
        after = errors()
        assert after[good] < before[good] and after[bad] > before[bad]
        with torch.no_grad():
            for name, p in policy.module.named_parameters():
                p.copy_(own[name])


def test_the_key_reaches_the_loss(tmp_path, alone):
    """Before the first update both errors are that of the policy itself, so that the loss is bound / beta times it."""
    given = ["steps=1", "algorithm={type: contrast, nft_beta: 0.5, bound: 2}", "task.rewards=[{name: random}]"]
    trainer = make(tmp_path, *given, HEAD, base=ROBOTS)
    usual, seen = trainer.losses, []

    def losses(micro, totals):
        parts, stats = usual(micro, totals)
        error = implicit_errors(trainer.policy.replay(micro, trainer.policy.module).extras["matching"], 1.0)[0]
        seen.append((micro.mask, error.detach(), stats))
        return parts, stats

    trainer.losses = losses
    trainer.train()
    release(trainer)
    total = sum(error[mask].sum() for mask, error, _ in seen) / sum(mask.sum() for mask, *_ in seen)
    row = next(row for row in metrics(tmp_path) if "loss" in row)
    assert row["loss"] == pytest.approx(4 * float(total), rel=1e-4) and row["grad_norm"] > 0


def test_what_does_not_go_together_is_one_line():
    with pytest.raises((SettingsError, UserError), match="action.head.likelihood.type=contrast compares implicit"):
        load(ROBOTS, ["run_dir=unused", HEAD])
    with pytest.raises((SettingsError, UserError), match="algorithm.type=contrast needs decisions that are errors"):
        load(ROBOTS, ["run_dir=unused", "algorithm={type: contrast}"])
