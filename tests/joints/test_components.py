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
