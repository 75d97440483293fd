"""What keeps a reward for seeing from being hacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.controls import Control, number
from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Term
from mmrl.views import MaskedPatches, View

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class DoubleEntropy(Term):
    """It keeps the policy sure of what it says, with the prompt and under the view: the divergence between the two can
    be made large by saying nonsense, which this forbids. Use it beside a term of type view_kl with the same view."""

    equation: ClassVar[str] = "-coefficient logp - view_coefficient logp under the view, of the sampled decisions"
    source: ClassVar[str] = "the double entropy loss of PAPO, arXiv 2507.06448"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "double_entropy"
    coefficient: Control = number(0.03, "weight of the sampled entropy", ge=0)
    view_coefficient: Control = number(0.03, "weight of that under the view", ge=0)
    view: View = option(MaskedPatches(), "the other view")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"views"}), views=(self.view,))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        other = replay.views[self.view.name]
        values = -self.coefficient.value * replay.logp - self.view_coefficient.value * other.logp
        return values, {"view_entropy": -other.logp.detach()}
