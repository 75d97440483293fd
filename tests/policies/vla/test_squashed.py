"""The squashed Gaussian head: actions and densities as torch's own distribution has them."""

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from mmrl.errors import UserError
from mmrl.policies.vla.backbones.backbone import CachedPrefix
from mmrl.policies.vla.heads.gaussian import log_slope_of_tanh
from mmrl.policies.vla.heads.head import ActionSampling
from tests.policies.vla.test_critics import quiet
from tests.whole_runs import parts
from tests.whole_runs.parts import ROBOTS, metrics, release, train

pytestmark = pytest.mark.usefixtures("alone")
HEAD = "{type: squashed_gaussian, width: 16, layers: 1}"


def head_by_hand(make, level="action"):
    """A head of chunks of two actions of one number, whose means in state 0.3 are 1.1 and 0.2, with deviation 0.5."""
    policy = make({"type": "squashed_gaussian", "layers": 0, "std": 0.5, "level": level}, sim=quiet(), chunk=2)
    head = policy.module.head
    with torch.no_grad():
        last = head.layers[0]
        last.weight.zero_()
        last.weight[:, -1] = torch.tensor([2.0, 1.0])
        last.bias.copy_(torch.tensor([0.5, -0.1]))
    return head


def prefix(rows=1):
    return CachedPrefix(torch.zeros(rows, 1, 32), torch.ones(rows, 1)), torch.full((rows, 1), 0.3)


def density(temperature=1.0):
    normal = Normal(torch.tensor([1.1, 0.2]), 0.5 * temperature)
    return TransformedDistribution(normal, [TanhTransform(cache_size=1)])


def test_the_likeliest_actions_are_the_tanh_of_the_mean(make):
    sampled = head_by_hand(make).act(*prefix(), ActionSampling([5], temperature=0.0))
    assert sampled["actions"].flatten().tolist() == pytest.approx([0.800499, 0.197375], abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_densities_are_those_of_torch(make, temperature):
    head = head_by_hand(make)
    sampled = head.act(*prefix(4), ActionSampling([1, 2, 3, 4], temperature=temperature))
    actions = sampled["actions"][..., 0]
    assert actions.abs().max() < 1 and len(actions.unique()) == 8
    valid = torch.tensor([[True, True]] * 3 + [[True, False]])
    fields = head.score(*prefix(4), sampled, valid, None, None)
    expected = density(temperature).log_prob(actions).where(valid, 0)
    assert torch.allclose(fields["logp"], expected, atol=1e-5)
    assert "entropy" not in fields
    whole = head_by_hand(make, level="chunk").score(*prefix(4), sampled, valid, None, None)
    assert torch.allclose(whole["logp"][:, 0], expected.sum(1), atol=1e-5)


def test_samples_are_spread_as_the_density_says(make):
    """Of 2000 samples as many lie below each tenth as torch's distribution function says."""
    sampled = head_by_hand(make).act(*prefix(2000), ActionSampling(list(range(2000))))
    below = density().cdf(sampled["actions"][..., 0].double().float())
    for column in below.T:
        counts = torch.histc(column, 10, 0, 1)
        assert (counts - 200).abs().max() < 60, counts


def test_demonstrated_actions_are_scored_as_they_are(make):
    head = head_by_hand(make)
    actions = torch.tensor([[[0.5], [-0.9]], [[1.0], [-1.0]]])
    sampled = head.encode_demonstrations(actions, [0, 1])
    fields = head.score(*prefix(2), sampled, torch.ones(2, 2, dtype=torch.bool), None, None)
    inside = actions[..., 0].clamp(-1 + 1e-4, 1 - 1e-4)
    assert torch.allclose(fields["logp"], density().log_prob(inside), atol=2e-3)
    assert fields["logp"].isfinite().all()


def test_the_slope_of_tanh_does_not_cancel():
    x = torch.tensor([0.0, 1.0, -1.0, 30.0])
    # log(1 - tanh^2): 0, log(0.419974), the same, and log(4) - 2 * 30 where tanh is 1 in single precision
    assert log_slope_of_tanh(x).tolist() == pytest.approx([0.0, -0.867562, -0.867562, 1.386294 - 60], abs=1e-5)


def test_ppo_learns_with_it_and_its_first_ratio_is_one(tmp_path):
    options = [f"action.head={HEAD}", "steps=2", "algorithm={type: ppo, minibatches: 2}", "engine.micro_batch=2"]
    train(tmp_path, *options, base=ROBOTS)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    trainer = parts.make(tmp_path / "ratio", *options, base=ROBOTS)
    rollouts = trainer.policy.rollout([trainer.task.train[0]], 2, [3, 4])
    first, second = (trainer.policy.replay(rollouts, trainer.policy.module).logp for _ in range(2))
    assert torch.equal(first, second) and first[rollouts.mask].std() > 0
    release(trainer)


def test_a_term_that_needs_its_entropy_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"algorithm.terms.0 \(entropy\)"):
        parts.make(tmp_path, f"action.head={HEAD}", "algorithm.terms=[{type: entropy}]", base=ROBOTS)
