"""Baselines: what a reward is compared with before it is an advantage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig

Total = Callable[["Tensor"], "Tensor"]  # [rollout, component] -> [rollout], as the algorithm combines rewards


class Baseline(Choice):
    """What a reward is compared with.

    compares: whether it is made of the other rollouts of the group, so that a group of one has none. known: whether
    `core.advantages` knows it by its type; the others give `of`. single: whether it is of one combined reward alone.
    """

    title: ClassVar[str] = "baseline"
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
    known: ClassVar[bool] = False
    single: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        return Needs()

    def check(self, config: JobConfig) -> None:
        """Raises ValueError in one line for settings that do not go with it."""

    def of(self, rewards: Tensor, batch: Batch, total: Total) -> Tensor:
        """[rollout of all ranks], for the combined reward [rollout of all ranks], NaN where it is unknown."""
        raise NotImplementedError(f"algorithm.baseline={self.type} gives no values of its own")


class Known(Baseline):
    known: ClassVar[bool] = True


class Mean(Known):
    """The mean of the group."""

    equation: ClassVar[str] = "A = r - mean_j r_j"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    type: str = "mean"


class LeaveOneOut(Known):
    """The mean of the others of the group."""

    equation: ClassVar[str] = "A = r - mean_{j != i} r_j"
    source: ClassVar[str] = "RLOO, arXiv 2402.14740"
    type: str = "leave_one_out"


class LengthWeighted(Known):
    """The mean of the group, in which a rollout counts as much as it has decisions."""

    equation: ClassVar[str] = "A = r - sum_j l_j r_j / sum_j l_j"
    source: ClassVar[str] = "OPO, arXiv 2505.23585"
    type: str = "length_weighted"


class Shrinkage(Known):
    """The mean of the others of the group, shrunk towards the mean of the other groups."""

    equation: ClassVar[str] = "A = r - (1 - q) mean_{j != i} r_j - q mean of the other groups, q = v / (v + tau^2)"
    source: ClassVar[str] = "the idea of arXiv 2511.03710, with plug-in estimates of v and tau^2"
    type: str = "shrinkage"


class NoBaseline(Known):
    """Nothing: the reward itself is the advantage."""

    equation: ClassVar[str] = "A = r"
    source: ClassVar[str] = "REINFORCE, Williams 1992"
    compares: ClassVar[bool] = False
    type: str = "none"
