"""An entropy-dependent bonus for right rollouts, and a penalty for wrong ones (GRPO-S)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, group_rows
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class SequenceEntropy(Transform):
    """Gives the group's right rollouts a bonus in proportion to their mean entropies, and its wrong rollouts a penalty
    in proportion to the reciprocals of their mean entropies."""

    equation: ClassVar[str] = (
        "right: beta_1 r + beta_2 n H_i / sum_k H_k over the n right ones; wrong: beta_1 r - beta_2 m (1 / H_j) / "
        "sum_k (1 / H_k) over the m wrong ones; H the mean entropy of the rollout, at least 1e-6"
    )
    source: ClassVar[str] = "GRPO-S, arXiv 2508.04349"
    type: str = "sequence_entropy"
    beta_1: float = option(1.0, "weight of the reward", ge=0)
    beta_2: float = option(0.1, "weight of the entropy-dependent part", ge=0)
    threshold: float = option(0.5, "a rollout is right if its reward is above it")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns beta_1 r + beta_2 w for right rollouts, beta_1 r - beta_2 w for wrong ones, [rollout of all ranks].

        w is proportional to the rollout's mean entropy if it is right, to the reciprocal if it is wrong, with mean 1
        over the right and over the wrong rollouts of a group.
        """
        changed, entropy = rewards.clone(), batch.column("entropy").clamp(min=1e-6)
        for selected, sign, raw_weight in (
            (rewards > self.threshold, 1.0, entropy),
            (rewards <= self.threshold, -1.0, 1 / entropy),
        ):
            for rows in group_rows(rewards.where(selected, float("nan")), batch.column("group")):
                weight = raw_weight[rows] / raw_weight[rows].sum() * len(rows)
                changed[rows] = self.beta_1 * rewards[rows] + sign * self.beta_2 * weight
        return changed
