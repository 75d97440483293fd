"""The lambda of generalized advantage estimation (GAE), constant or by the length of the rollout."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor


class TraceDecay(Choice):
    """The GAE lambda of each rollout. In YAML a number is a constant for all rollouts."""

    title: ClassVar[str] = "lambda of estimates"
    kinds: ClassVar[dict[str, str]] = {
        "constant": "mmrl.algorithms.trace_decay:ConstantDecay",
        "by_length": "mmrl.algorithms.trace_decay:LengthDecay",
    }
    test: ClassVar[str] = "tests/joints/test_ppo.py"
    of_numbers: ClassVar[bool] = True

    @abstractmethod
    def lambdas(self, length: Tensor) -> Tensor:
        """Returns the lambda of each rollout, [rollout] float64 in 0..1. length: [rollout], its number of steps."""


class ConstantDecay(TraceDecay):
    """The same lambda for all rollouts."""

    source: ClassVar[str] = "GAE, arXiv 1506.02438"
    type: str = "constant"
    number: float = option(0.95, "lambda. 1: returns; toward 0: the critic's values", ge=0, le=1)

    def lambdas(self, length: Tensor) -> Tensor:
        """Returns `number` for each rollout, [rollout] float64."""
        import torch

        return torch.full(length.shape, self.number, dtype=torch.float64)


class LengthDecay(TraceDecay):
    """A lambda that grows with the length of the rollout, so that the final reward also reaches the beginning of long
    ones. It is 0 up to 1 / scale steps (20 by default)."""

    equation: ClassVar[str] = "lambda = max(0, 1 - 1 / (scale l)) for a rollout of l steps"
    source: ClassVar[str] = "VAPO, arXiv 2504.05118"
    type: str = "by_length"
    scale: float = option(0.05, "lambda is 1 - 1 / (scale x steps of the rollout), at least 0", gt=0)

    def lambdas(self, length: Tensor) -> Tensor:
        """Returns 1 - 1 / (scale x steps) for each rollout, at least 0: [rollout] float64. length: [rollout]."""
        return (1 - 1 / (self.scale * length.clamp(min=1).double())).clamp(min=0)
