"""How much responses depend on what another view of the prompt hides, as a loss term."""

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


class ViewKL(Term):
    """It pushes the policy away from what it would say without seeing the picture: a response that is as likely with
    the picture masked was not read off the picture."""

    equation: ClassVar[str] = "-coefficient min(k3(logp, logp under the view), bound)"
    source: ClassVar[str] = "the implicit perception loss of PAPO, arXiv 2507.06448"
    type: str = "view_kl"
    coefficient: Control = number(0.01, "weight of the term", ge=0)
    bound: float = option(5.0, "largest divergence that is rewarded", unit="nats", gt=0)
    view: View = option(MaskedPatches(), "the other view")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"views"}), views=(self.view,))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.regularizers import kl_estimate

        other = replay.views[self.view.name]
        kl = kl_estimate(replay.logp, other.logp, kind="k3")
        return -self.coefficient.value * kl.clamp(max=self.bound), {"view_kl": kl.detach()}
