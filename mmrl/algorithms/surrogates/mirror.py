"""Mirror descent: a surrogate with a squared penalty on the log-ratio (Kimi k1.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Result, Surrogate
from mmrl.schedules.schedule import Schedule, number

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class MirrorDescent(Surrogate):
    """Mirror descent as a regression: the log-ratio is fitted to the advantage over tau, without clip or importance
    weight.

    The paper's l is the sum over a response; here, with algorithm.level=sequence, it is the mean. With
    algorithm.scale=none the advantage is the reward minus the group's mean, as in the paper.
    """

    equation: ClassVar[str] = "-A l + tau / 2 l^2 = tau / 2 (A / tau - l)^2 up to a constant, l = log r"
    source: ClassVar[str] = "Kimi k1.5, arXiv 2501.12599, equation 3"
    test: ClassVar[str] = "tests/joints/test_clips.py"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}, whatever tau"
    type: str = "mirror_descent"
    tau: Schedule = number(0.1, "weight of the squared log-ratio", gt=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        penalty = self.tau.value / 2 * log_ratio.square()
        return penalty - advantages * log_ratio, {"ratio": log_ratio.detach().exp(), "pull": penalty.detach()}
