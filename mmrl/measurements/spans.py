"""The measurement of spans: values that a reward gave to parts of a response, and the decisions in each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.errors import UserError
from mmrl.protocols.abilities import DecisionTexts, Stepwise
from mmrl.protocols.measurement import CollectedContext, CollectedMeasurement
from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.spans import SpanColumn
    from mmrl.rollouts import Rollouts, Sample, Spans

Bounds = tuple[int, int]  # begin and end of a span, in its unit

Unit = Literal["characters", "turns", "decisions", "policy_steps"]
REQUIRED: dict[Unit, frozenset[Offer]] = {
    "characters": frozenset({DecisionTexts}),
    "turns": frozenset({"turns"}),
    "decisions": frozenset(),
    "policy_steps": frozenset({Stepwise}),
}


@dataclass(frozen=True)
class SpanValues(CollectedMeasurement["SpanColumn"]):
    """The spans that a reward returned: their values, their decisions and their texts.

    reward: the name of the reward; of: the unit of the spans' bounds.
    """

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
        """Returns values, decisions and texts of the spans that the reward returned, for each rollout."""
        import torch

        from mmrl.protocols.spans import SpanColumn
        from mmrl.rollouts import Spans

        spans = [sample.spans.get(self.reward, Spans((), unit=self.of)) for sample in rollouts.samples]
        self._check(rollouts, spans)
        bounds = [[(begin, end) for begin, end, _ in rollout_spans.values] for rollout_spans in spans]
        values = [[value for _, _, value in rollout_spans.values] for rollout_spans in spans]
        return SpanColumn(
            [torch.tensor(rollout_values, dtype=torch.float32) for rollout_values in values],
            self._shares(rollouts, bounds, context),
            [
                self._texts(sample, sample_bounds)
                for sample, sample_bounds in zip(rollouts.samples, bounds, strict=True)
            ],
        )

    def _check(self, rollouts: Rollouts, spans: Sequence[Spans]) -> None:
        """Raises UserError if the reward returned only numbers, or spans of another unit than `of`."""
        if rollouts.samples and not any(sample.spans.get(self.reward) for sample in rollouts.samples):
            scored = rollouts.rewards is not None and bool(rollouts.rewards.isfinite().any())
            if scored:
                raise UserError(
                    f"reward {self.reward!r} returned only numbers, but algorithm names it as a reward of spans; name "
                    "one that returns Spans, such as process"
                )
        other_unit = next((rollout_spans.unit for rollout_spans in spans if rollout_spans.unit != self.of), None)
        if other_unit is not None:
            raise UserError(
                f"reward {self.reward!r} is used with of={self.of}, but "
                f"returned spans of {other_unit}; set of={other_unit} in algorithm.shaping, or name another reward"
            )

    def check_reward(self, names: list[str], key: str) -> None:
        """Raises ValueError with the configuration key if the task has no reward of this name."""
        if self.reward not in names:
            raise ValueError(f"{key}={self.reward} is not a reward; choose from {', '.join(names)}")

    def _shares(self, rollouts: Rollouts, bounds: Sequence[list[Bounds]], context: CollectedContext) -> list[Tensor]:
        """Returns for each rollout which decisions belong to which span, [3, entry]: index of the decision, index of
        the span, and the share of the decision in the span."""
        import torch

        from mmrl.core.turns import unit_shares
        from mmrl.rollouts import Turns

        if self.of == "turns":
            turns = rollouts.extra("turns", Turns)
            return [
                unit_shares(number.where(mask, -1), turn_bounds)
                for number, mask, turn_bounds in zip(turns.number, rollouts.mask, bounds, strict=True)
            ]
        if self.of == "decisions":
            numbers = (rollouts.mask.long().cumsum(1) - 1).where(rollouts.mask, -1)
            return [self._decision_shares(*pair) for pair in zip(numbers, bounds, strict=True)]
        if self.of == "policy_steps":
            lengths = context.policy.lengths(rollouts)
            per_step = rollouts.mask.shape[1] // max(1, int(lengths.max()))  # decisions of a policy step
            number = torch.arange(rollouts.mask.shape[1]) // per_step
            return [
                self._decision_shares(number.where(mask, -1), step_bounds, int(length))
                for mask, step_bounds, length in zip(rollouts.mask.cpu(), bounds, lengths, strict=True)
            ]
        pieces = context.policy.decision_texts(rollouts)
        return [self._text_shares(*triple) for triple in zip(pieces, rollouts.samples, bounds, strict=True)]

    def _decision_shares(self, number: Tensor, bounds: list[Bounds], length: int | None = None) -> Tensor:
        """Returns the decisions of each span, [3, entry], as `_shares` does. number: [decision], the unit of each
        decision: its position among the masked-in ones, or its policy step; -1 for none. length: number of units; None:
        the largest of `number` and 1. Raises UserError if a span ends after the last unit."""
        from mmrl.core.turns import unit_shares

        length = int(number.max()) + 1 if length is None else length
        if bounds and bounds[-1][1] > length:
            raise UserError(
                f"reward {self.reward!r} returned a span that ends at {bounds[-1][1]}, but the rollout has "
                f"{length} {self.of.replace('_', ' ')}; correct the reward"
            )
        return unit_shares(number, bounds)

    def _text_shares(self, pieces: list[str], sample: Sample, bounds: list[Bounds]) -> Tensor:
        """Returns the decisions of each span of characters, [3, entry], as `_shares` does. pieces: each decision's
        text. Raises UserError if the response is a conversation."""
        from mmrl.core.turns import character_shares

        if bounds and "".join(pieces) != sample.response:
            raise UserError(
                f"reward {self.reward!r}: spans of characters work for single responses only; for conversations return "
                "spans of turns"
            )
        return character_shares(pieces, bounds)

    def _texts(self, sample: Sample, bounds: list[Bounds]) -> list[str]:
        """Returns the text of each span of a response; "" for spans of decisions and policy steps."""
        if self.of == "turns" and sample.conversation is not None:
            turns = [turn.response for turn in sample.conversation.turns]
            return ["\n".join(turns[begin:end]) for begin, end in bounds]
        if self.of == "characters":
            return [sample.response[begin:end] for begin, end in bounds]
        return [""] * len(bounds)
