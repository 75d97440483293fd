"""An auxiliary reward that can not work against the main one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.scales.components import Components
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.estimator import Estimator


class Projected(Components):
    """The advantage of an auxiliary reward is added without its part along the main advantage, so that the weight of
    the main one is not changed by it. The auxiliary reward has weight 0 in the task."""

    equation: ClassVar[str] = "A = A_main + weight (A_aux - <A_aux, A_main> / |A_main|^2 A_main), over the batch"
    source: ClassVar[str] = "reconstructed from what AnomSeer says of TimerPO: an orthogonally projected advantage"
    test: ClassVar[str] = "tests/joints/test_components.py"
    type: str = "projected"
    auxiliary: str = option(description="name of the auxiliary reward")
    weight: Schedule = number(0.5, "weight of the auxiliary advantage", ge=0)

    def check_names(self, names: list[str]) -> None:
        if self.auxiliary not in names:
            raise ValueError(f"algorithm.components.auxiliary={self.auxiliary}: the rewards are {', '.join(names)}")

    def combine(self, estimate: Estimator, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        main = estimate(self.total(rewards, weights, names))
        other = estimate(rewards[:, names.index(self.auxiliary)])
        along = (other * main).sum() / main.square().sum().clamp(min=1e-12)
        return main + self.weight.value * (other - along * main)
