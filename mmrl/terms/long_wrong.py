"""Wrong answers that are long count more."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class LongWrong(Shaper):
    """The advantage of a wrong rollout grows, up to twice, with how much longer it is than the group's right ones on
    average. A group without a right one stays as it is."""

    equation: ClassVar[str] = "A <- A (2 - base^-(L - mean L of the right)) of wrong rollouts that are longer"
    source: ClassVar[str] = "STCR of View-R1, from its released code"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "long_wrong"
    base: float = option(1.00001, "the further above 1, the sooner the factor is 2", gt=1)
    threshold: float = option(0.5, "rewards above it are of right answers")

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        rewards, lengths, group = batch.combined(), batch.fact("length").float(), batch.fact("group")
        right, factor = rewards > self.threshold, torch.ones(len(rewards))
        for g in group.unique():
            rows = group == g
            if bool((rows & right).any()):
                excess = lengths - lengths[rows & right].mean()
                wrong = rows & (rewards <= self.threshold) & (excess > 0)
                factor[wrong] = 2 - self.base ** -excess[wrong]
        return advantages * batch.mine(factor)[:, None]
