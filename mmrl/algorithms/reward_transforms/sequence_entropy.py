"""A bonus by entropy for right rollouts, and a penalty for wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, groups_of
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class SequenceEntropy(Transform):
    """The group's right rollouts share a bonus in proportion to their mean entropies, its wrong ones a penalty in
    proportion to the reciprocals."""

    equation: ClassVar[str] = (
        "right: beta_1 r + beta_2 n H_i / sum_k H_k over the n right ones; wrong: beta_1 r - beta_2 m (1 / H_j) / "
        "sum_k (1 / H_k) over the m wrong ones; H the mean entropy of the rollout, at least 1e-6"
    )
    source: ClassVar[str] = "GRPO-S, arXiv 2508.04349"
    type: str = "sequence_entropy"
    beta_1: float = option(1.0, "weight of the reward", ge=0)
    beta_2: float = option(0.1, "what is shared by entropy", ge=0)
    threshold: float = option(0.5, "rewards above it are of right answers")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        shaped, entropy, nan = rewards.clone(), batch.column("entropy").clamp(min=1e-6), float("nan")
        for of, sign, share in (
            (rewards > self.threshold, 1.0, entropy),
            (rewards <= self.threshold, -1.0, 1 / entropy),
        ):
            for rows in groups_of(rewards.where(of, nan), batch.column("group")):
                part = share[rows] / share[rows].sum() * len(rows)
                shaped[rows] = self.beta_1 * rewards[rows] + sign * self.beta_2 * part
        return shaped
