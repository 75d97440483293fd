"""Rewards as places within a group: their scale, and how far the best is ahead, do not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, groups_of
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Rank(Transform):
    """The share of the group's others that a rollout beats."""

    equation: ClassVar[str] = "r_i <- (#{j: r_j < r_i} + #{j != i: r_j = r_i} / 2) / (G - 1)"
    source: ClassVar[str] = "rank-based group advantages, as named in the survey arXiv 2509.08827, section 3.1.4"
    type: str = "rank"

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.ranking import share_beaten

        found = rewards.clone()
        for rows in groups_of(rewards, batch.fact("group")):
            found[rows] = share_beaten(rewards[rows])
        return found


class Pairwise(Transform):
    """Comparisons with each of the others, that differences far above the temperature do not raise further."""

    equation: ClassVar[str] = "r_i <- sum_j tanh((r_i - r_j) / temperature) / (G - 1)"
    source: ClassVar[str] = "reconstructed from what MemDecoder says of its ranking-aware GRPO: pairwise comparisons"
    type: str = "pairwise"
    temperature: float = option(1.0, "difference of rewards that counts about three quarters", gt=0)

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.ranking import mean_preference

        found = rewards.clone()
        for rows in groups_of(rewards, batch.fact("group")):
            found[rows] = mean_preference(rewards[rows], self.temperature)
        return found


class InverseNormal(Transform):
    """The quantile of a normal distribution at the reward's place, so that rewards of any shape, of any task, give
    advantages of the same distribution."""

    equation: ClassVar[str] = "r_i <- Phi^-1((place_i + 1/2) / n), place_i from 0, the mean place of equals"
    source: ClassVar[str] = "reconstructed from what OpenVLThinkerV2, arXiv 2604.08539, says of its Gaussian G2RPO"
    type: str = "inverse_normal"
    by: str = option("group", "the fact whose equal values are ranked together: group, a task's name in metadata, ...")

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.ranking import inverse_normal

        found = rewards.clone()
        for rows in groups_of(rewards, batch.fact(self.by)):
            found[rows] = inverse_normal(rewards[rows])
        return found
