"""Prompts that no rollout answered rightly are asked again: `extra_rollouts`."""

import pytest

from mmrl.config import configure
from mmrl.errors import UserError
from tests.joints.parts import Table, close

EXTRA = "rollout.extras=[{type: extra_rollouts, count: 2, temperature: 1.7%s}]"


def asked(given, rewards, *overrides):
    """Groups of two in the order in which prompts are asked; two prompts a step."""
    flat = [reward for group in rewards for reward in group]
    table = Table([[-1.0]] * len(flat), group=[row // 2 for row in range(len(flat))], rewards=flat)
    made = given(table, "algorithm.scale=none", *overrides)
    rollouts = made.next()
    made.prepare(rollouts)
    return made, rollouts


def test_what_all_got_wrong_is_asked_again_and_what_is_right_joins(given):
    """Of the second prompt rows 2 and 3 are wrong; of rows 4 and 5 one is right."""
    made, rollouts = asked(given, [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], EXTRA % "")
    assert rollouts.inputs == [0, 1, 2, 3, 5] and rollouts.origin.tolist() == [0, 0, 0, 0, 3]
    assert rollouts.group.tolist() == [0, 0, 1, 1, 1] and rollouts.prompt[4] == rollouts.prompt[3]
    close(rollouts.advantages[:, 0], [0.5, -0.5, -1 / 3, -1 / 3, 2 / 3])
    first, again = made.trainer.policy.calls
    assert (first.temperature, again.temperature) == (1.0, 1.7)
    assert len(again.seeds) == 2 and not set(again.seeds) & set(first.seeds)
    made.learn()
    close(made.gradient()[:, 0] * 5, [-0.5, 0.5, 1 / 3, 1 / 3, 0.0, -2 / 3])


def test_nobody_is_asked_where_every_group_has_a_right_one(given):
    made, rollouts = asked(given, [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], EXTRA % "")
    assert len(rollouts) == 4 and len(made.trainer.policy.calls) == 1


def test_no_more_than_a_group_may_get(given):
    _, rollouts = asked(given, [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], EXTRA % "")
    assert rollouts.inputs[4:] == [4, 5]
    _, rollouts = asked(given, [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], EXTRA % ", most: 1")
    assert rollouts.inputs[4:] == [4]
    # where both prompts fail, each gets its own
    _, rollouts = asked(given, [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]], EXTRA % ", most: 1")
    assert rollouts.inputs[4:] == [4, 7] and rollouts.group[4:].tolist() == [0, 1]


def test_the_bound_of_what_is_right(given):
    _, rollouts = asked(given, [[1.0, 0.0], [0.4, 0.0], [0.5, 0.4]], EXTRA % ", accuracy: 0.5")
    assert rollouts.inputs[4:] == [4]
    _, rollouts = asked(given, [[1.0, 0.0], [0.4, 0.0], [0.5, 0.4]], EXTRA % ", accuracy: 0.4")
    assert len(rollouts) == 4


def test_a_rank_without_failures_asks_with_the_others_and_keeps_nothing(given):
    """Generating takes all ranks; what it is told is right all the same."""
    table = Table([[-1.0]] * 6, group=[0, 0, 1, 1, 2, 2], rewards=[1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    made = given(table, EXTRA % "", "algorithm.scale=none")
    for extra in made.trainer.collector.extras.sources:
        extra._context = type(extra._context)(**{**vars(extra._context), "max_over_ranks": lambda value: max(value, 1)})
    rollouts = made.next()
    assert len(made.trainer.policy.calls) == 2 and len(made.trainer.policy.calls[1].seeds) == 2
    assert len(rollouts) == 5 and not rollouts.mask[4].any()


def test_what_is_found_so_is_replayed(given):
    options = [
        "rollout.prompts=1",
        "rollout.extras=[{type: extra_rollouts, count: 2}, success_replay]",
    ]
    made, _ = asked(given, [[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]], *options)
    made.trainer.collector.observe(made.batch)
    made.trainer.collector.draws.sampler.__dict__["draw"] = lambda count: [int(made.batch.rollouts.prompt[0])] * count
    assert made.next(1).inputs == [4, 5, 3]


def test_an_engine_that_is_busy_with_the_next_step_can_not_be_asked():
    generator = {"type": "vllm_server", "async_steps": 1}
    tree = {"run_dir": "unset", "rollout": {"extras": ["extra_rollouts"], "generator": generator}}
    with pytest.raises(UserError, match="needs further rollouts of a step at another temperature"):
        configure(tree)
    configure({"run_dir": "unset", "rollout": {"extras": ["extra_rollouts"]}})
