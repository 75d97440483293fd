"""Rollouts whose advantages are large are learned from again in later steps, those whose are small are not at all:
the source
`advantage_replay` with the term `replay_policy_gradient`, and the mask `small_advantages` (EFRame)."""

import json
import math
import random

import pytest

from mmrl.collection.replay_buffer import weighted_sample
from mmrl.errors import UserError
from tests.joints.parts import Table, close

BASE = ["rollout.prompts=1", "rollout.group_size=4", "algorithm.scale=none", "steps=20"]
TERM = "algorithm.terms=[{type: replay_policy_gradient, coefficient: 0.5%s}]"
SOURCE = "rollout.extras=[{type: advantage_replay, every: 2, least: 0.5%s}]"


def groups(rewards, size=4, **columns):
    flat = [reward for group in rewards for reward in group]
    table = {"rewards": flat, "group": [row // size for row in range(len(flat))], **columns}
    return Table([[-1.0]] * len(flat), **table)


def play(made, steps, first=0):
    found = []
    for step in range(first, first + steps):
        rollouts = made.next(step)
        made.prepare(rollouts, step)
        made.trainer.collector.observe(made.batch)
        found.append(rollouts)
    return found


def replayed(rollouts):
    """Rows of the table that are replayed, and what each is worth."""
    values = rollouts.extras["replayed_advantages"].values.tolist()
    rows = zip(rollouts.inputs, rollouts.origin.tolist(), values, strict=True)
    return {row: value for row, origin, value in rows if origin == 2 and not math.isnan(value)}


def test_large_advantages_are_replayed_as_they_were(given):
    """Advantages of the first step: 3/4 and thrice -1/4; of the second thrice 1/4 and -3/4. The second replays."""
    made = given(
        groups([[1.0, 0, 0, 0], [1.0, 1, 1, 0], [1.0, 0, 0, 0], [0.0, 0, 0, 0]]), *BASE, SOURCE % "", TERM % ""
    )
    first, second, third = play(made, 3)
    assert [replayed(rollouts) for rollouts in (first, second, third)] == [{}, {0: 0.75}, {}]
    close(second.advantages[:, 0], [0.25, 0.25, 0.25, -0.75, 0.0])
    assert second.group[-1] < 0 and second.old_logp[-1].tolist() == [-1.0]
    assert replayed(play(made, 1, first=3)[0]) == {0: 0.75, 7: -0.75, 8: 0.75}


@pytest.mark.parametrize(
    ("moved", "gradient"), [(0.1, -0.75 * math.exp(0.1)), (0.4, 0.0), (-0.4, -0.75 * math.exp(-0.4))]
)
def test_the_gradient_by_hand(given, moved, gradient):
    """The policy has moved since row 0 was sampled, so its ratio is exp(moved), clipped at 1.28. Five decisions."""
    made = given(groups([[1.0, 0, 0, 0], [1.0, 1, 1, 0]]), *BASE, SOURCE % "", TERM % "")
    play(made, 1)
    made.move(logp=[[moved], *[[0.0]] * 7])
    play(made, 1, first=1)
    made.learn()
    close(made.gradient()[:, 0] * 5, [0.5 * gradient, 0, 0, 0, -0.25, -0.25, -0.25, 0.75])
    close(made.metrics.result()["replay_policy_gradient/advantage"], 0.75)


def test_negative_advantages_are_clipped_below(given):
    made = given(groups([[1.0, 1, 1, 0], [1.0, 0, 0, 0]]), *BASE, SOURCE % "", TERM % ", low: 0.1")
    play(made, 1)
    for moved, gradient in ((-0.05, 0.75 * math.exp(-0.05)), (-0.2, 0.0)):
        made.move(logp=[*[[0.0]] * 3, [moved], *[[0.0]] * 4])
        made.trainer.policy.asked = 1
        made.trainer.collector.extras.sources[0]._steps = 1
        made.prepare(made.next(1), 1)
        made.learn()
        close(made.gradient()[3, 0] * 5, 0.5 * gradient)


def test_no_more_are_kept_and_replayed_than_are_asked_for(given):
    rows = [[1.0, 0, 0, 0]] * 4  # which come again from the fifth step on
    made = given(groups(rows), *BASE, SOURCE % ", keep: 2", TERM % "")
    assert sorted(replayed(play(made, 6)[5])) == [0, 12]  # those of the fourth and the fifth step
    made = given(groups(rows), *BASE, SOURCE % ", count: 1", TERM % "")
    drawn = [replayed(rollouts) for rollouts in play(made, 6)]
    assert [len(rows) for rows in drawn] == [0, 1, 0, 1, 0, 1]


def test_what_is_not_scored_is_not_kept(given):
    """Row 0 has the reward NaN: the others' mean is 1/3, so that row 1 is worth 2/3."""
    made = given(groups([[math.nan, 1.0, 0, 0], [0.0, 0, 0, 0]], accuracy=[0.0] * 8), *BASE, SOURCE % "", TERM % "")
    close(list(replayed(play(made, 2)[1]).items()), [[1, 2 / 3]])


def test_large_ones_may_be_drawn_more_often():
    """The first of the sample is the third of four in 6 of 10 cases, the first two in 1 of 10 each; without
    replacement."""
    drawn = [weighted_sample([1.0, 1.0, 6.0, 2.0], 3, random.Random(seed)) for seed in range(2000)]
    assert all(len(set(sample)) == 3 for sample in drawn)
    shares = [sum(sample[0] == i for sample in drawn) / 2000 for i in range(4)]
    close(shares, [0.1, 0.1, 0.6, 0.2], atol=0.04)
    # after the third, the first is drawn next in 1 of 4
    second = [sample[1] for sample in drawn if sample[0] == 2]
    close(second.count(0) / len(second), 0.25, atol=0.05)
    assert sorted(weighted_sample([1.0, 2.0], 5, random.Random(0))) == [0, 1]


@pytest.mark.parametrize(("draw", "share"), [("alike", 0.5), ("size", 0.9)])
def test_the_chances_by_the_key(given, draw, share):
    """One of two is replayed: row 4 is worth 3/4 of 6, row 1 3/4 of 2/3, a ninth of it."""
    table = groups([[0.0, 2 / 3, 0, 0], [6.0, 0, 0, 0]])
    made = given(table, *BASE, SOURCE % f", count: 1, draw: {draw}", TERM % "")
    source = made.trainer.collector.extras.sources[0]
    play(made, 2)
    source._stored = [pair for pair in source._stored if abs(pair[1]["advantage"]) in (0.5, 4.5)]
    assert [round(entry["advantage"], 4) for _, entry in source._stored] == [0.5, 4.5]
    drawn = []
    for step in range(300):
        source._steps = 2 * step + 1
        drawn += replayed(made.next(step))
    close(drawn.count(4) / len(drawn), share, atol=0.07)


def test_demonstrations_are_not_kept(given):
    """The demonstration, row 8, joins the failed group of rows 0 to 3 and is worth 4/5, each of them -1/5."""
    table = groups([[0.0, 0, 0, 0], [0.0, 0, 0, 0], [1.0]])
    sources = "rollout.extras=[{type: guided_groups}, {type: advantage_replay, every: 2, least: 0.19}]"
    made = given(table, *BASE, sources, TERM % "")
    first, second = play(made, 2)
    close(first.advantages[:, 0], [-0.2, -0.2, -0.2, -0.2, 0.8])
    assert sorted(replayed(second)) == [0, 1, 2, 3]


def test_what_is_replayed_has_no_other_advantage_whatever_the_baseline(given):
    made = given(groups([[1.0, 0, 0, 0], [0.0, 1, 0, 0]]), *BASE, SOURCE % "", TERM % "", "algorithm.baseline=none")
    second = play(made, 2)[1]
    close(second.advantages[:, 0], [0.0, 1.0, 0.0, 0.0, 0.0])
    assert replayed(second) == {0: 1.0}


def test_the_mean_advantage_is_over_the_decisions_of_a_rollout(given):
    """Of two that are worth 1/2, the shorter one has one decision and the longer one two."""
    table = Table([[-1.0], [-1.0, -1.0]] * 2, group=[0, 0, 1, 1], rewards=[1.0, 0.0, 0.0, 0.0])
    made = given(table, *BASE, "rollout.group_size=2", SOURCE % "", TERM % "")
    assert replayed(play(made, 2)[1]) == {0: 0.5, 1: -0.5}


def test_ranks_share_what_is_replayed(given):
    """Both ranks of the ledger hold the same; one of three is replayed by either, and padding by one of them."""
    parts = []
    for rank in (0, 1):
        table = groups([[1.0, 0, 0, 0], [0.0, 0, 0, 0]])
        options = ["rollout.prompts=2", *BASE[1:], SOURCE % ", count: 1", TERM % ""]
        made = given(table, *options, world=2, rank=rank)
        for extra in made.trainer.collector.extras.sources:
            extra._context = type(extra._context)(**{**vars(extra._context), "max_over_ranks": lambda _: 1})
        rollouts = play(made, 2)[1]
        assert len(rollouts) == 5 and rollouts.mask[4].any() == (rank == 0)
        parts.append(list(replayed(rollouts)))
        made.close()
    assert parts == [[0], []]


def test_it_goes_on_from_a_checkpoint(given):
    rows = groups([[1.0, 0, 0, 0], [1.0, 1, 1, 0], [1.0, 0, 0, 0], [0.0, 0, 0, 0]])
    made = given(rows, *BASE, SOURCE % "", TERM % "")
    play(made, 3)
    shared, own = json.loads(json.dumps(made.trainer.collector.state()))
    made.close()
    again = given(rows, *BASE, SOURCE % "", TERM % "")
    again.trainer.policy.asked = 3
    again.trainer.collector.load(shared, own)
    assert replayed(play(again, 1, first=3)[0]) == {0: 0.75, 7: -0.75, 8: 0.75}


def test_the_term_needs_its_source_and_the_source_is_of_no_other_term(given):
    table = groups([[1.0, 0, 0, 0]])
    for extras, term in (
        ("[self_imitation]", TERM % ""),
        (SOURCE % "", "algorithm.terms=[{type: likelihood, of: replayed}]"),
    ):
        extras = extras if "=" in extras else "rollout.extras=[{type: self_imitation, count: 2}]"
        with pytest.raises(UserError, match="has no source of such rollouts"):
            given(table, *BASE, extras, term)


# --- the mask ---


def test_small_advantages_are_left_out_of_the_loss_and_not_of_the_statistics(given):
    """Advantages 0.5, 0.3, -0.5, -0.3 around the mean 0.5 of all four."""
    table = groups([[1.0, 0.8, 0.0, 0.2]])
    made = given(table, *BASE, "algorithm.masks=[{type: small_advantages, least: 0.4}]")
    rollouts = made.prepare()
    close(rollouts.advantages[:, 0], [0.5, 0.3, -0.5, -0.3])
    assert rollouts.mask[:, 0].tolist() == [True, False, True, False]
    made.learn()
    close(made.gradient()[:, 0] * 2, [-0.5, 0.0, 0.5, 0.0])  # two decisions are left
    assert made.metrics.result()["small_advantages/kept"] == 0.5


@pytest.mark.parametrize(("option", "kept"), [("true", [False, True, True, True]), ("false", [True] * 4)])
def test_what_was_truncated_must_not_be_praised(given, option, kept):
    table = groups([[1.0, 1.0, 0.0, 0.0]], truncated=[True, False, True, False])
    made = given(table, *BASE, f"algorithm.masks=[{{type: small_advantages, truncated: {option}}}]")
    assert made.prepare().mask[:, 0].tolist() == kept


@pytest.mark.parametrize(("extra", "kept"), [(0.6, True), (0.7, False)])
def test_extra_rollouts_have_a_bound_of_their_own(given, extra, kept):
    """Rows 0 and 1 are wrong; of their prompt's next two, row 3 is right: advantages -1/3, -1/3, 2/3."""
    table = groups([[0.0, 0.0], [0.0, 1.0]], size=2)
    mask = f"algorithm.masks=[{{type: small_advantages, least: 0.4, extra: {extra}}}]"
    made = given(table, *BASE, "rollout.group_size=2", "rollout.extras=[{type: extra_rollouts, count: 2}]", mask)
    rollouts = made.next()
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [-1 / 3, -1 / 3, 2 / 3])
    assert rollouts.mask[:, 0].tolist() == [False, False, kept]


def test_what_is_replayed_stays(given):
    made = given(
        groups([[1.0, 0, 0, 0], [0.0, 0, 0, 0]]), *BASE, SOURCE % "", TERM % "", "algorithm.masks=[small_advantages]"
    )
    second = play(made, 2)[1]
    assert second.mask[:, 0].tolist() == [False, False, False, False, True]
