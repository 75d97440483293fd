"""Credit of spans: values that a reward gives to parts of a response (such as reasoning steps) become advantages."""

from __future__ import annotations

import math
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
    """Base class of shapers that use the spans of a reward."""

    test: ClassVar[str] = "tests/joints/test_span_credit.py"
    reward: str = option("process", "name of the reward that returns spans")
    of: Unit = option("characters", "unit of the spans' bounds")

    @property
    def spans(self) -> SpanValues:
        return SpanValues(self.reward, self.of)

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(self.spans,))

    def check_rewards(self, names: list[str]) -> None:
        self.spans.check_reward(names, "algorithm.shaping: reward")


class SpanCredit(SpanShaper):
    """Base class of shapers that compute a credit for each span from the values of its response's spans.

    A baseline from the group is subtracted, and each decision gets the mean credit of its spans, weighted by its
    characters in them. Decisions outside all spans get 0.
    """

    weight: float = option(1.0, "weight of the spans' advantages", ge=0)
    outcome: float = option(1.0, "weight of the algorithm's own advantage of the rollout", ge=0)
    against: Literal["others", "span", "group", "none"] = option(
        "others",
        "baseline of a span's credit. others: the mean over the same span of the group's other rollouts; span: the "
        "mean over the same span of all rollouts of the group; group: the mean over all spans of the group; none: 0",
    )
    scale: Literal["group_std", "none"] = option("none", "divide differences by the std of the group, or not")

    @abstractmethod
    def credit(self, column: SpanColumn, batch: Batch) -> list[Tensor]:
        """Computes the credit of each span, one tensor [span] for each of this rank's rollouts."""

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns outcome x the advantages + weight x the credit of the decision's spans, after a baseline from the
        group; [rollout, decision]."""
        from mmrl.core.turns import distribute_credit, subtract_group_baseline

        column, scored = batch.measured(self.spans), batch.scored()
        is_used = (batch.rollout_mask & scored).tolist()
        # rollouts that are masked or not scored have no spans: they get no credit and are in no baseline
        credits = [x if keep else x[:0] for x, keep in zip(self.credit(column, batch), is_used, strict=True)]
        shares = [x if keep else x[:, :0] for x, keep in zip(column.shares, is_used, strict=True)]
        span_advantages = subtract_group_baseline(credits, batch.rollouts.group, self.against, self.scale)
        credit = distribute_credit(span_advantages, shares, advantages.shape[1]).to(advantages)
        return self.outcome * advantages + self.weight * credit


class SpanReturns(SpanCredit):
    """The credit of a span is the discounted return: the values of itself and of all later spans.

    With gamma=0 it is the span's own value, as for paragraphs in PRPO (with against=span, scale=group_std).
    """

    equation: ClassVar[str] = (
        "G_s = sum_{k >= s} gamma^(k - s) r_k; A_t = outcome A + weight (G_s - b) / scale, s the span of t, b as "
        "`against` says"
    )
    source: ClassVar[str] = (
        "returns of process rewards: DeepSeekMath, arXiv 2402.03300; gamma=0: reconstructed from the abstract of PRPO "
        "(paragraph-level)"
    )
    type: str = "span_returns"
    gamma: float = option(1.0, "discount per span", ge=0, le=1)

    def credit(self, column: SpanColumn, batch: Batch) -> list[Tensor]:
        from mmrl.core.turns import discounted_returns

        return [discounted_returns(values[None], self.gamma)[0] for values in column.values]


class SpanMinimum(SpanCredit):
    """The credit of a span is a return whose sum is the soft minimum of the values (PURE).

    Spans up to the worst one get about its value, later ones about 0. So many good spans cannot make up for a bad one,
    and adding good spans gains nothing.
    """

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
        """Returns for each rollout the sum of its softmin-weighted values from each span on, [span]."""
        from mmrl.core.turns import discounted_returns, softmin_weighted

        return [
            discounted_returns(softmin_weighted(values, self.temperature)[None], 1.0)[0] for values in column.values
        ]


class SpanSigns(SpanShaper):
    """Flips the sign of advantages that disagree with the sign of the span's value.

    So a false sentence in a right answer is made less likely, and a true sentence in a wrong answer more likely. Spans
    of value 0 and decisions outside all spans are not changed.
    """

    equation: ClassVar[str] = "A_t <- A_t where sign(r_s) A_t >= 0, else -A_t, s the span of t"
    source: ClassVar[str] = "FSPO, as its repository turboLJY/FSPO has it"
    type: str = "span_signs"

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages, [rollout, decision], negated where their sign differs from the sign of the
        span's value."""
        from mmrl.core.turns import distribute_credit

        column = batch.measured(self.spans)
        signs = distribute_credit(column.values, column.shares, advantages.shape[1]).sign().to(advantages)
        disagrees = (signs * advantages < 0) & batch.rollout_mask[:, None]
        return advantages.where(~disagrees, -advantages)


PROMPT_WIDTH = 64  # buckets of the hashed words of prompts and of spans


class SpanProgress(SpanCredit):
    """Distributes the rollout's reward over its spans by contributions that a small network predicts.

    The network is trained so that its predictions sum to the reward. Only the bounds of the spans are used, not their
    values, so any reward that splits a response will do.
    """

    equation: ClassVar[str] = (
        "c = argmin E (sum_s c(prompt, text of s, s / n) - R)^2; r_s = c_s + (R - sum c) / n, so sum r = R; G_s = "
        "sum_{k >= s} gamma^(k - s) r_k; A_t = outcome A + weight (G_s - b) / scale"
    )
    source: ClassVar[str] = (
        "reconstructed from SPA-RL's abstract (stepwise progress attribution), with hashed words in place of the "
        "language model's states"
    )
    type: str = "span_progress"
    outcome: float = option(0.0, "weight of the algorithm's own advantage of the rollout", ge=0)
    gamma: float = option(1.0, "discount per span", ge=0, le=1)
    width: int = option(32, "width of the network's hidden layers", ge=1)
    lr: float = option(1e-3, "learning rate of the network (Adam)", gt=0)
    passes: int = option(4, "updates of the network on the responses of a step", ge=0)

    def credit(self, column: SpanColumn, batch: Batch) -> list[Tensor]:
        """Computes credits from the network's predictions, and then trains the network on these rollouts."""
        from mmrl.core.turns import add_remainder_evenly, discounted_returns
        from mmrl.core.values import ValueNetwork

        features = [self._features(texts, row, batch) for row, texts in enumerate(column.texts)]
        width = 2 * PROMPT_WIDTH + 1
        network = batch.modules.get(self.key, lambda: ValueNetwork(width, self.width, seed=0), self.lr)
        combined = batch.combined_rewards()
        credits = []
        for x, outcome in zip(features, batch.local(combined).tolist(), strict=True):
            if math.isnan(outcome):  # the reward is unknown
                contributions = x.new_zeros(len(x)).float()
            else:
                contributions = add_remainder_evenly(network.predict(x).float(), outcome)
            credits.append(discounted_returns(contributions[None], self.gamma)[0])
        batch.report(self._learn(network, features, combined, batch))
        return credits

    def _features(self, texts: list[str], row: int, batch: Batch) -> Tensor:
        """Returns the hashed word counts of the prompt and of each span, and the span's relative position, [span,
        feature]. texts: the texts of the spans of rollout `row`."""
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
        """Trains the network on the responses of all ranks, so that it stays equal on all of them. Returns metrics.

        features: [span, feature] of each of this rank's rollouts; combined: [rollout], the rewards of all ranks.
        """
        import torch

        all_features = batch.gather_list(features)
        scored = [(x, float(r)) for x, r in zip(all_features, combined, strict=True) if len(x) and bool(r.isfinite())]
        if not scored or not self.passes:
            return {}
        rows = torch.cat([torch.full((len(x),), i) for i, (x, _) in enumerate(scored)])
        x, outcome = torch.cat([x for x, _ in scored]), torch.tensor([r for _, r in scored], dtype=torch.float64)
        for _ in range(self.passes):
            predicted = torch.zeros_like(outcome).index_add(0, rows, network.module(x))
            loss = (predicted - outcome).square().mean()
            network.update(loss)
        return {"span_progress/loss": float(loss.detach())}
