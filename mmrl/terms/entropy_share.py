"""Learning from the decisions that were most in doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class EntropyShare(Mask):
    """Only the share of the step's decisions with the highest entropy is learned from."""

    equation: ClassVar[str] = "keep where H >= quantile(H, 1 - share), over the decisions of all ranks"
    source: ClassVar[str] = "Beyond the 80/20 rule, arXiv 2506.01939"
    type: str = "entropy_share"
    share: float = option(0.2, "of the decisions that are learned from", gt=0, le=1)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def keep(self, batch: Batch) -> Tensor:
        entropy = batch.rollouts.old_entropy
        assert entropy is not None
        everyone = batch.decisions(entropy).sort(descending=True).values
        last = max(1, round(self.share * len(everyone))) - 1
        return entropy >= everyone[last]
