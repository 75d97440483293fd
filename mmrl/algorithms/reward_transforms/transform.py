"""Base class of transforms, which change rewards before the baseline is subtracted."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Transform(Choice):
    """A change of the combined reward, or with components=normalise_each of every component.

    finished: whether it returns advantages, so that the baseline and the scale must be none.
    """

    title: ClassVar[str] = "transform of rewards"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # in a step, by itself
    kinds: ClassVar[dict[str, str]] = {
        "rank": "mmrl.algorithms.reward_transforms.ranking:Rank",
        "best_only": "mmrl.algorithms.reward_transforms.best_of:BestOnly",
        "pass_at_k": "mmrl.algorithms.reward_transforms.best_of:PassAtK",
        "pass_at_k_analytic": "mmrl.algorithms.reward_transforms.best_of:PassAtKAnalytic",
        "smoothing": "mmrl.algorithms.reward_transforms.smoothing:Smoothing",
        "modes": "mmrl.algorithms.reward_transforms.modes:Modes",
        "history": "mmrl.algorithms.reward_transforms.history:History",
        "sequence_entropy": "mmrl.algorithms.reward_transforms.sequence_entropy:SequenceEntropy",
        "view_agreement": "mmrl.algorithms.reward_transforms.view_agreement:ViewAgreement",
        "inverse_likelihood": "mmrl.algorithms.reward_transforms.inverse:InverseLikelihood",
        "kl_penalty": "mmrl.algorithms.reward_transforms.kl_penalty:KLPenalty",
        "view_contrast": "mmrl.algorithms.reward_transforms.view_contrast:ViewContrast",
    }
    test: ClassVar[str] = "tests/joints/test_transforms.py"
    finished: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        return Needs()

    @abstractmethod
    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the changed rewards, [rollout of all ranks] -> the same shape. NaN stays NaN and does not affect the
        others."""


def groups_of(rewards: Tensor, units: Tensor) -> list[Tensor]:
    """Returns the rows of the scored rewards of each unit, [n] int64 each. units: [rollout]."""
    scored = ~rewards.isnan()
    return [((units == unit) & scored).nonzero().flatten() for unit in units.unique()]
