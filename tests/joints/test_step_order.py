"""The order of a step with dynamic sampling: outcomes of every round reach the sampler of prompts, and failed groups
are rescued before they are dropped."""

import json
import math

import pytest

from mmrl.errors import UserError
from mmrl.rollouts import FRESH
from tests.helpers.threads import together
from tests.joints.parts import Table, close, job
from tests.joints.test_balance import Exchanging
from tests.joints.test_collection import two_ahead
from tests.joints.test_ranks import Exchange

NAN = math.nan
# Groups of two by the order of their draw: all right, all wrong, mixed, all wrong, mixed, mixed, mixed.
ROUNDS = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
DYNAMIC = "rollout.dynamic_sampling={}"


def rounds(rewards=ROUNDS, **columns):
    return Table(
        [[-1.0]] * len(rewards), group=[row // 2 for row in range(len(rewards))], rewards=list(rewards), **columns
    )


def sampler(made):
    return made.trainer.collector.draws.sampler


def pairs(rollouts):
    """Of each group its prompt, and what its two rollouts earned."""
    return [
        (int(p), tuple(r)) for p, r in zip(rollouts.prompt[::2], rollouts.rewards.view(-1, 2).tolist(), strict=True)
    ]


# --- samplers of prompts ---


def test_groups_that_are_dropped_reach_the_sampler(given):
    """Two rounds of two: the first has flat groups alone, the second a flat and a mixed one, the third fills up."""
    heard = []
    made = given(rounds(), DYNAMIC)
    sampler(made).__dict__["observe"] = heard.extend
    kept = made.next()
    assert [outcome.rewards for outcome in heard] == [(1, 1), (0, 0), (1, 0), (0, 0), (0, 1), (1, 0)]
    assert len({outcome.prompt for outcome in heard}) == 6
    assert [(outcome.prompt, outcome.rewards) for outcome in (heard[2], heard[4])] == pairs(kept)
    made.prepare(kept)
    made.trainer.collector.observe(made.batch)
    assert len(heard) == 6  # once


def after(given_job, settings, rewards=ROUNDS):
    made = given_job(rounds(rewards), DYNAMIC, f"rollout.sampler={settings}")
    made.next()
    return sampler(made).state()


@pytest.fixture
def given_job(tmp_path):
    return lambda table, *overrides: job(
        tmp_path, table, 'task={type: "tests.prompts.test_curriculum:Levels"}', *overrides
    )


def test_skipping_remembers_what_was_dropped(given_job):
    assert sorted(after(given_job, "skip_flat")["flat"].values()) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", ["success_window", "success_weighted", "volatility"])
def test_averages_hold_what_was_dropped(given_job, name):
    """A mixed group has 0.5; 1 and 0 are of flat ones."""
    assert {0.0, 1.0} <= set(after(given_job, name)["rates"].values())


def test_a_category_whose_groups_are_all_dropped_is_drawn_less(given_job):
    """Q = 0.3 x the mean gap of its groups: 0.5 where all are mixed, less where some are flat."""
    state = after(given_job, "{type: category_bandit, by: level}")
    assert sum(state["drawn"].values()) == 6
    assert 0 < min(v for v in state["values"].values() if v) < 0.15


def test_quotas_hear_of_what_was_dropped(given_job):
    """All right, all wrong: losses of 0.001 and 1 where one category had the one and one the other."""
    state = after(given_job, "{type: task_quotas, by: level}", [1.0, 1.0, 0.0, 0.0] * 8)
    assert sorted(state["losses"].values()) == pytest.approx([0.001, 1.0])


@pytest.mark.parametrize("rewards", [(NAN, NAN), (NAN, 1.0)])
def test_what_could_not_be_compared_is_not_flat(given, rewards):
    made = given(rounds([0.0, 0.0, *rewards]), "rollout.sampler=skip_flat")
    prompts = made.next().prompt.tolist()
    assert sampler(made).state()["flat"] == {str(prompts[0]): 1}


def test_an_unscored_group_says_nothing_of_its_category(given_job):
    """A lone score has no gap: every category is still worth what it was."""
    made = given_job(rounds([NAN, 0.0, NAN, 1.0]), "rollout.sampler={type: category_bandit, by: level, rate: 1}")
    known = sampler(made).state()
    sampler(made).load({**known, "values": dict.fromkeys(known["values"], 0.4)})
    made.next()
    assert set(sampler(made).state()["values"].values()) == {0.4} and sum(sampler(made).state()["drawn"].values()) == 2


def test_two_ranks_hear_of_the_groups_of_both(given):
    """Each has two groups a round; both hear of four, in the order of their draw."""
    meeting, jobs = Exchange(), []
    for rewards in ([1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]):
        made = given(rounds(rewards), "rollout.prompts=4", "rollout.sampler=skip_flat", world=2, rank=len(jobs))
        engine = made.trainer.engine
        engine.__class__, engine.meeting, engine.sent = Exchanging, meeting, []
        jobs.append(made)
    kept = together(lambda made: made.next(), jobs, meeting.barrier)
    drawn = [prompt for rollouts in kept for prompt in rollouts.prompt.tolist()[::2]]
    expected = {str(drawn[0]): 1, str(drawn[1]): 0, str(drawn[2]): 1, str(drawn[3]): 0}
    assert sampler(jobs[0]).state()["flat"] == sampler(jobs[1]).state()["flat"] == expected


def test_outcomes_heard_while_later_batches_are_made_are_in_the_checkpoint(given):
    """Its draws begin with the batches in the making; what was heard since they were drawn is heard again."""
    skip = "rollout.sampler=skip_flat"
    made = two_ahead(given, skip)
    for step in range(2):
        made.next(step)
    made.trainer.collector.pause_prefetch()
    assert len(made.trainer.collector.pending) == 1  # drawn together with the one that step 1 took
    known = sampler(made).state()
    shared, of_rank = json.loads(json.dumps(made.trainer.collector.state()[0])), made.trainer.collector.state()[1]
    other = two_ahead(given, skip)
    other.trainer.collector.load(shared, of_rank)
    assert sampler(other).state()["flat"] == known["flat"] and len(known["flat"]) == 4
    assert other.trainer.collector.draws.drawn == 4 and made.trainer.collector.draws.drawn == 6


def test_all_that_was_heard_since_the_draw_is_heard_again_as_it_was(given):
    """Three batches in the making, of which two are taken."""
    options = ["rollout.generator.async_steps=3", "rollout.sampler=skip_flat"]
    made, heard, again = two_ahead(given, *options), [], []
    made.next()
    made.trainer.collector.pause_prefetch()
    sampler(made).__dict__["observe"] = heard.extend
    for step in (1, 2):
        made.next(step)
    assert len(made.trainer.collector.pending) == 1 and len(heard) == 4
    assert any(outcome.rewards != outcome.accuracies for outcome in heard)
    state = made.trainer.collector.state()
    other = two_ahead(given, *options)
    sampler(other).__dict__["observe"] = again.extend
    other.trainer.collector.load(*state)
    assert again == heard


def test_what_was_heard_before_the_last_draw_is_not_heard_again(given):
    """Batches 1 and 2 are drawn together, and then 3 and 4, whose draw knows of what was heard until then."""
    options = ["rollout.sampler=skip_flat", "steps=6"]
    made, heard, again = two_ahead(given, *options), [], []
    for step in range(3):
        made.next(step)
    sampler(made).__dict__["observe"] = heard.extend
    made.next(3)
    made.trainer.collector.pause_prefetch()
    assert len(made.trainer.collector.pending) == 1 and len(heard) == 2
    other = two_ahead(given, *options)
    sampler(other).__dict__["observe"] = again.extend
    other.trainer.collector.load(*made.trainer.collector.state())
    assert again == heard


# --- rescues ---

EXTRA = "rollout.extras=[{type: extra_rollouts, count: 2, most: 1}]"
ONE = ["rollout.prompts=1", "algorithm.scale=none"]


def test_a_failed_group_that_is_rescued_is_kept(given):
    """The first prompt fails twice and is asked twice again; rows 2 and 3 are what it is answered."""
    made = given(rounds([0.0, 0.0, 0.0, 1.0, 1.0, 0.0]), *ONE, EXTRA, DYNAMIC)
    rollouts = made.next()
    assert rollouts.inputs == [0, 1, 3] and rollouts.origin.tolist() == [0, 0, 3]
    assert not rollouts.filler.any() and len(made.trainer.policy.calls) == 2
    close(made.metrics.result()["dynamic_sampling/kept"], 1.0)
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [-1 / 3, -1 / 3, 2 / 3])
    made.learn()
    close(made.gradient()[:4, 0] * 3, [1 / 3, 1 / 3, 0.0, -2 / 3])


def test_a_group_that_is_not_rescued_is_replaced(given):
    """Rows 2 and 3 are wrong as well; the next prompt has rows 4 and 5."""
    made = given(rounds([0.0, 0.0, 0.0, 0.0, 1.0, 0.0]), *ONE, EXTRA, DYNAMIC)
    rollouts = made.next()
    assert rollouts.inputs == [4, 5] and rollouts.group.tolist() == [1, 1]
    close(made.metrics.result()["dynamic_sampling/kept"], 0.5)


def test_the_share_of_groups_that_are_kept_is_that_of_fresh_rollouts(given):
    """Both prompts fail; row 5 rescues the first. A share of a half, though three of the five rollouts are kept."""
    rewards = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    made = given(rounds(rewards), "rollout.prompts=2", EXTRA, "rollout.dynamic_sampling={max_rounds: 1}")
    assert made.next().inputs == [0, 1, 2, 3, 5]
    close(made.metrics.result()["dynamic_sampling/kept"], 0.5)


def test_what_all_have_right_is_dropped_and_not_asked_again(given):
    made = given(rounds([1.0, 1.0, 0.0, 1.0]), *ONE, EXTRA, DYNAMIC)
    assert made.next().inputs == [2, 3] and len(made.trainer.policy.calls) == 2


@pytest.mark.parametrize("kind", ["guided_groups, groups: failed", "guided_prefixes, count: 1"])
def test_demonstrations_rescue_too(given, kind):
    """The demonstration is row 4, whose reward is 1. The second prompt, all right, is dropped."""
    table = Table([[-1.0]] * 5, group=[0, 0, 1, 1, 2], rewards=[1.0, 1.0, 0.0, 0.0, 1.0])
    made = given(table, *ONE, f"rollout.extras=[{{type: {kind}}}]", DYNAMIC)
    made.trainer.policy.continues = {(4, 0): [4]}
    rollouts = made.next()
    assert rollouts.inputs == [2, 3, 4] and rollouts.group.tolist() == [1, 1, 1] and not rollouts.filler.any()


def test_a_success_of_an_earlier_step_rescues(given):
    """Step 0 has one right answer, which is replayed where the same prompt fails in step 1."""
    made = given(rounds([0.0, 1.0, 0.0, 0.0]), *ONE, "rollout.extras=[{type: success_replay, groups: failed}]", DYNAMIC)
    made.prepare(made.next())
    made.trainer.collector.observe(made.batch)
    sampler(made).__dict__["draw"] = lambda count: [int(made.batch.rollouts.prompt[0])] * count
    rollouts = made.next(1)
    assert rollouts.inputs == [2, 3, 1] and rollouts.origin.tolist() == [0, 0, 2]
    made.prepare(rollouts, 1)
    close(rollouts.advantages[:, 0], [-1 / 3, -1 / 3, 2 / 3])


def test_rounds_with_and_without_replays_are_one_batch(given):
    """The first round has a mixed group and one that is all right; the second a failed one, with a replay and its
    likelihood."""
    made = given(
        rounds([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]),
        *("rollout.prompts=2", "rollout.extras=[{type: success_replay, groups: failed}]", DYNAMIC),
    )
    made.prepare(made.next())
    made.trainer.collector.observe(made.batch)
    known = int(made.batch.rollouts.prompt[0])
    sampler(made).__dict__["draw"] = lambda count: [known] * count
    rollouts = made.next(1)
    assert rollouts.inputs[:4] == [4, 5, 8, 9] and rollouts.origin.tolist() == [0, 0, 0, 0, 2]
    assert rollouts.group[4] == rollouts.group[3] and rollouts.old_logp.isnan().sum() == 4


def test_ranks_exchange_rescued_groups_whole(given):
    """Rank 0 has two failed groups that are rescued, and no room for both; rank 1 has none that teach."""
    meeting, jobs = Exchange(), []
    for rewards in ([0.0, 0.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0]):
        options = ["rollout.prompts=2", EXTRA, "rollout.dynamic_sampling={max_rounds: 2}"]
        made = given(rounds(rewards), *options, world=2, rank=len(jobs))
        engine = made.trainer.engine
        engine.__class__, engine.meeting, engine.sent = Exchanging, meeting, []
        jobs.append(made)
    for made in jobs:
        extras = made.trainer.collector.extras
        extras._max_over_ranks = made.trainer.engine.max
        for source in extras.sources:
            source._context = type(source._context)(
                **{**vars(source._context), "max_over_ranks": made.trainer.engine.max}
            )
    one, two = together(lambda made: made.next(), jobs, meeting.barrier)
    assert len(one) == len(two) == 3
    assert one.inputs == [0, 1, 3] and one.mask.all() and one.group.unique().numel() == 1
    assert two.inputs[:2] == [4, 5] and two.origin.tolist()[:2] == [FRESH, FRESH]
    assert two.mask[:, 0].tolist() == [True, True, False]  # filled up, so that both make as many passes


def test_what_could_not_be_judged_has_not_failed(given):
    """A judge's outage: nobody is asked again, shown a demonstration or reminded."""
    table = Table([[-1.0]] * 5, group=[0, 0, 1, 1, 2], rewards=[NAN, NAN, NAN, 0.0, 1.0])
    made = given(table, "rollout.extras=[{type: guided_groups, groups: failed}]")
    assert made.next().group.tolist() == [0, 0, 1, 1, 1]


def test_other_sources_are_asked_once_a_step(given):
    """Two rounds, and one demonstration beside what is kept of them."""
    table = rounds([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    options = ["rollout.extras=[{type: demonstrations, prompts: 1}, {type: extra_rollouts, count: 2}]", DYNAMIC]
    made = given(table, *ONE, *options)
    rollouts = made.next()
    assert [call.what for call in made.trainer.policy.calls].count("demonstrate") == 1
    assert rollouts.origin.tolist()[-1] == 1 and rollouts.group[-1] < 0


# --- groups of equal rewards that teach ---

MOMENTUM = ["algorithm.shaping=[advantage_momentum]", "algorithm.scale=none"]


def test_flat_groups_that_the_reference_makes_teach_are_kept(given):
    """All have 1 where the reference has 0.9 and 0.8; within the bounds of accuracy, so nothing is dropped."""
    table = Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 3], rewards=[1.0, 1.0, 1.0, 1.0, 0.9, 0.8])
    made = given(table, *MOMENTUM, "rollout.dynamic_sampling={low: 0.5, max_rounds: 1}")
    rollouts = made.prepare(made.next())
    assert not rollouts.filler.any()
    close(rollouts.advantages[:, 0], [0.1, 0.1, 0.2, 0.2])


def test_a_filter_that_drops_nothing_is_refused(given):
    with pytest.raises(
        UserError, match=r"dynamic_sampling would drop no groups, since advantage_momentum \(algorithm.shaping\)"
    ):
        given(rounds(), *MOMENTUM, DYNAMIC)


def test_sources_observe_a_step_once_after_its_updates(given):
    """Two epochs of two minibatches are four updates a step."""
    made, heard = given(rounds(), "steps=2", "algorithm={type: grpo, epochs: 2, minibatches: 2}"), []
    observe, engine = made.trainer.collector.observe, made.trainer.engine

    def after_updates(batch):
        heard.append((made.trainer.step, len(engine.losses)))
        observe(batch)

    made.trainer.collector.__dict__["observe"] = after_updates
    made.trainer.train()
    assert heard == [(0, 4), (1, 8)]
