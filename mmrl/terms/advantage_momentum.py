"""What a rollout earns more than a response of the reference policy, beside what it earns more than its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class AdvantageMomentum(Shaper):
    """A rollout gains by how much its reward is above that of a response of the reference policy to the same prompt,
    within bounds: a group whose rewards are all equal teaches as well. AAPO has no ratio; that is
    algorithm.surrogate=reinforce."""

    equation: ClassVar[str] = "A + clamp(r - reward of a response of the reference policy, -low, high)"
    source: ClassVar[str] = (
        "AAPO, arXiv 2505.14264, and its published code, where every rollout has such a response of its own"
    )
    test: ClassVar[str] = "tests/joints/test_advantage_momentum.py"
    type: str = "advantage_momentum"
    low: float = option(0.2, "most that is taken off an advantage", ge=0)
    high: float = option(0.28, "most that is added to it", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"reference_rollouts"}), reference=True, reference_responses=True)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        ahead = batch.mine(batch.combined()) - batch.column("reference_reward")
        gain = ahead.clamp(-self.low, self.high).nan_to_num(0.0)  # where either could not be scored
        return advantages + gain[:, None].to(advantages)
