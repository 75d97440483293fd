"""Weights of tokens by how far the distributions of a group's rollouts are apart (TW-GRPO): against numbers of the
public file, and from the YAML key to advantages with transformers' own logits of a real model."""

import math

import pytest
import torch

from mmrl.core.credit import divergence_in_group, scale_within_group
from mmrl.errors import UserError
from mmrl.training.metrics import Metrics
from tests.joints.parts import Table, close
from tests.whole_runs.parts import make, release
from tests.whole_runs.test_teachers import distribution, prepared

pytestmark = pytest.mark.usefixtures("alone")
LONG = "rollout.max_response_length=24"  # some responses end before


def test_weights_of_the_public_file():
    """longmalongma/TW-GRPO at aa529ff, compute_token_importance_kl_logs_uniform with max_weight 1.4, executed."""
    first = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]
    second = [[0.1, 0.1, 0.8], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]]
    mask, group = torch.tensor([[True, True, True], [True, True, False]]), torch.tensor([4, 4])
    logp = torch.tensor([first, second]).log()
    parts = (divergence_in_group(logp[..., part], mask, group, 3) for part in ([0], [1, 2]))
    scaled = scale_within_group(sum(parts), mask, group)
    close(1 + 0.4 * scaled, [[1.4, 1.00836647, 1.0]] * 2, atol=1e-6)


def test_improbable_tokens_count_up_to_a_bound():
    """Log-probabilities of 1e-12 and 1 are 13.8 from their mean: the difference counts as 11."""
    few = 1e-12
    logp = torch.tensor([[[1 - few, few]], [[few, 1 - few]]], dtype=torch.float64).log()
    found = divergence_in_group(logp, torch.ones(2, 1, dtype=torch.bool), torch.zeros(2), 2)
    expected = math.exp(11) - 11 - 1 + math.exp(-11) + 11 - 1
    close(found, torch.full((2, 1), expected, dtype=torch.float64), atol=1e-6)


def test_groups_and_rollouts_that_ended_are_apart():
    """The second group is equal at its only position; values of positions outside its mask are not in its range."""
    values = torch.tensor([[3.0, 5.0, 4.0], [3.0, 5.0, 4.0], [7.0, 9.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [True, False, False]])
    found = scale_within_group(values, mask, torch.tensor([0, 0, 1]))
    close(found[mask], [0.0, 1.0, 0.5, 0.0, 0.0], atol=1e-6)


def expected_weights(policy, micros, largest):
    """1 + (largest - 1) D / range by group and position, from logits of one rollout at a time."""
    rows = [row for micro in micros for row in micro.inputs]
    groups = torch.cat([micro.group for micro in micros]).tolist()
    with torch.no_grad():
        logp = [distribution(policy, policy.module.model, row) for row in rows]
    logp = [values[:, values[0].isfinite()].double() for values in logp]
    weights = [[0.0] * len(values) for values in logp]
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        divergences = []
        for t in range(max(len(logp[i]) for i in members)):
            uniform = torch.full(logp[0].shape[1:], -math.log(logp[0].shape[1]), dtype=torch.float64)
            at = torch.stack([logp[i][t] if t < len(logp[i]) else uniform for i in members])
            d = (at.mean(0) - at).clamp(-11, 11)
            divergences.append(float((d.exp() - d - 1).sum() / len(members)))
        least, most = min(divergences), max(divergences)
        for i in members:
            for t in range(len(logp[i])):
                weights[i][t] = 1 + (largest - 1) * (divergences[t] - least) / (most - least)
    return weights


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """A trainer of a real model, and the rollouts of a step, whose rewards and lengths differ within a group."""
    rewards = "task.rewards=[{name: 'tests.whole_runs.parts:spread', weight: 1.0}]"
    trainer = make(tmp_path_factory.mktemp("learner"), rewards, LONG)
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    # The two shortest responses, twice, take the place of the first group, which so ends before the others do.
    group, shortest = rollouts.group, rollouts.mask.sum(1).argsort()[:2]
    rollouts = rollouts.select(torch.cat([shortest, shortest, torch.arange(4, len(rollouts))]))
    rollouts.group = group
    lengths = rollouts.mask.sum(1)
    assert lengths[0] < lengths[1] < lengths[4:].max() == rollouts.mask.shape[1]
    yield trainer, rollouts
    release(trainer)


@pytest.mark.parametrize("block", [7, 32768])
def test_advantages_of_a_real_model(learner, block):
    shaper = f"{{type: divergence_weight, max_weight: 1.9, block: {block}}}"
    plain, micros = prepared(learner, "{type: grpo}", LONG)
    _, weighted = prepared(learner, f"{{type: grpo, shaping: [{shaper}]}}", LONG)
    expected = expected_weights(plain.policy, micros[0], 1.9)
    assert {round(weight, 3) for row in expected for weight in row} > {1.0, 1.9}
    advantages = []
    for before, after in zip(micros[0], weighted[0], strict=True):
        for row in range(len(before)):
            mask, weights = before.mask[row], torch.tensor(expected.pop(0))
            advantages.append(float(before.advantages[row][mask][0]))
            close(after.advantages[row][mask], before.advantages[row][mask] * weights, atol=1e-4)
    assert not expected and sum(abs(advantage) > 0.01 for advantage in advantages) > len(advantages) // 2


def test_kl_of_a_real_model_has_the_same_weights(learner):
    """The mean over decisions of -0.5 w KL, the divergence from the policy without text, which is maximized."""
    kl = "{type: kl, coefficient: 0.5, against: {type: view, view: {type: no_text}, bound: 1e6}, weighting: %s}"
    plain, micros = prepared(learner, f"{{type: grpo, terms: [{kl % 'null'}]}}", LONG)
    probe, weighted = prepared(learner, f"{{type: grpo, terms: [{kl % '{type: divergence, max_weight: 1.9}'}]}}", LONG)
    expected = expected_weights(plain.policy, micros[0], 1.9)
    for before, after in zip(micros[0], weighted[0], strict=True):
        weights = torch.cat([torch.tensor(expected.pop(0)) for _ in range(len(before))])
        denominators = plain.algorithm.denominators(before)
        divergence = plain.losses(before, denominators)[1]["view_kl"][before.mask]
        parts, statistics = probe.losses(after, denominators)
        close(parts["algorithm.terms.0 (kl)"].detach(), -0.5 * (weights * divergence).mean(), atol=1e-4)
        close(statistics["divergence_kl"][after.mask], divergence, atol=1e-5)
        assert (weights * divergence - divergence).abs().max() > 0.01
    assert not expected


def test_policies_without_a_vocabulary_are_refused(given):
    with pytest.raises(UserError, match=r"algorithm.shaping.0 \(divergence_weight\) needs .*vision_language"):
        given(Table([[-1.0]] * 2, group=[0, 0], rewards=[0.0, 1.0]), "algorithm.shaping=[divergence_weight]")
