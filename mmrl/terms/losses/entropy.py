"""Entropy as a loss term."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class Entropy(Term):
    """An entropy bonus."""

    equation: ClassVar[str] = "-coefficient H(pi)"
    source: ClassVar[str] = "Williams and Peng 1991; with a target: Skywork-OR1, arXiv 2505.22312"
    type: str = "entropy"
    coefficient: Schedule = number(0.001, "weight of the bonus; with type additive it holds the entropy at a target")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        assert replay.entropy is not None
        return -self.coefficient.value * replay.entropy, {}
