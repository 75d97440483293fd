"""Rewards replaced by scores of their ranks within a group, so that their scale does not matter."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, group_rows
from mmrl.protocols.requirements import Needs, needs_column
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class RankScore(Choice):
    """A score of a reward's rank within its group."""

    title: ClassVar[str] = "score of ranks"
    kinds: ClassVar[dict[str, str]] = {
        "win_rate": "mmrl.algorithms.reward_transforms.ranking:WinRate",
        "pairwise": "mmrl.algorithms.reward_transforms.ranking:Pairwise",
        "inverse_normal": "mmrl.algorithms.reward_transforms.ranking:InverseNormal",
    }
    test: ClassVar[str] = "tests/joints/test_transforms.py"

    @abstractmethod
    def scores(self, rewards: Tensor) -> Tensor:
        """Computes the score of each reward [n] among all of them, [n]; no reward is NaN."""


class WinRate(RankScore):
    """The fraction of the other rollouts with a smaller reward."""

    equation: ClassVar[str] = "(#{j: r_j < r_i} + #{j != i: r_j = r_i} / 2) / (G - 1)"
    source: ClassVar[str] = "rank-based group advantages, as named in the survey arXiv 2509.08827, section 3.1.4"
    type: str = "win_rate"

    def scores(self, rewards: Tensor) -> Tensor:
        from mmrl.core.ranking import fraction_beaten

        return fraction_beaten(rewards)


class Pairwise(RankScore):
    """The mean of tanh of the reward differences to all other rollouts, so that large differences saturate."""

    equation: ClassVar[str] = "sum_j tanh((r_i - r_j) / temperature) / (G - 1)"
    source: ClassVar[str] = "reconstructed from what MemDecoder says of its ranking-aware GRPO: pairwise comparisons"
    type: str = "pairwise"
    temperature: float = option(1.0, "scale of reward differences: tanh is about 3/4 there", gt=0)

    def scores(self, rewards: Tensor) -> Tensor:
        from mmrl.core.ranking import mean_tanh_preference

        return mean_tanh_preference(rewards, self.temperature)


class InverseNormal(RankScore):
    """The normal quantile of the reward's rank, so that rewards of any distribution become normally distributed."""

    equation: ClassVar[str] = "Phi^-1((rank_i + 1/2) / n), rank_i from 0, the mean rank of equal rewards"
    source: ClassVar[str] = "reconstructed from what OpenVLThinkerV2, arXiv 2604.08539, says of its Gaussian G2RPO"
    type: str = "inverse_normal"

    def scores(self, rewards: Tensor) -> Tensor:
        from mmrl.core.ranking import inverse_normal

        return inverse_normal(rewards)


class Rank(Transform):
    """Replaces each reward by a score of its rank within its group."""

    equation: ClassVar[str] = "r_i <- score(r_i; r_1 .. r_G)"
    source: ClassVar[str] = "rank-based group advantages, as named in the survey arXiv 2509.08827, section 3.1.4"
    type: str = "rank"
    score: RankScore = option(WinRate(), "score of a rank")
    by: str = option("group", "quantity whose equal values are ranked together: group, a key of metadata, ...")

    @property
    def needs(self) -> Needs:
        return needs_column(self.by)

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the score of each reward among those with the same value of `by`, [rollout of all ranks]."""
        scores = rewards.clone()
        for rows in group_rows(rewards, batch.column(self.by)):
            scores[rows] = self.score.scores(rewards[rows])
        return scores
