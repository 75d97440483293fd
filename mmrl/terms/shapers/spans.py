"""Credit of spans: a reward that returns values of parts of a response, as advantages of their decisions."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.spans import SpanValues, Unit
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.auxiliary import AuxiliaryModule
    from mmrl.protocols.batch import Batch
    from mmrl.protocols.spans import SpanColumn


class SpanShaper(Shaper):
    """A shaper that reads the spans of a reward. The base of those below."""

    test: ClassVar[str] = "tests/joints/test_span_credit.py"
    reward: str = option("process", "column of the reward that returns spans")
    of: Unit = option("characters", "what its spans count")

    @property
    def spans(self) -> SpanValues:
        return SpanValues(self.reward, self.of)

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(self.spans,))

    def check_rewards(self, names: list[str]) -> None:
        if self.reward not in names:
            raise ValueError(f"algorithm.shaping: reward: {self.reward} is not one of the rewards, {', '.join(names)}")


class SpanCredit(SpanShaper):
    """Each span gets credit from the values of all spans of its response, compared within the group; decisions of no
    span get none. A decision that lies in several spans gets the mean of their credits, by its characters."""

    weight: float = option(1.0, "of the spans' advantages", ge=0)
    outcome: float = option(1.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    against: Literal["others", "span", "group", "none"] = option(
        "others",
        "what a span's credit is compared with. others: the mean of the same span of the other rollouts of the group; "
        "span: of the same span of all; group: of all spans of the group; none: it is the advantage",
    )
    scale: Literal["group_std", "none"] = option("none", "scale by which differences are divided")

    @abstractmethod
    def credit(self, column: SpanColumn, batch: Batch) -> list[Tensor]:
        """Returns the credit of the spans of each of this rank's rollouts, [span]."""

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import compared, spread

        column, scored = batch.measured(self.spans), batch.local(batch.combined_rewards()).isfinite()
        counted = (batch.rollout_mask & scored).tolist()
        credits = [each if keep else each[:0] for each, keep in zip(self.credit(column, batch), counted, strict=True)]
        shares = [each if keep else each[:, :0] for each, keep in zip(column.shares, counted, strict=True)]
        shaped = compared(credits, batch.rollouts.group, self.against, self.scale)
        return self.outcome * advantages + self.weight * spread(shaped, shares, advantages.shape[1]).to(advantages)


class SpanReturns(SpanCredit):
    """A span gets the values from it on, discounted. With gamma=0 each span has its own value, as paragraphs have in
    PRPO (with against=span, scale=group_std)."""

    equation: ClassVar[str] = (
        "G_s = sum_{k >= s} gamma^(k - s) r_k; A_t = outcome A + weight (G_s - b) / scale, s the span of t, b as "
        "`against` says"
    )
    source: ClassVar[str] = (
        "returns of process rewards: DeepSeekMath, arXiv 2402.03300; gamma=0: reconstructed from the abstract of PRPO "
        "(paragraph-level)"
    )
    type: str = "span_returns"
    gamma: float = option(1.0, "discount of a span", ge=0, le=1)

    def credit(self, column: SpanColumn, batch: Batch) -> list[Tensor]:
        from mmrl.core.turns import discounted

        return [discounted(values[None], self.gamma)[0] for values in column.values]


class SpanMinimum(SpanCredit):
    """A response is worth its worst span: spans up to and with it get its value, those after it about 0. Many good
    spans so never pay for a bad one, and padding with good ones pays nothing."""

    equation: ClassVar[str] = (
        "G_s = sum_{k >= s} w_k r_k, w = softmax(-r / T); T = 0: the first minimum alone; A_t = outcome A + weight "
        "(G_s - b) / scale, b as `against` says"
    )
    source: ClassVar[str] = (
        "PURE, arXiv 2504.15275; reconstructed: comparison with the same span of the others (its own is by RLOO)"
    )
    type: str = "span_minimum"
    temperature: float = option(0.1, "T; 0: the strict minimum", ge=0)

    def credit(self, column: SpanColumn, batch: Batch) -> list[Tensor]:
        from mmrl.core.turns import discounted, minimum_weighted

        return [discounted(minimum_weighted(values, self.temperature)[None], 1.0)[0] for values in column.values]


class SpanSigns(SpanShaper):
    """A span's sign turns advantages of the other sign: a false sentence of a right answer is pushed down, a true one
    of a wrong answer up. Spans of value 0 and decisions of no span keep theirs."""

    equation: ClassVar[str] = "A_t <- A_t where sign(r_s) A_t >= 0, else -A_t, s the span of t"
    source: ClassVar[str] = "FSPO, as its repository turboLJY/FSPO has it"
    type: str = "span_signs"

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import spread

        column = batch.measured(self.spans)
        signs = spread(column.values, column.shares, advantages.shape[1]).sign().to(advantages)
        turned = (signs * advantages < 0) & batch.rollout_mask[:, None]
        return advantages.where(~turned, -advantages)


PROMPT_WIDTH = 64  # buckets of the hashed words of prompts and of spans


class SpanProgress(SpanCredit):
    """The rollout's reward is split over its spans by contributions that a small network learns, whose sum over a
    response is to be the reward. The values of the spans are not used, only where they are: any splitter will do."""

    equation: ClassVar[str] = (
        "c = argmin E (sum_s c(prompt, text of s, s / n) - R)^2; r_s = c_s + (R - sum c) / n, so sum r = R; G_s = "
        "sum_{k >= s} gamma^(k - s) r_k; A_t = outcome A + weight (G_s - b) / scale"
    )
    source: ClassVar[str] = (
        "reconstructed from SPA-RL's abstract (stepwise progress attribution), with hashed words in place of the "
        "language model's states"
    )
    type: str = "span_progress"
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    gamma: float = option(1.0, "discount of a span", ge=0, le=1)
    width: int = option(32, "width of the network's hidden layers", ge=1)
    lr: float = option(1e-3, "learning rate of its optimizer (Adam)", gt=0)
    passes: int = option(4, "updates on the responses of a step, after their advantages", ge=0)

    def credit(self, column: SpanColumn, batch: Batch) -> list[Tensor]:
        """Splits by contributions from before the network is trained on these rollouts."""
        from mmrl.core.turns import discounted, split_evenly_beyond
        from mmrl.core.values import ValueNetwork

        features = [self._features(texts, row, batch) for row, texts in enumerate(column.texts)]
        width = 2 * PROMPT_WIDTH + 1
        network = batch.modules.get(self.key, lambda: ValueNetwork(width, self.width, 0), self.lr)
        combined = batch.combined_rewards()
        credits = []
        for x, outcome in zip(features, batch.local(combined).tolist(), strict=True):
            known = outcome == outcome  # else it was not scored
            parts = split_evenly_beyond(network.predict(x).float(), outcome) if known else x.new_zeros(len(x)).float()
            credits.append(discounted(parts[None], self.gamma)[0])
        batch.report(self._learn(network, features, combined, batch))
        return credits

    def _features(self, texts: list[str], row: int, batch: Batch) -> Tensor:
        """Returns hashed words of the prompt and of the span, and how far the span is, [span, number]."""
        import torch

        from mmrl.core.values import word_counts

        prompt = word_counts(batch.rollouts.samples[row].prompt.text, PROMPT_WIDTH)
        rows = [
            torch.cat([prompt, word_counts(text, PROMPT_WIDTH), torch.tensor([s / len(texts)], dtype=torch.float64)])
            for s, text in enumerate(texts)
        ]
        return torch.stack(rows) if rows else torch.zeros(0, 2 * PROMPT_WIDTH + 1, dtype=torch.float64)

    def _learn(
        self, network: AuxiliaryModule, features: list[Tensor], combined: Tensor, batch: Batch
    ) -> dict[str, float]:
        """Trains the network on the responses of all ranks, so that it stays equal on them."""
        import torch

        everywhere = batch.gather_list(features)
        known = [(x, float(r)) for x, r in zip(everywhere, combined, strict=True) if len(x) and bool(r.isfinite())]
        if not known or not self.passes:
            return {}
        rows = torch.cat([torch.full((len(x),), i) for i, (x, _) in enumerate(known)])
        x, outcome = torch.cat([x for x, _ in known]), torch.tensor([r for _, r in known], dtype=torch.float64)
        for _ in range(self.passes):
            whole = torch.zeros_like(outcome).index_add(0, rows, network.module(x))
            loss = (whole - outcome).square().mean()
            network.update(loss)
        return {"span_progress/loss": float(loss.detach())}
