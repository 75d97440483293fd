"""Entropy as a loss term."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.prompts.views import MaskedPatches, View
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class Entropy(Term):
    """A bonus for decisions that stay open."""

    equation: ClassVar[str] = "-coefficient H(pi)"
    source: ClassVar[str] = "Williams and Peng 1991; with a target: Skywork-OR1, arXiv 2505.22312"
    type: str = "entropy"
    coefficient: Schedule = number(0.001, "weight of the bonus; of type additive it follows a target")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        assert replay.entropy is not None
        return -self.coefficient.value * replay.entropy, {}


class DoubleEntropy(Term):
    """It keeps the policy sure of what it says, with the prompt and under the view: the divergence between the two can
    be made large by saying nonsense, which this forbids. Use it beside a term of type view_kl with the same view."""

    equation: ClassVar[str] = "-coefficient logp - view_coefficient logp under the view, of the sampled decisions"
    source: ClassVar[str] = "the double entropy loss of PAPO, arXiv 2507.06448"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "double_entropy"
    coefficient: Schedule = number(0.03, "weight of the sampled entropy", ge=0)
    view_coefficient: Schedule = number(0.03, "weight of that under the view", ge=0)
    view: View = option(MaskedPatches(), "the other view")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"views"}), views=(self.view,))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        other = replay.views[self.view.name]
        values = -self.coefficient.value * replay.logp - self.view_coefficient.value * other.logp
        return values, {"view_entropy": -other.logp.detach()}
