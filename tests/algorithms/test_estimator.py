"""Advantages as baselines, scales, components and transforms compose them, of shipped classes and of one's own."""

import math
import statistics
import warnings

import pytest
import torch

from mmrl import kernels
from mmrl.algorithms import estimator
from mmrl.algorithms.baselines.baseline import Baseline, Mean
from mmrl.algorithms.grpo import GRPO
from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.algorithms.scales.components import Components
from mmrl.algorithms.scales.scale import GroupStd, Scale
from mmrl.core.advantages import subtract_mean
from mmrl.protocols.batch import Batch
from mmrl.settings import make
from tests.joints.parts import Table, close

NAN = math.nan
STATISTICS = ("mean", "leave_one_out", "length_weighted", "shrinkage")  # of the group alone
BASELINES = (*STATISTICS, "none", "quantile", "batch_mean")
SCALES = (
    *("group_std", "batch_std", "none"),
    {"type": "bucket_std", "by": "level"},
    {"type": "quantile_bucket_std", "count": 2},
)
COMPONENTS = ("sum", "normalise_each", {"type": "gated", "gates": ["a"]})
RAW = {"baseline": "none", "scale": "none"}
HERE = "tests.algorithms.test_estimator"


def prepared(rewards, group, weights=None, levels=None, lengths=None, **options):
    """The algorithm and the batch of rewards [rollout] or [rollout][component], named a, b, ..."""
    logp = [[-1.0] * length for length in lengths or [1] * len(rewards)]
    metadata = None if levels is None else [{"level": level} for level in levels]
    rollouts = Table(logp, group=group, rewards=rewards, metadata=metadata).rollouts()
    components = rollouts.rewards.shape[1]
    return make(GRPO, options), Batch(rollouts, list("abc")[:components], weights or [1.0] * components)


def advantages(rewards, group, **options):
    algorithm, batch = prepared(rewards, group, **options)
    return algorithm.advantages(batch)


# --- values ---


def test_each_component_is_normalised_and_their_scales_do_not_matter():
    # One group, columns (0 0 1 1) and (0 1 0 1) with weights 1, 2: each normalises to -+c with the same c (mean 1/2,
    # deviations 1/2, std sqrt(1/3)); S = c (-3, 1, -1, 3), whose mean is 0 and unbiased std c sqrt(20 / 3).
    table, options = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], {"group": [5] * 4, "weights": [1.0, 2.0]}
    expected = [a / math.sqrt(20 / 3) for a in (-3, 1, -1, 3)]
    close(advantages(table, **options, components="normalise_each"), expected, atol=5e-6)
    scaled = [[a, 100 * b] for a, b in table]
    close(advantages(scaled, **options, components="normalise_each"), expected, atol=5e-6)
    assert (advantages(scaled, **options) - advantages(table, **options)).abs().max() > 0.1  # of a sum they do


def test_each_component_against_a_loop():
    g = torch.Generator().manual_seed(0)
    table, group, w = torch.randn(12, 3, generator=g), [0, 1, 2] * 4, [1.0, -0.5, 2.0]
    mixed = [0.0] * 12
    for k in range(3):
        for rows in ([i for i in range(12) if group[i] == j] for j in range(3)):
            column = [table[i, k].item() for i in rows]
            for i in rows:
                mixed[i] += w[k] * (table[i, k].item() - statistics.mean(column)) / (statistics.stdev(column) + 1e-6)
    expected = [(x - statistics.mean(mixed)) / (statistics.stdev(mixed) + 1e-6) for x in mixed]
    found = advantages(table.tolist(), group, components="normalise_each", weights=w)
    close(found, expected, atol=1e-5)


def test_what_is_scored_in_one_component_alone_has_no_part():
    # The second rollout lacks b: a is 0 and 4 around 2, b is 1 and 3 around 2; both -1, 1, whose std is sqrt(2).
    table = [[0.0, 1.0], [90.0, NAN], [4.0, 3.0]]
    found = advantages(table, [0] * 3, components="normalise_each", scale="group_std")
    close(found, [-1 / math.sqrt(2), 0.0, 1 / math.sqrt(2)], atol=5e-6)
    assert advantages(table, [0] * 3, weights=[1.0, 0.0], scale="none")[1] > 50  # a component of weight 0 is no matter


def test_a_statistic_of_the_group_is_divided_by_the_deviation_of_the_rewards():
    # 0 1 5 with lengths 1 1 2: less 2.75; around 2 squares 4 + 1 + 9 over 2. Of the others: 3, 2.5, 0.5.
    options = {"rewards": [0.0, 1.0, 5.0], "group": [3] * 3, "lengths": [1, 1, 2], "levels": ["x"] * 3}
    std = math.sqrt(7)
    expected = [a / std for a in (-2.75, -1.75, 2.25)]
    close(advantages(**options, baseline="length_weighted", scale=SCALES[3]), expected, atol=5e-6)
    close(
        advantages(**options, baseline="leave_one_out", scale=SCALES[3]), [a / std for a in (-3, -1.5, 4.5)], atol=5e-6
    )


def test_a_value_that_is_subtracted_first_changes_what_divides():
    # Medians 2 and 4: -1, 0, 4, -4, 0, 1 around 0, squares 34 over 5. The rewards around 3: squares 28 over 5.
    options = {"rewards": [1.0, 2.0, 6.0, 0.0, 4.0, 5.0], "group": [0, 0, 0, 1, 1, 1], "scale": "batch_std"}
    expected = [a / math.sqrt(34 / 5) for a in (-1, 0, 4, -4, 0, 1)]
    close(advantages(**options, baseline="quantile"), expected, atol=5e-6)
    close(advantages(**options), [a / math.sqrt(28 / 5) for a in (-2, -1, 3, -3, 1, 2)], atol=5e-6)


def test_statistics_are_of_the_reward_before_transforms():
    # 0 and 2; 7 and 7; what is not scored has no part. Around 4: 16 + 4 + 9 + 9 over 3.
    algorithm, batch = prepared([0.0, NAN, 2.0, 7.0, NAN, 7.0], [0, 0, 0, 1, 1, 1], transforms=["rank"])
    close(algorithm.advantages(batch), [-1 / math.sqrt(2), 0, 1 / math.sqrt(2), 0, 0, 0], atol=5e-6)
    expected = {
        "groups": 2,
        "zero_variance_groups": 0.5,
        "small_groups": 0,
        "reward_nan_rate": 1 / 3,
        "reward_mean": 4,
        "reward_std": math.sqrt(38 / 3),
        "reward_std_within": math.sqrt(2) / 2,
    }
    assert batch.reports == pytest.approx({f"advantages/{name}": value for name, value in expected.items()})


def test_a_group_of_one_is_told():
    with pytest.warns(UserWarning, match="group of one"):
        close(advantages([5.0, 1.0, 3.0], [0, 1, 1], scale="none"), [0, -1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(advantages([5.0, 1.0, 3.0], [0, 1, 1], **RAW), [5, 1, 3])


# --- what holds for all of them ---


@pytest.mark.parametrize("components", COMPONENTS, ids=str)
@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("baseline", STATISTICS)
def test_equal_rewards_give_exactly_zero(baseline, scale, components):
    # 0.1 seven times: the fp32 mean rounds away from 0.1; the other groups differ so that every scale is positive
    rewards, group = [0.1] * 7 + [0.3, 0.9, 0.2, 0.7, 1.3, 0.4], [4] * 7 + [1, 1, 1, 2, 2, 2]
    options = {"baseline": baseline, "scale": scale, "components": components, "group": group}
    options |= {"levels": [row // 4 % 2 for row in range(13)], "lengths": [row % 5 + 1 for row in range(13)]}
    found = advantages([[reward, reward] for reward in rewards], **options)
    assert found[:7].tolist() == [0.0] * 7
    assert (found[7:] != 0).any() and found.isfinite().all()
    assert advantages([[0.1, 0.1]] * 13, **options).tolist() == [0.0] * 13


@pytest.mark.parametrize("components", COMPONENTS, ids=str)
@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("baseline", BASELINES)
def test_the_order_of_rollouts_does_not_matter(baseline, scale, components):
    g = torch.Generator().manual_seed(1)
    table, order = torch.randn(9, 2, generator=g), torch.randperm(9, generator=g).tolist()
    table[2, 1] = NAN
    group = [5, -3, 5, 2**40, -3, 5, 2**40, -3, 2**40]
    columns = {"rewards": table.tolist(), "group": group}
    columns |= {"levels": [row // 4 % 2 for row in range(9)], "lengths": [row % 5 + 1 for row in range(9)]}
    options = {"baseline": baseline, "scale": scale, "components": components}
    straight = advantages(**columns, **options)
    shuffled = advantages(**{name: [values[row] for row in order] for name, values in columns.items()}, **options)
    close(shuffled, straight[order], atol=2e-5)
    assert straight[2] == 0 and straight.isfinite().all() and straight.abs().sum() > 1


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none", "quantile"])
def test_the_fused_pass_computes_what_is_composed(monkeypatch, baseline, scale):
    g = torch.Generator().manual_seed(2)
    rewards, group = torch.randn(60, generator=g), torch.randint(0, 9, (60,), generator=g)
    rewards[::7], rewards[group == 4] = NAN, 0.3
    columns = {"rewards": rewards.tolist(), "group": group.tolist(), "baseline": baseline, "scale": scale}
    fused = advantages(**columns)
    monkeypatch.setattr(estimator, "FUSED_SCALES", {})
    composed = advantages(**columns)
    close(composed, fused, atol=1e-6)
    assert fused.abs().sum() > 1


def test_the_fused_pass_is_taken_where_it_can_be(monkeypatch):
    """By classes that inherit what it computes too, and by no other ones."""
    seen = []
    usual = kernels.group_advantage
    told = {"baseline": "none", "scale": "none"}  # moments of groups alone are asked for so
    monkeypatch.setattr(kernels, "group_advantage", lambda *a, **o: (seen.append(o), usual(*a, **o))[1])
    for options, expected in (
        ({}, {"baseline": "mean", "scale": "group_std"}),
        ({"baseline": "quantile", "scale": "batch_std"}, {"baseline": "none", "scale": "batch_std"}),
        ({"baseline": "leave_one_out", "scale": "none"}, {"baseline": "leave_one_out", "scale": "none"}),
        ({"baseline": f"{HERE}:Expected"}, {"baseline": "none", "scale": "group_std"}),
        ({"baseline": f"{HERE}:Least"}, None),
        ({"scale": f"{HERE}:Spread"}, None),
        ({"scale": f"{HERE}:ByLevel"}, None),
        ({"baseline": "shrinkage"}, None),
    ):
        seen.clear()
        advantages(**TWO, **options)
        assert [call for call in seen if call != told] == ([] if expected is None else [expected]), options


# Groups of two. 0: the first varies | 1: both vary and cancel | 2: the second varies | 3: one of them is unscored
TABLE = [[0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, NAN], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("weights", "components", "expected", "flat"),
    [
        ([1.0, 1.0], "sum", {0, 2}, 1),
        ([1.0, 2.0], "sum", {0, 1, 2}, 0),
        ([1.0, 0.0], "sum", {0, 1, 3}, 1),  # a component of weight 0 is not looked at
        ([0.0, 1.0], "sum", {1, 2}, 1),
        ([1.0, 2.0], "normalise_each", {0, 1, 2}, 0),
        ([1.0, 0.0], "normalise_each", {0, 1, 3}, 1),
        # 1: 0 x 1 and 1 x 0; 3: a closed gate is 0, whatever is behind
        ([1.0, 1.0], {"type": "gated", "gates": ["a"]}, {0, 2}, 2),
        ([1.0, 1.0], {"type": "gated", "gates": ["b"]}, {0, 2}, 1),  # 3: one of them can not be scored
    ],
)
def test_groups_are_informative_by_what_advantages_are_made_of(weights, components, expected, flat):
    group = [0, 0, 1, 1, 2, 2, 3, 3]
    algorithm, batch = prepared(TABLE, group, weights, components=components)
    kept = algorithm.informative(batch.rollouts, batch.reward_weights, batch.reward_names)
    assert {g for g, keep in zip(group, kept.tolist(), strict=True) if keep} == expected
    moved = algorithm.advantages(batch).view(4, 2).ne(0).any(1)
    assert set(moved.nonzero().flatten().tolist()) == expected
    assert batch.reports["advantages/zero_variance_groups"] == flat / 4


def test_components_that_cancel_in_the_sum_are_still_informative_each():
    algorithm, batch = prepared(TABLE, [0, 0, 1, 1, 2, 2, 3, 3], components="normalise_each")
    kept = algorithm.informative(batch.rollouts, batch.reward_weights, batch.reward_names)
    assert kept.tolist() == [True] * 6 + [False] * 2


# --- classes of one's own ---


class Expected(Baseline):
    """What is known of a prompt beforehand."""

    def compute(self, rewards, batch, combine):
        return batch.column("level")


class Least(Baseline):
    """The worst of the group."""

    def center(self, rewards, index, group_moments, batch):
        least = torch.stack([rewards[index == g].min() for g in index.unique()])
        return rewards - least[index]


class LeastOfExpected(Expected, Least):
    """Both."""


class ByLevel(Scale):
    """The deviation of a level."""

    def buckets(self, batch):
        return batch.column("level")


class Spread(GroupStd):
    """The widest difference of a bucket, here a group."""

    def divide(self, differences, rewards, buckets):
        found = torch.zeros_like(rewards)
        for bucket in buckets.unique():
            rows = buckets == bucket
            found[rows] = differences[rows] / (rewards[rows].max() - rewards[rows].min())
        return found


class Product(Components):
    """All rewards have to be good."""

    def total(self, rewards, weights, names):
        return rewards.prod(1)


class Difference(Components):
    """The advantage of the first, less that of the last."""

    def combine(self, estimate, rewards, weights, names):
        return estimate(rewards[:, 0]) - estimate(rewards[:, -1])


class Doubled(Transform):
    """Twice the reward."""

    def change(self, rewards, batch):
        return 2 * rewards


TWO = {"rewards": [1.0, 3.0, 5.0, 9.0], "group": [0, 0, 1, 1], "levels": [1, 1, 1, 4]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "Expected", "scale": "none"}, [0, 2, 4, 5]),
        ({"baseline": "Least", "scale": "none"}, [0, 2, 0, 4]),
        ({"baseline": "LeastOfExpected", "scale": "none"}, [0, 2, 0, 1]),
        ({"baseline": "Expected"}, [0, 2 / math.sqrt(2), 4 / math.sqrt(0.5), 5 / math.sqrt(0.5)]),
        ({"scale": "ByLevel"}, [-0.5, 0.5, -1, 0]),  # 1 3 5 have a std of 2, 9 alone has none
        ({"scale": "Spread"}, [-0.5, 0.5, -0.5, 0.5]),
        ({"baseline": "leave_one_out", "scale": "Spread"}, [-1, 1, -1, 1]),
        ({"transforms": ["Doubled"], "scale": "none"}, [-2, 2, -4, 4]),
        ({"transforms": ["Doubled"], "baseline": "Expected", "scale": "none"}, [1, 5, 9, 14]),  # the value comes last
    ],
)
def test_classes_of_one_s_own(options, expected):
    named = {
        key: [f"{HERE}:{name}" for name in value] if key == "transforms" else f"{HERE}:{value}"
        for key, value in options.items()
        if value not in ("none", "leave_one_out")
    }
    close(advantages(**TWO, **options | named), expected, atol=2e-5)


def test_components_of_one_s_own():
    # Products 2, 12, -8 around 2; centred a is -2, 1, 1 and b 1, 2, -3.
    table, options = [[1.0, 2.0], [4.0, 3.0], [4.0, -2.0]], {"group": [0] * 3, "scale": "none"}
    close(advantages(table, **options, components=f"{HERE}:Product"), [0, 10, -10])
    close(advantages(table, **options, components=f"{HERE}:Difference"), [-3, -1, 4])


class First(Mean):
    """One more for the first group."""

    def center(self, rewards, index, group_moments, batch):
        return subtract_mean(rewards, index, group_moments) + (index == 0)


class FirstOfAll(First):
    """Equal rewards count too."""

    zero_if_equal = False


@pytest.mark.parametrize(("baseline", "equal"), [(First(), 0.0), (FirstOfAll(), 0.5)])
def test_equal_rewards_stay_without_advantage_where_the_baseline_is_within_the_group(baseline, equal):
    # 1, 1 and 0, 2 around 1, twice: together 2, 2, -2, 2, less 1 over a std of 2 (squares 1 + 1 + 9 + 1 over 3)
    table, options = [[1.0, 1.0], [1.0, 1.0], [0.0, 4.0], [2.0, 6.0]], {"scale": "none", "components": "normalise_each"}
    close(advantages(table, [0, 0, 1, 1], baseline=baseline, **options), [equal, equal, -1.5, 0.5], atol=5e-6)
