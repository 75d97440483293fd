"""Rollouts whose facts are out of a band."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from mmrl.settings import option
from mmrl.terms.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class Band(Mask):
    """Rollouts of which a fact is outside low..high leave the loss and their group's statistics: a guard that drops
    what hacks the reward. A fact that could not be measured keeps its rollout."""

    equation: ClassVar[str] = "low <= fact <= high"
    source: ClassVar[str] = "reward guards, as a mask of our own"
    of: ClassVar[Literal["rollouts", "decisions"]] = "rollouts"
    test: ClassVar[str] = "tests/test_guards.py"
    type: str = "band"
    fact: str = option(description="such as reward/sharpness, of a reward with weight 0")
    low: float = option(-math.inf, "least value that is kept")
    high: float = option(math.inf, "largest value that is kept")

    @model_validator(mode="after")
    def _rises(self) -> Band:
        if self.low > self.high or (self.low, self.high) == (-math.inf, math.inf):
            raise ValueError(f"low={self.low:g} and high={self.high:g} are no band")
        return self

    def keep(self, batch: Batch) -> Tensor:
        values = batch.fact(self.fact)
        inside = values.isnan() | ((values >= self.low) & (values <= self.high))
        batch.report({f"band/{self.fact}": float(inside.float().mean())})
        return batch.mine(inside)
