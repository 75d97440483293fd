"""The policy's certainty as a reward, without labels (RENT, EM-RL)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Certainty(Transform):
    """Subtracts the mean entropy of a response from its reward. Without another reward (`outcome: 0`) the policy learns
    without labels to be certain, which helps only where its certainty is a sign of being right. Set `guards` against a
    collapse to one answer."""

    equation: ClassVar[str] = "outcome r - weight mean_t H_t, H of the policy that made the rollout"
    source: ClassVar[str] = "RENT, arXiv 2505.22660, over all tokens; EM-RL, arXiv 2505.15134, whose sum is a mean here"
    type: str = "certainty"
    weight: float = option(1.0, "weight of the entropy", gt=0)
    outcome: float = option(1.0, "weight of the reward; 0: entropy alone", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        return self.outcome * rewards - self.weight * batch.column("entropy").to(rewards)
