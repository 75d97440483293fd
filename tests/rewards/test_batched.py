"""Batched and group-scoped rewards in a set: which samples they get, what becomes of their values, the background."""

import math

import pytest
import torch

from mmrl.algorithms.grpo import GRPO
from mmrl.core.advantages import group_advantages
from mmrl.errors import UserError
from mmrl.protocols.batch import Batch
from mmrl.rewards import REWARDS, BatchReward, RewardSet, RewardSpec, build
from mmrl.rewards.compose import build_reward
from mmrl.rollouts import Prompt, Sample
from mmrl.settings import make
from tests.joints.parts import Table

HERE = __name__


def sample(number):
    return Sample(Prompt(f"p{number}", "?"), response=str(number))


class Doubled:
    """2 x the response; remembers the calls."""

    scope = "sample"

    def __init__(self, *, factor: float = 2.0):
        self.factor, self.calls = factor, []

    def score(self, samples):
        self.calls.append([s.response for s in samples])
        return [self.factor * float(s.response) for s in samples]


class Lead(Doubled):
    """How far the response is above the smallest of its group."""

    scope = "group"

    def __init__(self, **options):
        super().__init__(**options)

    def score(self, samples):
        values = super().score(samples)
        return [value - min(values) for value in values]


class Says:
    """Whatever it is told to."""

    scope = "sample"

    def __init__(self, *, values):
        self.values = values

    def score(self, samples):
        return self.values


def value_of(sample, *, table):
    return table[int(sample.response)]


def test_both_kinds_side_by_side():
    rewards = RewardSet([RewardSpec(name=f"{HERE}:Doubled", label="twice"), RewardSpec(name="answer_tag")])
    tagged = [sample(3), Sample(Prompt("q", "?"), response="1")]
    assert rewards.score(tagged).tolist() == [[6, 0], [2, 0]]
    assert rewards.components[0].reward.calls == [["3", "1"]]  # all at once
    whole, single = (component.reward for component in rewards.components)
    assert isinstance(whole, BatchReward) and not isinstance(single, BatchReward)
    assert rewards.score([]).shape == (0, 2)
    assert rewards.components[0].reward.calls == [["3", "1"]]


def test_batch_size_changes_the_calls_and_not_the_scores():
    samples = [sample(n) for n in (5, 3, 8, 1, 9)]
    whole = RewardSet([RewardSpec(name=f"{HERE}:Doubled")])
    parts = RewardSet([RewardSpec(name=f"{HERE}:Doubled", batch_size=2)])
    assert torch.equal(whole.score(samples), parts.score(samples))
    assert parts.components[0].reward.calls == [["5", "3"], ["8", "1"], ["9"]]


def test_a_group_reward_gets_exactly_its_group_in_order():
    samples = [sample(n) for n in (5, 3, 8, 1, 9)]
    group = torch.tensor([7, 2, 7, 2, 7])
    rewards = RewardSet([RewardSpec(name=f"{HERE}:Lead", options={"factor": 1.0}), RewardSpec(name=f"{HERE}:Doubled")])
    scores = rewards.score(samples, group)
    assert rewards.components[0].reward.calls == [["5", "8", "9"], ["3", "1"]]
    assert scores.tolist() == [[0, 10], [2, 6], [3, 16], [0, 2], [4, 18]]
    order = torch.tensor([4, 1, 0, 3, 2])
    turned = rewards.score([samples[i] for i in order], group[order])
    assert torch.equal(turned, scores[order])


def test_a_group_reward_needs_groups():
    rewards = RewardSet([RewardSpec(name=f"{HERE}:Lead", label="lead")])
    with pytest.raises(UserError, match=r"reward 'lead': .*call score\(\) with .group."):
        rewards.score([sample(1)])
    with pytest.raises(ValueError, match="group must have shape"):
        rewards.score([sample(1)], torch.tensor([0, 0]))


def test_what_could_not_be_scored_is_nan_and_never_zero():
    bad = [None, math.nan, math.inf, -math.inf, 0.5]
    samples = [sample(n) for n in range(5)]
    rewards = RewardSet(
        [
            RewardSpec(name=f"{HERE}:Says", options={"values": bad}),
            RewardSpec(name=f"{HERE}:value_of", options={"table": bad}),
        ]
    )
    scores = rewards.score(samples)
    assert scores.isnan().tolist() == [[True, True]] * 4 + [[False, False]]
    assert scores[4].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("values", [torch.tensor([1.0, 2.0]), (1, 2), [True, torch.tensor(2.0)]])
def test_values_of_many_types(values):
    rewards = RewardSet([RewardSpec(name=f"{HERE}:Says", options={"values": values})])
    assert rewards.score([sample(0), sample(1)]).tolist() == [[1], [2]]


@pytest.mark.parametrize(
    "values, words",
    [
        ([1.0], "returned 1 values for 2 samples"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 samples"),
        ([], "returned 0 values for 2 samples"),
        ([1.0, "good"], "one number for each sample.*good"),
        ([[1.0, 2.0], [3.0, 4.0]], "one number for each sample"),
        (1.0, "one number for each sample"),
        (None, "one number for each sample"),
    ],
)
def test_wrong_values_are_refused_by_name(values, words):
    rewards = RewardSet([RewardSpec(name=f"{HERE}:Says", options={"values": values}, label="judge")])
    with pytest.raises(UserError, match=f"reward 'judge': .*{words}") as caught:
        rewards.score([sample(0), sample(1)])
    assert "\n" not in str(caught.value)


def test_options_of_classes_are_checked():
    with pytest.raises(ValueError, match="no option 'factr' .*did you mean 'factor'"):
        build(f"{HERE}:Doubled", {"factr": 1})
    with pytest.raises(ValueError, match="no option 'factr' .*did you mean 'factor'"):  # handed on to the base
        build(f"{HERE}:Lead", {"factr": 1})
    with pytest.raises(ValueError, match="needs option values"):
        build(f"{HERE}:Says")
    with pytest.raises(ValueError, match="scores batches"):
        build(f"{HERE}:Doubled", isolated=True)
    with pytest.raises(ValueError, match="'answer_tag' does not accept batch_size"):
        build_reward(RewardSpec(name="answer_tag", batch_size=2))
    with pytest.raises(ValueError, match="does not accept batch_size"):
        build_reward(RewardSpec(name=f"{HERE}:Lead", batch_size=2))
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        build_reward(RewardSpec(name=f"{HERE}:Doubled", batch_size=0))


def test_every_name_of_the_registry_refuses_an_option_it_does_not_have():
    for name in REWARDS:
        with pytest.raises(ValueError, match=f"reward '{name}' has no option 'no_such_option'"):
            build(name, {"no_such_option": 1})


def test_two_scales_keep_their_columns_and_gdpo_weighs_them_alike():
    """One reward in thousands, one in hundredths."""
    samples = [sample(n) for n in (1, 2, 3, 4)]
    group = torch.zeros(4, dtype=torch.int64)
    rewards = RewardSet(
        [
            RewardSpec(name=f"{HERE}:Doubled", weight=1.0, options={"factor": 1000.0}, label="large"),
            RewardSpec(name=f"{HERE}:Says", weight=1.0, options={"values": [0.01, 0.03, 0.02, 0.04]}, label="small"),
        ]
    )
    scores = rewards.score(samples, group)
    assert rewards.names == ("large", "small")
    torch.testing.assert_close(scores[:, 0], torch.tensor([1000.0, 2000.0, 3000.0, 4000.0]))
    torch.testing.assert_close(scores[:, 1], torch.tensor([0.01, 0.03, 0.02, 0.04]))
    weights = torch.tensor(rewards.weights)
    summed, _ = group_advantages(scores, group, weights=weights)
    # z of 1, 2, 3, 4 is (-1.5, -0.5, 0.5, 1.5) / 1.29099: the sum is the large one's alone
    torch.testing.assert_close(summed, torch.tensor([-1.5, -0.5, 0.5, 1.5]) / 1.29099, atol=1e-4, rtol=0)
    batch = Batch(Table([[-1.0]] * 4, rewards=scores.tolist()).rollouts(), rewards.names, rewards.weights)
    each = make(GRPO, {"components": "normalise_each"}).advantages(batch)
    # and z of 1, 3, 2, 4 beside it makes (-3, 0, 0, 3) / 1.29099, whose standard deviation is 6^0.5 / 1.29099
    torch.testing.assert_close(each, torch.tensor([-3.0, 0.0, 0.0, 3.0]) / 6**0.5, atol=1e-3, rtol=0)
