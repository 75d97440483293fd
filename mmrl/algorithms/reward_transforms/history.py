"""Rewards normalized by the mean and std of earlier steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class History(Transform):
    """Normalizes the reward by its running mean and std over earlier steps.

    So a soft reward that has become high for nearly all rollouts keeps a useful range. Use it with
    algorithm.scale=none or batch_std, since dividing by the group's std undoes it.
    """

    equation: ClassVar[str] = (
        "r <- (r - m) / (s + 1e-6), m and s the mean and std of the rewards of earlier steps, with the weight "
        "(1 - keep) keep^age of a step; in the first step its own mean and std"
    )
    source: ClassVar[str] = "reconstructed from ARMed: a semantic reward rescaled by its historical distribution"
    type: str = "history"
    keep: float = option(0.9, "decay of the running mean and std per step", ge=0, lt=1)

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns (rewards - mean) / std of earlier steps, [rollout of all ranks], and adds this step's rewards to
        the running averages of rewards and of squared rewards."""
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
