"""A surrogate that pulls the policy back by the square of how far it has moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Result, Surrogate
from mmrl.schedules.schedule import Schedule, number

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class MirrorDescent(Surrogate):
    """A step of mirror descent as a regression: the logarithm of the ratio is fitted to the advantage over tau. Nothing
    is clipped and no weight is put on old rollouts. The paper's l is the sum over a response; with
    algorithm.level=sequence it is the mean here. With algorithm.scale=none the advantage is the reward less the mean of
    its group, as there."""

    equation: ClassVar[str] = "-A l + tau / 2 l^2 = tau / 2 (A / tau - l)^2 but for a constant, l = log r"
    source: ClassVar[str] = "Kimi k1.5, arXiv 2501.12599, equation 3"
    test: ClassVar[str] = "tests/joints/test_clips.py"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}, whatever tau"
    type: str = "mirror_descent"
    tau: Schedule = number(0.1, "price of the squared log-ratio", gt=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        pull = self.tau.value / 2 * log_ratio.square()
        return pull - advantages * log_ratio, {"ratio": log_ratio.detach().exp(), "pull": pull.detach()}
