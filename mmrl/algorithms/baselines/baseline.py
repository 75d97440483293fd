"""Base class of baselines, which are subtracted from rewards, and baselines from statistics of the group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.core.advantages import Moments
    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig

CombineRewards = Callable[["Tensor"], "Tensor"]  # reward components [rollout, component] -> one reward [rollout]


class Baseline(Choice):
    """A baseline that is subtracted from rewards.

    A class of your own overrides one of two methods, whose defaults subtract nothing: `compute` returns a baseline for
    each rollout, `center` subtracts a statistic of the group.
    """

    title: ClassVar[str] = "baseline"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # what the baseline changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "mean": "mmrl.algorithms.baselines.baseline:Mean",
        "leave_one_out": "mmrl.algorithms.baselines.baseline:LeaveOneOut",
        "length_weighted": "mmrl.algorithms.baselines.baseline:LengthWeighted",
        "shrinkage": "mmrl.algorithms.baselines.baseline:Shrinkage",
        "none": "mmrl.algorithms.baselines.baseline:NoBaseline",
        "quantile": "mmrl.algorithms.baselines.quantile:Quantile",
        "batch_mean": "mmrl.algorithms.baselines.batch_mean:BatchMean",
        "running": "mmrl.algorithms.baselines.running:Running",
        "greedy": "mmrl.algorithms.baselines.greedy:Greedy",
    }
    test: ClassVar[str] = "tests/joints/test_advantages.py"
    uses_other_rollouts: ClassVar[bool] = True  # of the group, so that a group of one has no baseline
    zero_if_equal: ClassVar[bool] = False  # advantages of equal rewards are exactly 0, also after normalization
    single_reward_only: ClassVar[bool] = False  # does not work with separate baselines for several rewards
    default_scale: ClassVar[str] = "group_std"  # `algorithm.scale` if the job sets none, as in the baseline's paper

    @property
    def needs(self) -> Needs:
        """Returns what the baseline requires of the policy and the job."""
        return Needs()

    def check(self, config: JobConfig) -> None:
        """Raises ValueError if settings of the job do not fit."""

    def compute(self, rewards: Tensor, batch: Batch, combine: CombineRewards) -> Tensor:
        """Computes the baseline of each rollout, [rollout of all ranks]; by default 0.

        rewards: [rollout of all ranks], combined from all reward components, NaN where unknown. combine: combines
        components [rollout, component] in the same way, for a baseline that needs the rewards of other responses, such
        as greedy ones. `algorithm.scale` divides by a statistic of the rewards minus this baseline.
        """
        import torch

        return torch.zeros_like(rewards)

    def center(self, rewards: Tensor, index: Tensor, group_moments: Moments, batch: Batch) -> Tensor:
        """Subtracts a statistic of the group, [rollout of all ranks]; by default nothing. NaN stays NaN.

        rewards: [rollout of all ranks], after `compute` was subtracted; index: [rollout of all ranks], the group of
        each rollout, from 0; group_moments: moments of the rewards of each group. `algorithm.scale` divides by a
        statistic of `rewards`, not of what is returned.
        """
        return rewards


class GroupStatistic(Baseline):
    """Base class of baselines that depend on the rewards of the group only."""

    zero_if_equal: ClassVar[bool] = True

    @abstractmethod
    def center(self, rewards: Tensor, index: Tensor, group_moments: Moments, batch: Batch) -> Tensor: ...


class Mean(GroupStatistic):
    """The mean of the group."""

    equation: ClassVar[str] = "A = r - mean_j r_j"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    type: str = "mean"

    def center(self, rewards: Tensor, index: Tensor, group_moments: Moments, batch: Batch) -> Tensor:
        from mmrl.core.advantages import subtract_mean

        return subtract_mean(rewards, index, group_moments)


class LeaveOneOut(GroupStatistic):
    """The mean of the other rollouts of the group."""

    equation: ClassVar[str] = "A = r - mean_{j != i} r_j"
    source: ClassVar[str] = "RLOO, arXiv 2402.14740"
    default_scale: ClassVar[str] = "none"
    type: str = "leave_one_out"

    def center(self, rewards: Tensor, index: Tensor, group_moments: Moments, batch: Batch) -> Tensor:
        from mmrl.core.advantages import subtract_leave_one_out_mean

        return subtract_leave_one_out_mean(rewards, index, group_moments)


class LengthWeighted(GroupStatistic):
    """The mean of the group, weighted by the number of decisions of each rollout."""

    equation: ClassVar[str] = "A = r - sum_j l_j r_j / sum_j l_j"
    source: ClassVar[str] = "OPO, arXiv 2505.23585"
    default_scale: ClassVar[str] = "none"
    type: str = "length_weighted"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"lengths"}))

    def center(self, rewards: Tensor, index: Tensor, group_moments: Moments, batch: Batch) -> Tensor:
        from mmrl.core.advantages import subtract_length_weighted_mean

        return subtract_length_weighted_mean(rewards, index, group_moments, batch.column("length"))


class Shrinkage(GroupStatistic):
    """The mean of the other rollouts of the group, shrunk toward the mean of the other groups (James-Stein)."""

    equation: ClassVar[str] = "A = r - (1 - q) mean_{j != i} r_j - q mean of the other groups, q = v / (v + tau^2)"
    source: ClassVar[str] = "the idea of arXiv 2511.03710, with plug-in estimates of v and tau^2"
    type: str = "shrinkage"

    def center(self, rewards: Tensor, index: Tensor, group_moments: Moments, batch: Batch) -> Tensor:
        from mmrl.core.advantages import subtract_james_stein_baseline

        return subtract_james_stein_baseline(rewards, index, group_moments)


class NoBaseline(Baseline):
    """No baseline: the reward itself is the advantage."""

    equation: ClassVar[str] = "A = r"
    source: ClassVar[str] = "REINFORCE, Williams 1992"
    uses_other_rollouts: ClassVar[bool] = False
    default_scale: ClassVar[str] = "none"
    type: str = "none"
