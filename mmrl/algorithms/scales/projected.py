"""An auxiliary reward whose advantage is orthogonal to that of the main reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.scales.components import Components
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.estimator import Estimator


class Projected(Components):
    """The main advantage plus the component of an auxiliary reward's advantage that is orthogonal to it.

    So the auxiliary reward does not change the weight of the main one. It must have weight 0 in the task.
    """

    equation: ClassVar[str] = "A = A_main + weight (A_aux - <A_aux, A_main> / |A_main|^2 A_main), over the batch"
    source: ClassVar[str] = "reconstructed from what AnomSeer says of TimerPO: an orthogonally projected advantage"
    test: ClassVar[str] = "tests/joints/test_components.py"
    type: str = "projected"
    auxiliary: str = option(description="name of the auxiliary reward")
    weight: Schedule = number(0.5, "weight of the auxiliary advantage", ge=0)

    def check_names(self, names: list[str]) -> None:
        if self.auxiliary not in names:
            raise ValueError(
                f"algorithm.components.auxiliary={self.auxiliary} is not a reward; choose from {', '.join(names)}"
            )

    def combine(self, estimate: Estimator, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Returns the main advantage plus weight x the part of the auxiliary advantage that is orthogonal to it over
        the batch; [rollout of all ranks]."""
        main = estimate(self.total(rewards, weights, names))
        auxiliary = estimate(rewards[:, names.index(self.auxiliary)])
        projection = (auxiliary * main).sum() / main.square().sum().clamp(min=1e-12)
        return main + self.weight.value * (auxiliary - projection * main)
