"""Base class of reward transforms, which change rewards before the baseline is subtracted."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Transform(Choice):
    """A change of the combined reward, or with components=normalise_each of each component."""

    title: ClassVar[str] = "transform of rewards"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # what the transform changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "rank": "mmrl.algorithms.reward_transforms.ranking:Rank",
        "best_only": "mmrl.algorithms.reward_transforms.best_of:BestOnly",
        "pass_at_k": "mmrl.algorithms.reward_transforms.best_of:PassAtK",
        "pass_at_k_analytic": "mmrl.algorithms.reward_transforms.best_of:PassAtKAnalytic",
        "smoothing": "mmrl.algorithms.reward_transforms.smoothing:Smoothing",
        "modes": "mmrl.algorithms.reward_transforms.modes:Modes",
        "history": "mmrl.algorithms.reward_transforms.history:History",
        "sequence_entropy": "mmrl.algorithms.reward_transforms.sequence_entropy:SequenceEntropy",
        "length": "mmrl.algorithms.reward_transforms.length:Length",
        "perturbation": "mmrl.algorithms.reward_transforms.perturbation:Perturbation",
        "certainty": "mmrl.algorithms.reward_transforms.certainty:Certainty",
        "view_agreement": "mmrl.algorithms.reward_transforms.view_agreement:ViewAgreement",
        "inverse_likelihood": "mmrl.algorithms.reward_transforms.inverse:InverseLikelihood",
        "kl_penalty": "mmrl.algorithms.reward_transforms.kl_penalty:KLPenalty",
        "view_contrast": "mmrl.algorithms.reward_transforms.view_contrast:ViewContrast",
    }
    test: ClassVar[str] = "tests/joints/test_transforms.py"
    returns_advantages: ClassVar[bool] = False  # then baseline and scale must be none

    @property
    def needs(self) -> Needs:
        """Returns what the transform requires of the policy and the job."""
        return Needs()

    @abstractmethod
    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Computes the changed rewards from rewards [rollout of all ranks], of the same shape. NaN stays NaN and does
        not affect other rewards."""


def group_rows(rewards: Tensor, group: Tensor) -> list[Tensor]:
    """Returns for each group the rows whose reward is not NaN, [n] int64. rewards, group: [rollout]."""
    scored = ~rewards.isnan()
    return [((group == g) & scored).nonzero().flatten() for g in group.unique()]
