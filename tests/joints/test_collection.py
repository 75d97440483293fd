"""Which rollouts a step learns from: rounds of dynamic sampling, demonstrations beside them, seeds, staleness."""

import math
import threading
from concurrent.futures import wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import PrivateAttr

from mmrl.collection.extra_sources import ExtraSource
from mmrl.collection.rounds import SampledRounds
from mmrl.rollouts import REPLAYED
from tests.joints.parts import Table, close

# --- dynamic sampling ---

# Groups of two by the order of their draw. Two prompts a round; the first and third are worth learning from.
GROUPS = {
    "rewards": [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
    "accuracy": [0.0, 1.0, 1.0, 1.0, 0.0, 0.25, 1.0, 0.75, 0.0, 0.5, 0.5, 1.0],
}  # means of accuracy: 0.5, 1 (rewards equal), 0.125, 0.875, 0.25, 0.75


def drawn(given, *overrides, table=None, world=1):
    columns = {name: GROUPS[name] for name in ("rewards", "accuracy")}
    table = table or Table([[-1.0]] * 12, group=[g for g in range(6) for _ in range(2)], **columns)
    made = given(table, *overrides, world=world)
    rollouts = made.next()
    return made, rollouts, [int(s.response) // 2 for s in rollouts.samples[::2]]


DYNAMIC = [
    ("{}", [0, 2]),  # only groups of equal rewards are replaced
    ("{low: 0.25}", [0, 3]),
    ("{high: 0.75}", [0, 2]),
    ("{high: 0.5}", [0, 2]),
    ("{low: 0.25, high: 0.75}", [0, 4]),  # both bounds are inside
    ("{low: 0.75}", [3, 5]),
    ("{low: 0.3, high: 0.75}", [0, 5]),
]


@pytest.mark.parametrize(("bounds", "kept"), DYNAMIC)
def test_the_bounds_of_dynamic_sampling(given, bounds, kept):
    _, rollouts, found = drawn(given, f"rollout.dynamic_sampling={bounds}")
    assert found == kept
    assert rollouts.group.tolist() == [k for k in kept for _ in range(2)]  # the place of the draw
    assert not rollouts.filler.any()


def test_without_it_all_are_kept(given):
    _, rollouts, found = drawn(given)
    assert found == [0, 1] and rollouts.filler is None


def test_places_that_stay_empty_are_filled_and_teach_nothing(given):
    options = ["rollout.dynamic_sampling={low: 0.75, max_rounds: 2}", "algorithm.scale=none"]
    made, rollouts, found = drawn(given, *options)
    assert found[0] == 3 and rollouts.filler.tolist() == [False, False, True, True]
    close(made.metrics.result()["dynamic_sampling/kept"], 1 / 4)  # of the four groups of two rounds
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [-0.5, 0.5, 0.0, 0.0])


NAMED = ["task.names=[one, two]", "rollout.dynamic_sampling={max_rounds: 3}"]


def combined(rewards):
    return Table([[-1.0]] * len(rewards), group=[i // 2 for i in range(len(rewards))], rewards=rewards)


def test_groups_are_judged_by_the_combined_reward(given):
    """Components that cancel out teach nothing, though both differ."""
    table = combined([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    _, _, found = drawn(given, *NAMED, "task.weights=[1, -1]", table=table)
    assert found == [1, 2]
    _, _, found = drawn(given, *NAMED, "task.weights=[1, 1]", table=table)
    assert found == [0, 2]
    _, _, found = drawn(given, *NAMED, "task.weights=[1, 1]", "algorithm.components=normalise_each", table=table)
    assert found == [0, 1]


def test_groups_are_judged_behind_their_gates(given):
    """In the first group the gate is closed wherever the other reward is high; in the second it is open."""
    table = combined([[3.0, 0.0], [0.0, 1.0], [3.0, 1.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
    gated = "algorithm.components={type: gated, gates: [two]}"
    made, rollouts, found = drawn(given, *NAMED, gated, "task.weights=[1, 1]", "algorithm.scale=none", table=table)
    assert found == [1, 2]
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [1.5, -1.5, 0.5, -0.5])


# --- demonstrations beside rollouts ---

EXTRAS = [
    "rollout.extras=[{type: demonstrations, prompts: 2}]",
    "algorithm.terms=[{type: likelihood, coefficient: 0.9}]",
    "algorithm.scale=none",
]


def with_demonstrations():
    """Group 2 holds the known answers, of two decisions each, to whatever is asked."""
    logp = [[-1.0], [-1.0], [-1.0], [-1.0], [-2.0, -3.0], [-4.0]]
    return Table(logp, group=[0, 0, 1, 1, 2, 2], rewards=[2.0, 0.0, 4.0, 0.0, 9.0, 9.0])


def test_demonstrations_become_more_likely_and_have_no_part_in_advantages(given):
    made = given(with_demonstrations(), *EXTRAS)
    rollouts = made.next()
    assert rollouts.origin.tolist() == [0, 0, 0, 0, 1, 1]
    assert rollouts.rewards.isnan().tolist() == [[False]] * 4 + [[True]] * 2
    assert len(set(rollouts.group.tolist())) == 4 and set(rollouts.group[4:].tolist()) == {-1, -2}
    made.prepare(rollouts)
    close(rollouts.advantages[:, 0], [1.0, -1.0, 2.0, -2.0, 0.0, 0.0])
    # Surrogate: -1 + 1 - 2 + 2. Term: 0.9 x (2 + 3 + 4). Seven decisions.
    close(made.learn(), 0.9 * 9 / 7, atol=1e-5)
    expected = [[-1, 0], [1, 0], [-2, 0], [2, 0], [-0.9, -0.9], [-0.9, 0]]
    close(made.gradient() * 7, [[float(g) for g in row] for row in expected])


def test_demonstrations_are_not_unscored_rollouts(given, recwarn):
    """Nor are they groups of one that lack a baseline."""
    made = given(with_demonstrations(), *EXTRAS)
    made.trainer.train()
    assert made.trainer.run.rows[0]["unscored"] == 0.0
    assert not [warning for warning in recwarn if "group of one" in str(warning.message)]


class Stale(ExtraSource):
    """Two rollouts of group 2, made by a policy under which they were less likely: by a tenth."""

    type: str = "tests.joints.test_collection:Stale"
    _policy: Any = PrivateAttr()

    @property
    def rollouts(self):
        return 2

    def start(self, context):
        self._policy = context.policy

    def make(self, fresh):
        table = self._policy.table
        made = table.rollouts([4, 5])
        made.group, made.origin = torch.tensor([-1, -1]), torch.tensor([REPLAYED, REPLAYED])
        made.old_logp = table.columns["logp"][4:6] - math.log(1.1)
        return made

    def state(self):
        return {}

    def load(self, state):
        pass


def test_likelihoods_that_rollouts_bring_are_the_old_ones(given):
    """Replayed rollouts with rewards 3 and 1 have advantages of their own, 1 and -1, and a ratio of 1.1."""
    table = with_demonstrations()
    table.rewards[4:6] = torch.tensor([[3.0], [1.0]])
    made = given(table, 'rollout.extras=["tests.joints.test_collection:Stale"]', "algorithm.scale=none")
    made.prepare(made.next())
    close(made.learn(), (-2 * 1.1 + 1.1) / 7)
    expected = [[-1, 0], [1, 0], [-2, 0], [2, 0], [-1.1, -1.1], [1.1, 0]]
    close(made.gradient() * 7, [[float(g) for g in row] for row in expected])


def test_demonstrations_go_on_where_the_step_before_ended(given):
    made = given(with_demonstrations(), *EXTRAS)
    asked, answered, numbers = [], [], []
    for step in range(4):
        rollouts = made.next(step)
        answered += [int(sample.prompt.id) for sample in rollouts.samples[:4:2]]
        asked += made.trainer.policy.calls[-1].seeds
        numbers += rollouts.group[4:].tolist()
    assert numbers == [-1, -2, -3, -4, -5, -6, -7, -8]  # their numbers in the run, which are also their seeds
    assert sorted(asked) == sorted(answered) == list(range(8))  # each prompt once an epoch
    assert asked != answered  # in an order of its own


def test_ranks_share_demonstrations(given):
    made = [given(with_demonstrations(), *EXTRAS, world=2, rank=rank) for rank in (0, 1)]
    asked, groups = [], []
    for part in made:
        groups += part.next().group[2:].tolist()
        asked += part.trainer.policy.calls[-1].seeds
    whole = given(with_demonstrations(), *EXTRAS)
    whole.next()
    assert asked == whole.trainer.policy.calls[-1].seeds and sorted(groups) == [-2, -1]


# --- seeds ---


def seeds(made, steps):
    for step in range(steps):
        made.next(step)
    return [call.seeds for call in made.trainer.policy.calls]


def known_seed(*numbers):
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def test_every_rollout_of_two_epochs_has_a_seed_of_its_own(given):
    """Eight prompts, two a step: from step 4 on the same prompts come again, with other seeds."""
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1])
    found = seeds(given(table), 8)
    flat = [seed for step in found for seed in step]
    assert len(set(flat)) == 32
    # From the run's seed, the place of the prompt's draw and the place in the group.
    assert found[0] == [known_seed(0, p, m) for p in (0, 1) for m in (0, 1)]
    assert found[5] == [known_seed(0, p, m) for p in (10, 11) for m in (0, 1)]
    assert seeds(given(table), 8) == found
    assert not set(flat) & {seed for step in seeds(given(table, "seed=1"), 8) for seed in step}


@pytest.mark.parametrize(("at_once", "lots"), [(None, [[4, 4, 7, 7, 9, 9]]), (2, [[4, 4], [7, 7], [9, 9]])])
def test_each_lot_is_scored_with_the_groups_of_its_own(at_once, lots):
    told = []

    def score(samples, group):
        told.append(group.tolist())
        return torch.zeros(len(samples), 1)

    def rollout(prompts, group_size, seeds, *, step):
        return Table([[-1.0]] * len(seeds)).rollouts()

    settings = SimpleNamespace(generated_at_once=at_once, paired=False, scores_in_background=False)
    config = SimpleNamespace(rollout=settings, group_size=2, seed=0, generator=None)
    task, sampling = SimpleNamespace(score=score), SimpleNamespace(rollout=rollout)
    made = SampledRounds(config, None, None, sampling, task, None).sampled([None] * 3, [4, 7, 9], 0)
    assert told == lots and made.group.tolist() == [4, 4, 7, 7, 9, 9]


def test_seeds_do_not_depend_on_the_number_of_ranks(given):
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1])
    alone = seeds(given(table), 3)
    shared = [seeds(given(table, world=2, rank=rank), 3) for rank in (0, 1)]
    assert [[*a, *b] for a, b in zip(*shared, strict=True)] == alone


# --- rollouts ahead of time ---


class Held:
    """A generator with weights of its own, which it takes when it is synchronised."""

    def __init__(self):
        self.policy, self.weights, self.given = None, None, 0  # given: how often it was synchronised

    def sync_weights(self):
        self.weights, self.given = self.policy.weights, self.given + 1
        return {}

    @contextmanager
    def generation(self):
        yield self.sync_weights()

    def close(self):
        pass


def ahead(given, settings, steps=4):
    generator = Held()
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1])
    made = given(table, f"rollout.generator={settings}", f"steps={steps}", generator=generator)
    generator.policy = made.trainer.policy
    made.trainer.policy.sampled_by = generator
    found = []
    for step in range(steps):
        rollouts = made.next(step)
        stale = made.metrics.result().get("generation/staleness")
        by_rollout = None if rollouts.version is None else rollouts.version.tolist()
        found.append((made.trainer.policy.calls[step].weights, by_rollout, stale))
        with torch.no_grad():
            made.module.logp[0, 0] += 1  # the step is finished: weights count steps
    return made, found


VERSIONS = [(1, [0, 0, 1, 2, 3, 4]), (2, [0, 0, 0, 2, 2, 4]), (3, [0, 0, 0, 0, 3, 3]), (9, [0] * 6)]


@pytest.mark.parametrize(("steps", "versions"), VERSIONS)
def test_rollouts_made_ahead_are_at_most_so_many_steps_old(given, steps, versions):
    """The generator gets new weights when the last batch that it has made is taken."""
    made, found = ahead(given, f"{{type: vllm_server, async_steps: {steps}}}", steps=6)
    assert found == [(version, [version] * 4, step - version) for step, version in enumerate(versions)]
    assert len(made.trainer.policy.calls) == 6  # nothing is made for steps that do not come
    assert made.trainer.collector.draws.drawn == 12


def two_ahead(given, *overrides):
    """A job whose generator makes two batches in a row, before its first step."""
    generator = Held()
    columns = {name: GROUPS[name] for name in ("rewards", "accuracy")}
    table = Table([[-1.0]] * 12, group=[g for g in range(6) for _ in range(2)], **columns)
    server = "rollout.generator={type: vllm_server, async_steps: 2}"
    made = given(table, server, *overrides, generator=generator)
    generator.policy = made.trainer.policy
    made.trainer.policy.sampled_by = generator
    return made


def groups_of(rollouts):
    return [int(sample.response) // 2 for sample in rollouts.samples[::2]]


def test_a_batch_made_ahead_is_told_the_step_that_trains_on_it(given):
    """Step 0 is made in time, 1 and 2 together, then 3; what counts is the step, not when it is made."""
    made = two_ahead(given, "steps=4")
    policy, told = made.trainer.policy, []
    sample = policy.rollout

    def rollout(prompts, group_size, seeds, *, step):
        told.append(step)
        return sample(prompts, group_size, seeds, step=step)

    policy.rollout = rollout
    for step in range(4):
        made.next(step)
    assert told == [0, 1, 2, 3]


def test_prompts_of_all_batches_in_the_making_are_drawn_at_once(given):
    """What a sampler hears of meanwhile is for those that are drawn later."""
    made = two_ahead(given)
    made.next()
    assert made.trainer.collector.draws.drawn == 6 and len(made.trainer.collector.pending) == 2
    made.trainer.collector.draws.sampler.__dict__["draw"] = lambda count: [7] * count
    prompts = [made.next(step).prompt.tolist() for step in (1, 2, 3)]
    assert 7 not in prompts[0] + prompts[1] and prompts[2] == [7] * 4


def test_a_checkpoint_begins_with_the_first_batch_in_the_making(given):
    made = two_ahead(given)
    for step, drawn in enumerate([2, 4, 6, 8]):  # of two and of none that were taken, then again
        made.next(step)
        made.trainer.collector.pause_prefetch()
        assert made.trainer.collector.state()[0]["drawn"] == drawn


def test_what_was_given_up_is_made_again(given):
    made, other = two_ahead(given), two_ahead(given)
    expected = [other.next(step).group.tolist() for step in range(3)]
    found = []
    for step in range(3):
        found.append(made.next(step).group.tolist())
        made.trainer.collector.cancel()
        assert not made.trainer.collector.pending
    assert found == expected


def held_up(made):
    """After its first step: the thread that makes the next two batches waits in the first of them. What ends that, and
    the two."""
    policy, come, go = made.trainer.policy, threading.Event(), threading.Event()
    sample = policy.rollout

    def rollout(*words, **named):
        if policy.calls:
            come.set()
            assert go.wait(10)
        return sample(*words, **named)

    policy.rollout = rollout
    made.next()
    assert come.wait(10)
    return go, [batch.rollouts for batch in made.trainer.collector.pending.batches]


def test_what_is_given_up_before_it_was_begun_is_not_made(given):
    made = two_ahead(given)
    go, (first, second) = held_up(made)
    made.trainer.collector.cancel()
    go.set()
    wait([first, second], 10)
    assert second.cancelled() and not first.cancelled() and len(made.trainer.policy.calls) == 2


def test_a_step_that_lacks_groups_takes_the_next_batch_in_the_making(given):
    """Groups 0, 2, 4 and 5 teach something. The first batch is 0 and 1, and the step goes on with 2 and 3, which are
    made for it; the second takes 4 and 5, and the third begins anew."""
    made = two_ahead(given, "rollout.dynamic_sampling={}", "rollout.prompts=1")
    assert [groups_of(made.next(step)) for step in range(4)] == [[0], [2], [3], [4]]
    assert [call.weights for call in made.trainer.policy.calls] == [0.0] * len(made.trainer.policy.calls)


def test_rounds_after_an_evaluation_are_of_the_trained_weights(given):
    """Evaluation gives the generator other weights, such as their average, after which it makes a missing group."""
    made = two_ahead(given, "rollout.dynamic_sampling={}")
    made.next()  # groups 0 and 2, in two rounds
    batches, held = made.trainer.collector, made.trainer.policy.sampled_by
    assert len(batches.pending) == 2  # groups 4 and 5, and 0 and 1
    made.next(1)
    with torch.no_grad():
        made.module.logp[0, 0] += 1
    batches.pause_prefetch()
    held.weights = -5.0  # the average
    assert groups_of(made.next(2)) == [0, 2]  # 0 of the batch in the making, 2 of a round that comes now
    batches.pause_prefetch()  # the batch of the last step is made
    assert [call.weights for call in made.trainer.policy.calls] == [0.0] * 4 + [1.0] * 2


def test_every_round_ahead_of_time_is_a_new_one(given):
    """The first round is what was in the making; the groups that it lacks are made now, and those of the next step."""
    generator = Held()
    columns = {name: GROUPS[name] for name in ("rewards", "accuracy")}
    table = Table([[-1.0]] * 12, group=[g for g in range(6) for _ in range(2)], **columns)
    server = "rollout.generator={type: vllm_server, async_steps: 1}"
    made = given(table, server, "rollout.dynamic_sampling={}", generator=generator)
    generator.policy = made.trainer.policy
    made.trainer.policy.sampled_by = generator
    assert [int(sample.response) // 2 for sample in made.next().samples[::2]] == [0, 2]
    made.trainer.collector.pause_prefetch()
    assert made.trainer.collector.draws.drawn == 6
    assert [int(sample.response) // 2 for sample in made.next(1).samples[::2]] == [4, 5]


def test_a_generator_that_comes_back_gets_the_weights_once(given):
    made = two_ahead(
        given, "rollout.dynamic_sampling={low: 0.99, max_rounds: 4}"
    )  # of no group, so that all rounds come
    batches, held = made.trainer.collector, made.trainer.policy.sampled_by
    made.next()
    before = held.given
    batches.pause_prefetch()
    made.next(1)  # two batches in the making and two further rounds, then the next batches
    assert held.given == before + 2


def test_rollouts_made_in_time_are_of_the_weights_of_now(given):
    _, found = ahead(given, "{type: vllm_server}")
    assert found == [(step, None, None) for step in range(4)]


# --- what samplers of prompts are told ---


def test_a_sampler_hears_of_every_fresh_group_in_the_order_of_its_draw(given):
    told = []
    made = given(with_demonstrations(), *EXTRAS, "task.weights=[0.5]")
    made.trainer.collector.draws.sampler.__dict__["observe"] = told.extend
    rollouts = made.next()
    made.prepare(rollouts)
    made.trainer.collector.observe(made.batch)
    prompts = [int(s.prompt.id) for s in rollouts.samples]
    assert [outcome.prompt for outcome in told] == [prompts[0], prompts[2]] and prompts[0] != prompts[2]
    assert [outcome.rewards for outcome in told] == [(1.0, 0.0), (2.0, 0.0)]
    assert [outcome.accuracies for outcome in told] == [(2.0, 0.0), (4.0, 0.0)]
