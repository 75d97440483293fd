"""Entropy as a loss term."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.measurements.words import WordBeginnings
    from mmrl.rollouts import Replay, Rollouts


class Entropy(Term):
    """An entropy bonus, of all decisions or of those at which a named word begins. The metric entropy/words is the mean
    entropy at the named words; with the coefficient 0 the term only reports it."""

    equation: ClassVar[str] = "-coefficient H(pi), with `words` only where one of them begins, else 0"
    source: ClassVar[str] = (
        "Williams and Peng 1991; with a target: Skywork-OR1, arXiv 2505.22312; the entropy of critical tokens: "
        "Skywork-R1V3, arXiv 2507.06167, which selects checkpoints by it"
    )
    type: str = "entropy"
    coefficient: Schedule = number(0.001, "weight of the bonus; with type additive it holds the entropy at a target")

    words: list[str] = option(
        [],
        "words, such as Wait, at which the entropy counts; whole words, as they are written; empty: everywhere",
    )

    @property
    def beginnings(self) -> WordBeginnings:
        """Returns the measurement of the decisions at which a word begins."""
        from mmrl.measurements.words import WordBeginnings

        return WordBeginnings(tuple(self.words))

    @property
    def needs(self) -> Needs:
        measurements = (self.beginnings,) if self.words else ()
        return Needs(offers=frozenset({"entropy"}), measurements=measurements)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -coefficient H and statistics, [rollout, decision]."""
        import torch

        from mmrl.rollouts import DecisionColumn

        assert replay.entropy is not None
        if not self.words:
            return -self.coefficient.value * replay.entropy, {}
        begins = micro.extra(self.beginnings.name, DecisionColumn).values.to(replay.entropy.device)
        stats = {"entropy/words": replay.entropy.detach().where(begins, torch.nan)}
        return -self.coefficient.value * replay.entropy.where(begins, 0), stats
