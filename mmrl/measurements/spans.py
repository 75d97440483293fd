"""The measurement of spans: what a reward said of parts of a response, at the decisions that own them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.errors import UserError
from mmrl.protocols.abilities import DecisionTexts
from mmrl.protocols.measurement import CollectedContext, CollectedMeasurement
from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.spans import SpanColumn
    from mmrl.rollouts import Rollouts, Sample, Spans

Bounds = tuple[int, int]  # begin and end

Unit = Literal["characters", "turns", "decisions"]
REQUIRED: dict[Unit, frozenset[Offer]] = {
    "characters": frozenset({DecisionTexts}),
    "turns": frozenset({"turns"}),
    "decisions": frozenset(),
}


@dataclass(frozen=True)
class SpanValues(CollectedMeasurement["SpanColumn"]):
    """The spans that the reward of this column returned."""

    reward: str
    of: Unit = "characters"
    cost: ClassVar[str] = "nothing"

    @property
    def name(self) -> str:
        return f"spans {self.reward}"

    @property
    def offers(self) -> frozenset[Offer]:
        return REQUIRED[self.of]

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> SpanColumn:
        import torch

        from mmrl.protocols.spans import SpanColumn
        from mmrl.rollouts import Spans

        spans = [sample.spans.get(self.reward, Spans((), unit=self.of)) for sample in rollouts.samples]
        self._check(rollouts, spans)
        bounds = [[(begin, end) for begin, end, _ in each.values] for each in spans]
        return SpanColumn(
            [torch.tensor([value for _, _, value in each.values], dtype=torch.float32) for each in spans],
            self._shares(rollouts, bounds, context),
            [self._texts(sample, each) for sample, each in zip(rollouts.samples, bounds, strict=True)],
        )

    def _check(self, rollouts: Rollouts, spans: Sequence[Spans]) -> None:
        """Raises UserError where the reward returned no spans, or spans of another unit (`of`)."""
        if rollouts.samples and not any(sample.spans.get(self.reward) for sample in rollouts.samples):
            scored = rollouts.rewards is not None and bool(rollouts.rewards.isfinite().any())
            if scored:
                raise UserError(
                    f"reward {self.reward!r} returned numbers alone; credit by spans needs one that returns Spans, "
                    "such as process"
                )
        other = next((each.unit for each in spans if each.unit != self.of), None)
        if other is not None:
            raise UserError(f"reward {self.reward!r} returned spans of {other}; set of={other} where they are used")

    def _shares(self, rollouts: Rollouts, bounds: Sequence[list[Bounds]], context: CollectedContext) -> list[Tensor]:
        from mmrl.core.turns import unit_shares
        from mmrl.rollouts import Turns

        if self.of == "turns":
            turns = rollouts.extra("turns", Turns)
            return [
                unit_shares(number.where(mask, -1), each)
                for number, mask, each in zip(turns.number, rollouts.mask, bounds, strict=True)
            ]
        if self.of == "decisions":
            counted = (rollouts.mask.long().cumsum(1) - 1).where(rollouts.mask, -1)
            return [self._bounded(number, each) for number, each in zip(counted, bounds, strict=True)]
        pieces = context.policy.decision_texts(rollouts)
        return [
            self._spelled(row, sample, each) for row, sample, each in zip(pieces, rollouts.samples, bounds, strict=True)
        ]

    def _bounded(self, number: Tensor, bounds: list[Bounds]) -> Tensor:
        """Returns (decision, span, share) [3, entry], see `unit_shares`. number: [decision], the
        unit of each decision. Raises UserError for a span beyond the last one."""
        from mmrl.core.turns import unit_shares

        decisions = int(number.max()) + 1
        if bounds and bounds[-1][1] > decisions:
            raise UserError(f"reward {self.reward!r}: a span ends at {bounds[-1][1]}, after {decisions} decisions")
        return unit_shares(number, bounds)

    def _spelled(self, pieces: list[str], sample: Sample, bounds: list[Bounds]) -> Tensor:
        from mmrl.core.turns import character_shares

        if bounds and "".join(pieces) != sample.response:
            raise UserError(
                f"reward {self.reward!r}: spans of characters are for single responses; in conversations return spans "
                "of turns"
            )
        return character_shares(pieces, bounds)

    def _texts(self, sample: Sample, bounds: list[Bounds]) -> list[str]:
        """Returns the text of each span of a response; "" for spans of decisions, whose text is not kept. bounds: begin
        and end in the unit `of`, turns or characters."""
        if self.of == "turns" and sample.conversation is not None:
            turns = [turn.response for turn in sample.conversation.turns]
            return ["\n".join(turns[begin:end]) for begin, end in bounds]
        return [sample.response[begin:end] for begin, end in bounds] if self.of == "characters" else [""] * len(bounds)
