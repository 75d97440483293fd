"""A regularizer for action heads that consist of several parts, or that wrap another head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class HeadCost(Term):
    """A regularizer of an action head that consists of several parts; the head computes it at replay.

    Each decision of a policy step (one inference of a chunk of actions) has the whole cost of that step.
    """

    equation: ClassVar[str] = (
        "coefficient x: information KL(N(z, noise^2) || N(0, 1)) of a residual head's code z; displacement "
        "E |w - e|^2 by number of a steered head's noise w, e ~ N(0, 1); imbalance the mean over "
        "horizons of (load - 1)^2, load_h = mean_{k < h} g_kh #{horizons > k}"
    )
    source: ClassVar[str] = (
        "variational information bottleneck, arXiv 1612.00410; the balance of MoH's gate, arXiv 2511.19433, by policy "
        "step; the bound of LP-DS, whose multiplier is `coefficient: {type: multiplier, metric: displacement}`"
    )
    test: ClassVar[str] = "tests/policies/vla/test_residual.py"
    type: str = "head_cost"
    coefficient: Schedule = number(0.001, "weight of the term", ge=0)
    of: Literal["information", "displacement", "imbalance"] = option(
        "information",
        "information: KL of a residual head's latent code; displacement: distance of a steered head's noise from the "
        "flow's own noise; imbalance: how unevenly the gate uses the horizons",
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({self.of}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        cost = replay.extras[self.of]
        return self.coefficient.value * cost, {self.of: cost.detach()}
