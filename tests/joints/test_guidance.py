"""Demonstrations that join the groups of rollouts: groups, the shaped surrogate, weights by entropy."""

import math

import pytest
import torch

from mmrl.errors import UserError
from tests.joints.parts import Table, close

GUIDED = ["rollout.extras=[{type: guided_groups}]", "algorithm.scale=none"]


def guided():
    """Two groups of two; whatever is asked, the demonstration is row 4, whose reward is 1. The first group is all
    wrong: with it the mean is 1/3. In the second it is 2/3."""
    logp = [[-1.0], [-1.0], [-1.0], [-1.0], [-2.0, math.log(0.5)]]
    entropy = [[0.5], [0.5], [0.5], [0.5], [1.0, 2.0]]
    return Table(logp, group=[0, 0, 1, 1, 2], rewards=[0.0, 0.0, 1.0, 0.0, 1.0], entropy=entropy)


def learned(given, *overrides):
    made = given(guided(), *GUIDED, *overrides)
    rollouts = made.next()
    made.prepare(rollouts)
    return made, rollouts


def test_the_demonstration_joins_its_prompts_group(given):
    made, rollouts = learned(given)
    assert rollouts.origin.tolist() == [0, 0, 0, 0, 1, 1]
    assert rollouts.group.tolist() == [0, 0, 1, 1, 0, 1]
    assert rollouts.rewards[:, 0].tolist() == rollouts.accuracy.tolist() == [0, 0, 1, 0, 1, 1]
    close(rollouts.advantages[:, 0], [-1 / 3, -1 / 3, 1 / 3, -2 / 3, 2 / 3, 1 / 3])
    # The demonstration of the prompt that the group answers
    assert made.trainer.policy.calls[-1].what == "demonstrate"
    assert made.trainer.policy.calls[-1].seeds == [
        int(rollouts.samples[0].prompt.id),
        int(rollouts.samples[2].prompt.id),
    ]
    # With the plain surrogate it is as if the policy had made it: the ratio is 1. Eight decisions.
    made.learn()
    expected = [[1 / 3, 0.0], [1 / 3, 0.0], [-1 / 3, 0.0], [2 / 3, 0.0], [-1.0, -1.0]]
    close(made.gradient() * 8, expected)


def test_only_groups_that_failed_are_guided(given):
    made, rollouts = learned(given, "rollout.extras=[{type: guided_groups, groups: failed}]")
    assert rollouts.origin.tolist() == [0, 0, 0, 0, 1] and rollouts.group.tolist() == [0, 0, 1, 1, 0]
    close(rollouts.advantages[:, 0], [-1 / 3, -1 / 3, 0.5, -0.5, 2 / 3])
    _, rollouts = learned(given, "rollout.extras=[{type: guided_groups, groups: failed, accuracy: 2}]")
    assert rollouts.group.tolist() == [0, 0, 1, 1, 0, 1]  # an accuracy of 1 is not enough
    _, rollouts = learned(given, "rollout.extras=[{type: guided_groups, groups: failed, accuracy: 0}]")
    assert rollouts.group.tolist() == [0, 0, 1, 1]


def test_metrics_are_of_the_fresh_rollouts(given):
    made = given(guided(), *GUIDED, "steps=1")
    made.trainer.train()
    row = made.trainer.run.rows[0]
    close([row["reward/mark"], row["accuracy"], row["unscored"]], [0.25, 0.25, 0.0])


def test_a_sampler_hears_nothing_of_them(given):
    told = []
    made = given(guided(), *GUIDED)
    made.trainer.collector.draws.sampler.__dict__["observe"] = told.extend
    made.prepare(made.next())
    made.trainer.collector.observe(made.batch)
    assert [outcome.rewards for outcome in told] == [(0.0, 0.0), (1.0, 0.0)]


def test_a_group_that_was_flat_teaches_with_its_demonstration(given):
    """Dynamic sampling takes the first group for want of better; its advantages are not 0 any more."""
    made = given(guided(), *GUIDED, "rollout.dynamic_sampling={max_rounds: 1, low: 0.1}")
    rollouts = made.next()
    assert not rollouts.filler.any()
    made.prepare(rollouts)
    assert rollouts.advantages[:, 0].abs().min() > 0.3


@pytest.mark.parametrize("gamma", [0.1, 0.4])
def test_the_shaped_objective_of_demonstrations(given, gamma):
    """-A p / (p + gamma), whose derivative by logp is -A p gamma / (p + gamma)^2."""
    made, _ = learned(given, f"algorithm.surrogate={{type: guided, gamma: {gamma}}}", "algorithm.epochs=2")
    made.move(logp=[[0.0], [0.0], [0.5], [0.0], [0.0, 0.0]])  # the ratio of the right one, e^0.5, is above 1.28
    shaped = [p / (p + gamma) for p in (math.exp(-2.0), 0.5)]
    clipped = 1 / 3 + 1 / 3 - 1.28 / 3 + 2 / 3
    close(made.learn(), (clipped - sum(shaped)) / 8, atol=1e-5)
    slopes = [p * gamma / (p + gamma) ** 2 for p in (math.exp(-2.0), 0.5)]
    expected = [[1 / 3, 0.0], [1 / 3, 0.0], [0.0, 0.0], [2 / 3, 0.0], [-slopes[0], -slopes[1]]]
    close(made.gradient() * 8, expected, atol=1e-5)
    close(made.metrics.result()["surrogate/shaped"], sum(shaped) / 2, atol=1e-5)


def test_it_is_the_clip_without_demonstrations(given):
    table = Table([[-1.0]] * 2, group=[0, 0], rewards=[1.0, 0.0])
    options = ["algorithm.epochs=2", "algorithm.surrogate={type: guided, high: 0.1}"]
    made = given(table, "rollout.prompts=1", "algorithm.scale=none", *options)
    made.prepare()
    made.move(logp=[[0.2], [0.0]])  # a ratio of 1.22
    close(made.learn(), (-0.5 * 1.1 + 0.5) / 2)
    assert math.isnan(made.metrics.result().get("surrogate/shaped", math.nan))


@pytest.mark.parametrize(("shown", "good"), [(0.5, 0.1), (0.0, 0.4), (2.0, 0.0)])
def test_weights_by_entropy(given, shown, good):
    """The demonstration's mean entropy is 1.5, and it is not a rollout of positive advantage; that of the right rollout
    0.5."""
    of_shown = f"{{type: likelihood, of: demonstrations, coefficient: {shown}, doubt: -1}}"
    of_good = f"{{type: likelihood, of: own_positive, coefficient: {good}, doubt: 1}}"
    made, _ = learned(given, f"algorithm.terms=[{of_shown}, {of_good}]", "algorithm.surrogate=reinforce")
    made.learn()
    d, g = 2 * shown * math.exp(-1.5), good * math.exp(0.5)  # two demonstrations are the same row
    expected = [[1 / 3, 0.0], [1 / 3, 0.0], [-1 / 3 - g, 0.0], [2 / 3, 0.0], [-1 - d, -1 - d]]
    close(made.gradient() * 8, expected, atol=1e-5)
    assert not made.gradient("entropy").any()


def test_rollouts_of_all_sources_must_fit_into_a_micro_batch(given):
    """A group of two, its demonstration, two guided responses and one of another source."""
    sources = "[{type: guided_groups}, {type: guided_prefixes, count: 2}, {type: success_replay, count: 1}]"
    options = ["algorithm.type=preference", f"rollout.extras={sources}"]
    with pytest.raises(UserError, match="engine.micro_batch=5 splits groups of 6 rollouts"):
        given(Table([[-1.0]] * 4, group=[0, 0, 1, 1]), *options, "engine.micro_batch=5")
    given(Table([[-1.0]] * 4, group=[0, 0, 1, 1]), *options, "engine.micro_batch=6")


def test_groups_with_their_demonstration_must_fit_into_a_micro_batch(given):
    options = ["algorithm.type=preference", "engine.micro_batch=2"]
    with pytest.raises(UserError, match="splits groups of 3"):
        given(guided(), *GUIDED[:1], *options)
    given(guided(), *options)


def test_ranks_make_as_many_rollouts(given):
    """The other rank adds two: what fills up here counts nowhere."""
    made = given(guided(), "rollout.extras=[{type: guided_groups, groups: failed}]", "algorithm.scale=none")
    made.trainer.engine.max = lambda value: max(value, 3)
    for extra in made.trainer.collector.extras.sources:
        extra._context = type(extra._context)(**{**vars(extra._context), "max_over_ranks": made.trainer.engine.max})
    rollouts = made.next()
    assert len(rollouts) == 7 and not rollouts.mask[5:].any() and len(set(rollouts.group.tolist())) == 4
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [-1 / 3, -1 / 3, 0.5, -0.5, 2 / 3, 0.0, 0.0])
    made.learn()
    expected = [[1 / 3, 0.0], [1 / 3, 0.0], [-0.5, 0.0], [0.5, 0.0], [-2 / 3, -2 / 3]]
    close(made.gradient() * 6, expected)
    assert torch.isfinite(made.gradient()).all()


# --- responses that begin as demonstrations do ---

PREFIXES = "rollout.extras=[{type: guided_prefixes, count: 2%s}]"


def prefixed(given, options="", *overrides, rewards=(0.0, 0.0, 1.0, 0.0)):
    """Row 4, of ten decisions, demonstrates. With half of it kept it becomes row 5 or 6, of seven and six decisions:
    one is right."""
    logp = [[-1.0], [-1.0], [-1.0], [-1.0], [-1.0] * 10, [-1.0] * 7, [-1.0] * 6]
    table = Table([row[:8] for row in logp], group=[0, 0, 1, 1, 4, 3, 3], rewards=[*rewards, 1.0, 1.0, 0.0])
    made = given(table, PREFIXES % options, "algorithm.scale=none", *overrides)
    made.trainer.policy.continues = {(4, kept): [5, 6] for kept in range(9)}
    return made


def test_what_begins_as_the_demonstration_does_joins_a_group_that_failed(given):
    """Half of eight decisions is four: what follows them is learned from."""
    made = prefixed(given, ", low: 0.5, high: 0.5")
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 2, 3, 5, 6] and rollouts.origin.tolist() == [0, 0, 0, 0, 3, 3]
    assert rollouts.group.tolist() == [0, 0, 1, 1, 0, 0]
    assert rollouts.mask[4].tolist() == [False] * 4 + [True] * 3 + [False]
    assert rollouts.mask[5].tolist() == [False] * 4 + [True] * 2 + [False] * 2
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [-0.25, -0.25, 0.5, -0.5, 0.75, -0.25])
    asked = {call.what: call.seeds for call in made.trainer.policy.calls}
    assert asked["demonstrate"] == [int(rollouts.samples[0].prompt.id)] and len(set(asked["continued"])) == 2
    assert not set(asked["continued"]) & set(asked["rollout"])


def test_the_beginning_may_be_learned_from_too(given):
    rollouts = prefixed(given, ", low: 0.5, high: 0.5, learned: true").next()
    assert rollouts.mask[4:].sum(1).tolist() == [7, 6]


def test_shares_of_the_demonstration_are_drawn(given):
    pairs = []
    for seed in range(12):
        made = prefixed(given, ", low: 0.25, high: 0.75", f"seed={seed}")
        rollouts = made.next()
        pairs.append([int(row.nonzero()[0]) if row.any() else 7 for row in rollouts.mask[4:]])
        made.close()
    kept = {length for pair in pairs for length in pair}
    assert min(kept) == 2 and 4 <= max(kept) < 8 and len(kept) > 2  # of eight decisions
    assert any(one != other for one, other in pairs)  # each response of a group has a share of its own


def test_no_prefix_where_none_is_needed(given):
    made = prefixed(given, rewards=(1.0, 0.0, 1.0, 0.0))
    assert len(made.next()) == 4
    made = prefixed(given, ", groups: all", rewards=(1.0, 0.0, 1.0, 0.0))
    made.trainer.policy.continues = {(4, kept): [5, 6, 5, 6] for kept in range(9)}
    assert made.next().group.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(UserError, match="low=0.9 is above high=0.5"):
        prefixed(given, ", low: 0.9, high: 0.5")


def test_a_rank_without_failures_begins_with_the_others_and_keeps_nothing(given):
    made = prefixed(given, rewards=(1.0, 0.0, 1.0, 0.0))
    for extra in made.trainer.collector.extras.sources:
        extra._context = type(extra._context)(**{**vars(extra._context), "max_over_ranks": lambda value: max(value, 2)})
    rollouts = made.next()
    assert made.trainer.policy.calls[-1].what == "continued"
    assert len(rollouts) == 6 and not rollouts.mask[4:].any()
