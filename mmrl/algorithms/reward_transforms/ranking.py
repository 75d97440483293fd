"""Rewards as ranks within a group: their scale, and the lead of the best, do not count."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, groups_of
from mmrl.protocols.requirements import Needs, needs_column
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class RankScore(Choice):
    """A score of a reward's rank among others."""

    title: ClassVar[str] = "score of ranks"
    kinds: ClassVar[dict[str, str]] = {
        "win_rate": "mmrl.algorithms.reward_transforms.ranking:WinRate",
        "pairwise": "mmrl.algorithms.reward_transforms.ranking:Pairwise",
        "inverse_normal": "mmrl.algorithms.reward_transforms.ranking:InverseNormal",
    }
    test: ClassVar[str] = "tests/joints/test_transforms.py"

    @abstractmethod
    def of(self, rewards: Tensor) -> Tensor:
        """Returns the scores of scored rewards, [n] -> [n]."""


class WinRate(RankScore):
    """The share of the others that a rollout beats."""

    equation: ClassVar[str] = "(#{j: r_j < r_i} + #{j != i: r_j = r_i} / 2) / (G - 1)"
    source: ClassVar[str] = "rank-based group advantages, as named in the survey arXiv 2509.08827, section 3.1.4"
    type: str = "win_rate"

    def of(self, rewards: Tensor) -> Tensor:
        from mmrl.core.ranking import share_beaten

        return share_beaten(rewards)


class Pairwise(RankScore):
    """Comparisons with each of the others, that differences far above the temperature do not raise further."""

    equation: ClassVar[str] = "sum_j tanh((r_i - r_j) / temperature) / (G - 1)"
    source: ClassVar[str] = "reconstructed from what MemDecoder says of its ranking-aware GRPO: pairwise comparisons"
    type: str = "pairwise"
    temperature: float = option(1.0, "difference of rewards that counts about three quarters", gt=0)

    def of(self, rewards: Tensor) -> Tensor:
        from mmrl.core.ranking import mean_preference

        return mean_preference(rewards, self.temperature)


class InverseNormal(RankScore):
    """The quantile of a normal distribution at the reward's rank, so that rewards of any distribution give advantages
    of the same distribution."""

    equation: ClassVar[str] = "Phi^-1((place_i + 1/2) / n), place_i from 0, the mean place of equals"
    source: ClassVar[str] = "reconstructed from what OpenVLThinkerV2, arXiv 2604.08539, says of its Gaussian G2RPO"
    type: str = "inverse_normal"

    def of(self, rewards: Tensor) -> Tensor:
        from mmrl.core.ranking import inverse_normal

        return inverse_normal(rewards)


class Rank(Transform):
    """The score of a reward's rank within its group."""

    equation: ClassVar[str] = "r_i <- score(r_i; r_1 .. r_G)"
    source: ClassVar[str] = "rank-based group advantages, as named in the survey arXiv 2509.08827, section 3.1.4"
    type: str = "rank"
    score: RankScore = option(WinRate(), "the score of a rank")
    by: str = option("group", "the fact whose equal values are ranked together: group, a task's name in metadata, ...")

    @property
    def needs(self) -> Needs:
        return needs_column(self.by)

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        scores = rewards.clone()
        for rows in groups_of(rewards, batch.column(self.by)):
            scores[rows] = self.score.of(rewards[rows])
        return scores
