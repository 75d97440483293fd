"""Rewards standardised by those of earlier steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class History(Transform):
    """A reward is rescaled by the mean and the deviation of earlier steps, so that a soft reward that has become high
    for nearly everything still tells good from better. Use it with algorithm.scale=none or batch_std, for a deviation
    of the group undoes it."""

    equation: ClassVar[str] = (
        "r <- (r - m) / (s + 1e-6), m and s the mean and std of the rewards of all earlier steps, a step weighing "
        "(1 - keep) keep^age; of the first step its own"
    )
    source: ClassVar[str] = "reconstructed from ARMed: a semantic reward rescaled by its historical distribution"
    type: str = "history"
    keep: float = option(0.9, "weight of the past in a step", ge=0, lt=1)

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        scored = rewards[~rewards.isnan()]
        if not len(scored):
            return rewards
        mean, square = float(scored.mean()), float(scored.square().mean())
        memory = batch.memory.setdefault(self.key, {"mean": mean, "square": square})
        std = max(0.0, memory["square"] - memory["mean"] ** 2) ** 0.5
        rescaled = (rewards - memory["mean"]) / (std + 1e-6)
        for name, value in (("mean", mean), ("square", square)):
            memory[name] = self.keep * memory[name] + (1 - self.keep) * value
        return rescaled
