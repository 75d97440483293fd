"""Advantages that favour decisions in doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class EntropyBonus(Shaper):
    """A decision that was in doubt gets a larger advantage, but never one of the other sign."""

    equation: ClassVar[str] = "A + min(alpha H, |A| / kappa), H of the policy that made the rollout, without gradient"
    source: ClassVar[str] = "Reasoning with Exploration, arXiv 2506.14758"
    type: str = "entropy_bonus"
    alpha: float = option(0.4, "weight of the entropy", gt=0)
    kappa: float = option(2.0, "the bonus is at most |A| / kappa", gt=1)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        entropy = batch.rollouts.old_entropy
        assert entropy is not None
        return advantages + (self.alpha * entropy).minimum(advantages.abs() / self.kappa)
