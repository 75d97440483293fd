"""Rewards under constraints on costs, by Lagrange multipliers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.scales.components import Components
from mmrl.schedules.schedule import Schedule
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.estimator import Estimator


class Constrained(Components):
    """The advantage of the reward minus the advantages of costs, each times its price (a Lagrange multiplier).

    Costs are rewards of weight 0 in the task. A price of type multiplier, with metric `reward/<cost>` and the budget as
    its target, is a PID-Lagrangian multiplier: it rises while the cost is above the budget.
    """

    equation: ClassVar[str] = "A = (A(r) - sum_k price_k A(cost_k)) / (1 + sum_k price_k)"
    source: ClassVar[str] = "PID Lagrangian methods, Stooke et al. 2020, arXiv 2007.03964, with group advantages"
    test: ClassVar[str] = "tests/joints/test_components.py"
    type: str = "constrained"
    prices: dict[str, Schedule] = option(description="price of each cost, by the name of its reward", min_length=1)

    def check_names(self, names: list[str]) -> None:
        for name in self.prices:
            if name not in names:
                raise ValueError(f"algorithm.components.prices: {name} is not a reward; choose from {', '.join(names)}")

    def combine(self, estimate: Estimator, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Returns the advantage of the reward minus price x the advantage of each cost, over 1 + the sum of prices;
        [rollout of all ranks]."""
        prices = {name: price.value for name, price in self.prices.items()}
        advantages = estimate(self.total(rewards, weights, names))
        for name, price in prices.items():
            advantages = advantages - price * estimate(rewards[:, names.index(name)])
        return advantages / (1 + sum(prices.values()))
