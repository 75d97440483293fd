"""Credit by segments: `segment_values`, from what comes of going on from the edges of segments."""

import numpy as np
import torch

from mmrl.core.credit import segment_gains
from tests.joints.parts import Table, close

SHAPED = ["rollout.prompts=1", "algorithm.shaping=[{type: segment_values, every: 2, count: 2}]"]


def made_of(given, *overrides, weights=(1.0,)):
    """A group of five and two decisions, rewards 1 and 0. Row 0 is cut after 2 and after 4; two continuations of the
    former are worth 1 and 0.5, of the latter 0.5 and 0. Rows 2 to 4 are what they become."""
    logp = [[-1.0] * 5, [-1.0] * 2, [-1.0], [-1.0], [-1.0]]
    table = Table(logp, group=[0, 0, 1, 1, 1], rewards=[1.0, 0.0, 1.0, 0.5, 0.0])
    made = given(table, *SHAPED, *overrides)
    made.trainer.policy.continues = {(0, 2): [2, 3], (0, 4): [3, 4]}
    return made


def test_a_segment_gets_what_it_added(given):
    """Worth of row 0: 0.5, the group's mean; 0.75 after two, 0.25 after four, and 1 in the end. Row 1 has one."""
    made = made_of(given)
    rollouts = made.next()
    made.prepare(rollouts)
    expected = [[0.25, 0.25, -0.5, -0.5, 0.75], [-0.5, -0.5, 0, 0, 0]]
    close(rollouts.advantages, expected)
    made.learn()
    close(made.gradient()[:2] * 7, [[-a for a in row] for row in expected])
    call = made.trainer.policy.calls[-1]
    assert call.what == "continued" and len(set(call.seeds)) == 4


def test_seeds_do_not_depend_on_the_batch(given):
    made = made_of(given)
    made.next()
    again = made_of(given)
    again.next()
    assert made.trainer.policy.calls[-1].seeds == again.trainer.policy.calls[-1].seeds
    other = made_of(given, "seed=1")
    other.next()
    assert not set(made.trainer.policy.calls[-1].seeds) & set(other.trainer.policy.calls[-1].seeds)


def test_a_seed_is_of_the_run_the_draw_the_member_the_cut_and_the_number(given):
    """The second group's second rollout is row 3 of this batch; elsewhere it would be another row."""
    logp = [[-1.0] * 3, [-1.0], [-1.0], [-1.0] * 3, [-1.0], [-1.0]]
    made = given(Table(logp, group=[0, 0, 1, 1, 2, 2]), *SHAPED[1:])
    made.trainer.policy.continues = {(0, 2): [4, 5], (3, 2): [4, 5]}
    made.next()
    words = [(0, 0, 0, 2, 0), (0, 0, 0, 2, 1), (0, 1, 1, 2, 0), (0, 1, 1, 2, 1)]
    expected = [int(np.random.SeedSequence(each).generate_state(1)[0]) for each in words]
    assert made.trainer.policy.calls[-1].seeds == expected


def test_rewards_are_weighted(given):
    made = made_of(given, "task.weights=[-2]")
    rollouts = made.next()
    made.prepare(rollouts)
    close(rollouts.advantages[0], [-0.5, -0.5, 1.0, 1.0, -1.5])


def test_a_continuation_that_could_not_be_scored_leaves_the_others(given):
    """Row 4 has no score: worth 0.75 after two decisions, as before, and 0.5 after four, by row 3 alone."""
    made = made_of(given)
    made.table.rewards[4] = torch.nan
    rollouts = made.next()
    made.prepare(rollouts)
    close(rollouts.advantages[0], [0.25, 0.25, -0.25, -0.25, 0.5])


def test_what_joined_a_group_keeps_its_advantage(given):
    made = made_of(given, "rollout.extras=[{type: guided_groups}]", "algorithm.scale=none")
    rollouts = made.next()
    made.prepare(rollouts)
    close(rollouts.advantages[0], [0.25, 0.25, -0.5, -0.5, 0.75])  # of the fresh group alone
    assert rollouts.origin.tolist() == [0, 0, 1]
    close(rollouts.advantages[2, 0], 1.0 - 2 / 3)  # the demonstration is row 2


def test_a_rank_without_cuts_asks_with_the_others(given):
    table = Table([[-1.0], [-1.0], [-1.0]], group=[0, 0, 1], rewards=[1.0, 0.0, 1.0])
    made = given(table, *SHAPED)
    made.trainer.policy.continues = {(0, 0): [2, 2]}
    assert not [call for call in made.trainer.policy.calls if call.what == "continued"]
    made.trainer.engine.max = lambda value: max(value, 1)
    rollouts = made.next()
    made.prepare(rollouts)
    assert made.trainer.policy.calls[-1].what == "continued"
    close(rollouts.advantages[:, 0], [0.5, -0.5])


def test_what_is_unknown_adds_nothing():
    mask = torch.tensor([[True, True, True, False]])
    worth, outcome = torch.tensor([[0.5, torch.nan]]), torch.tensor([1.0])
    close(segment_gains(worth, outcome, mask, segment_length=2), [[0.0, 0.0, 0.0, 0.0]])
    worth = torch.tensor([[0.5, 0.25]])
    close(segment_gains(worth, outcome, mask, segment_length=2), [[-0.25, -0.25, 0.75, 0.0]])
    close(segment_gains(worth, torch.tensor([torch.nan]), mask, segment_length=2), [[-0.25, -0.25, 0.0, 0.0]])
    close(segment_gains(worth[:, :1], outcome, mask, segment_length=4), [[0.5, 0.5, 0.5, 0.0]])  # one segment


def test_segments_are_counted_by_decisions_across_observations():
    """Segments of one decision, worth 0 and 1 at their beginnings; the outcome is 5."""
    mask = torch.tensor([[True, False, True]])
    gains = segment_gains(torch.tensor([[0.0, 1.0, 7.0]]), torch.tensor([5.0]), mask, segment_length=1)
    assert gains.tolist() == [[1.0, 0.0, 4.0]]
