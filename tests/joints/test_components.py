"""Components beside the most common ones, from their keys to the advantages."""

import pytest

from mmrl.errors import UserError
from tests.joints.parts import Table, close

TWO = ["task.names=[right, cost]", "task.weights=[1, 0]", "algorithm.scale=none"]


def prepared(given, rewards, components, *overrides):
    table = Table([[-1.0]] * len(rewards), rewards=rewards)
    made = given(table, f"rollout.group_size={len(rewards)}", f"algorithm.components={components}", *TWO, *overrides)
    rollouts = made.prepare()
    made.learn()
    close(made.gradient()[:, 0], -rollouts.advantages[:, 0] / len(rewards))
    return made, rollouts.advantages[:, 0]


def test_constrained(given):
    # Rewards 0, 2 around 1 and costs 4, 0 around 2: (-1 - 0.5 x 2) / 1.5 and (1 + 0.5 x 2) / 1.5.
    _, found = prepared(given, [[0.0, 4.0], [2.0, 0.0]], "{type: constrained, prices: {cost: 0.5}}")
    close(found, [-2 / 1.5, 2 / 1.5])
    # Two costs: 1, 3 around 2 as well. (-1 - 0.5 x 2 + 1) / 2.5, and the same the other way round.
    three = ["task.names=[right, cost, risk]", "task.weights=[1, 0, 0]"]
    prices = "{type: constrained, prices: {cost: 0.5, risk: 1}}"
    _, found = prepared(given, [[0.0, 4.0, 1.0], [2.0, 0.0, 3.0]], prices, *three)
    close(found, [-0.4, 0.4])


def test_the_price_rises_while_the_cost_is_above_its_budget(given):
    price = "{type: multiplier, metric: reward/cost, target: 1, k_i: 0.25, start: 0}"
    made, found = prepared(given, [[0.0, 4.0], [2.0, 0.0]], f"{{type: constrained, prices: {{cost: {price}}}}}")
    close(found, [-1, 1])  # nothing is charged yet
    made.trainer.train()  # the mean cost is 2, 1 above the budget: 0.25 more each step
    values = [row["control/algorithm.components.prices.cost"] for row in made.trainer.run.rows]
    close(values, [0.0, 0.25, 0.5, 0.75])


def test_projected(given):
    # Main -1, 0, 1 and auxiliary 2, -4, 2 around 0: they are orthogonal. Then auxiliary 0, 0, 3 around 1: -1, -1, 2,
    # whose part along the main one is (1 + 2) / 2 = 1.5: what is left is 0.5, -1, 0.5.
    _, found = prepared(given, [[1.0, 2.0], [2.0, -4.0], [3.0, 2.0]], "{type: projected, auxiliary: cost}")
    close(found, [0, -2, 2])
    _, found = prepared(given, [[1.0, 0.0], [2.0, 0.0], [3.0, 3.0]], "{type: projected, auxiliary: cost, weight: 2}")
    close(found, [-1 + 1, -2, 1 + 1])


@pytest.mark.parametrize("components", ["{type: constrained, prices: {csot: 1}}", "{type: projected, auxiliary: csot}"])
def test_a_reward_that_the_task_does_not_have(given, components):
    with pytest.raises(UserError, match="csot.*right, cost"):
        prepared(given, [[0.0, 4.0], [2.0, 0.0]], components)


# --- gates that are for some prompts alone ---

GATED = "algorithm.components={type: gated, gates: [%s]}"
FOR_ONE = "{name: 'tests.joints.test_components:closed', label: gate, where: {level: 0}%s}"


def closed(sample):
    """A gate that is closed for odd rows."""
    return 1.0 - int(sample.response) % 2


def number(sample):
    return float(sample.response)


@pytest.mark.parametrize(
    ("more", "second"), [("", [2.0, 3.0]), (", elsewhere: 0", [0.0, 0.0]), (", elsewhere: 2", [4, 6])]
)
def test_a_gate_is_open_for_prompts_that_it_is_not_for(given, more, second):
    """Level 1 has no gate: rows 2 and 3 earn what they are worth. Row 1 is shut out."""
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], metadata=[{"level": 0}] * 2 + [{"level": 1}] * 2)
    rewards = f"task.rewards=[{FOR_ONE % more}, {{name: 'tests.joints.test_components:number', label: worth}}]"
    made = given(table, rewards, GATED % "gate", "algorithm.scale=none", "algorithm.baseline=none")
    close(made.prepare(made.next()).advantages[:, 0], [0.0, 0.0, *second])


def test_a_gate_of_turns_is_open_for_prompts_that_it_is_not_for(given):
    """The gate's reward is 1 at level 1, so that the turns of these prompts keep what they earned."""
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], metadata=[{"level": 0}] * 2 + [{"level": 1}] * 2)
    shaping = "algorithm.shaping=[{type: turn_returns, gate: gate, answer: gate}]"
    made = given(table, f"task.rewards=[{FOR_ONE % ''}]", shaping)
    assert made.next().rewards[:, 0].tolist() == [1.0, 0.0, 1.0, 1.0]


def test_a_reward_that_is_no_gate_gives_nothing_elsewhere(given):
    table = Table([[-1.0]] * 4, group=[0, 0, 1, 1], metadata=[{"level": 0}] * 2 + [{"level": 1}] * 2)
    made = given(table, f"task.rewards=[{FOR_ONE % ''}]", "algorithm.scale=none", "algorithm.baseline=none")
    close(made.prepare(made.next()).advantages[:, 0], [1.0, 0.0, 0.0, 0.0])
