"""Base class of baselines, and baselines from statistics of the group."""

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

Total = Callable[["Tensor"], "Tensor"]  # [rollout, component] -> [rollout], as the algorithm combines rewards


class Baseline(Choice):
    """A baseline that is subtracted from rewards: a value of the rollout (`of`), or a statistic of its group
    (`centre`). Users' classes override one of the two; the defaults change nothing.

    compares: whether it is computed from other rollouts of the group, so that a group of one has none. within_group:
    whether equal rewards of a group leave exactly 0, which later normalisation keeps. single: whether it applies to one
    combined reward only. usual_scale: `algorithm.scale` where the job names none, that of the baseline's source.
    """

    title: ClassVar[str] = "baseline"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # in a step, by itself
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
    compares: ClassVar[bool] = True
    within_group: ClassVar[bool] = False
    single: ClassVar[bool] = False
    usual_scale: ClassVar[str] = "group_std"

    @property
    def needs(self) -> Needs:
        return Needs()

    def check(self, config: JobConfig) -> None:
        """Raises ValueError for settings that do not go with it."""

    def of(self, rewards: Tensor, batch: Batch, total: Total) -> Tensor:
        """Returns what is subtracted from the rewards, [rollout of all ranks] as these are, NaN where one is unknown;
        by default 0. The scale then divides by a deviation of the differences."""
        import torch

        return torch.zeros_like(rewards)

    def centre(self, rewards: Tensor, index: Tensor, within: Moments, batch: Batch) -> Tensor:
        """Subtracts a statistic of the groups from rewards from which `of` is already subtracted, [rollout of all
        ranks]; by default nothing. index: the group's number from 0, [rollout]; within: moments of the groups. NaN
        stays NaN. The scale then divides by a deviation of the rewards."""
        return rewards


class GroupStatistic(Baseline):
    """A statistic of the group alone."""

    within_group: ClassVar[bool] = True

    @abstractmethod
    def centre(self, rewards: Tensor, index: Tensor, within: Moments, batch: Batch) -> Tensor: ...


class Mean(GroupStatistic):
    """The mean of the group."""

    equation: ClassVar[str] = "A = r - mean_j r_j"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "mean"

    def centre(self, rewards: Tensor, index: Tensor, within: Moments, batch: Batch) -> Tensor:
        from mmrl.core.advantages import less_mean

        return less_mean(rewards, index, within)


class LeaveOneOut(GroupStatistic):
    """The mean of the others of the group."""

    equation: ClassVar[str] = "A = r - mean_{j != i} r_j"
    source: ClassVar[str] = "RLOO, arXiv 2402.14740"
    usual_scale: ClassVar[str] = "none"
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "leave_one_out"

    def centre(self, rewards: Tensor, index: Tensor, within: Moments, batch: Batch) -> Tensor:
        from mmrl.core.advantages import less_mean_of_others

        return less_mean_of_others(rewards, index, within)


class LengthWeighted(GroupStatistic):
    """The mean of the group, in which a rollout counts as much as it has decisions."""

    equation: ClassVar[str] = "A = r - sum_j l_j r_j / sum_j l_j"
    source: ClassVar[str] = "OPO, arXiv 2505.23585"
    usual_scale: ClassVar[str] = "none"
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "length_weighted"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"lengths"}))

    def centre(self, rewards: Tensor, index: Tensor, within: Moments, batch: Batch) -> Tensor:
        from mmrl.core.advantages import less_length_weighted_mean

        return less_length_weighted_mean(rewards, index, within, batch.column("length"))


class Shrinkage(GroupStatistic):
    """The mean of the others of the group, shrunk towards the mean of the other groups."""

    equation: ClassVar[str] = "A = r - (1 - q) mean_{j != i} r_j - q mean of the other groups, q = v / (v + tau^2)"
    source: ClassVar[str] = "the idea of arXiv 2511.03710, with plug-in estimates of v and tau^2"
    type: str = "shrinkage"

    def centre(self, rewards: Tensor, index: Tensor, within: Moments, batch: Batch) -> Tensor:
        from mmrl.core.advantages import less_shrunken_mean

        return less_shrunken_mean(rewards, index, within)


class NoBaseline(Baseline):
    """Nothing: the reward itself is the advantage."""

    equation: ClassVar[str] = "A = r"
    source: ClassVar[str] = "REINFORCE, Williams 1992"
    compares: ClassVar[bool] = False
    usual_scale: ClassVar[str] = "none"
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "none"
