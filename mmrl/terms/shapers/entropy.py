"""Advantages that follow the entropy of decisions.

Three uses of it stay apart from the shaper `entropy`: `entropy_redistribution` replaces advantages, the mask
`entropy_share` changes what a loss is averaged over, and the transform `sequence_entropy` changes rewards before the
baseline is subtracted.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, Section, option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class AdvantageBonus(Choice):
    """A bonus on a decision's advantage from entropies."""

    title: ClassVar[str] = "bonus by entropy"
    kinds: ClassVar[dict[str, str]] = {
        "doubt": "mmrl.terms.shapers.entropy:DoubtBonus",
        "clarity": "mmrl.terms.shapers.entropy:ClarityBonus",
    }

    @abstractmethod
    def bonus(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the bonus, [rollout, decision]. advantages: without it, [rollout, decision], of this rank's
        rollouts."""


class DoubtBonus(AdvantageBonus):
    """A bonus for decisions with high entropy, which never changes the sign of an advantage."""

    equation: ClassVar[str] = "min(alpha H, |A| / kappa), H of the policy that made the rollout, without gradient"
    source: ClassVar[str] = "Reasoning with Exploration, arXiv 2506.14758"
    test: ClassVar[str] = "tests/joints/test_terms.py"
    type: str = "doubt"
    alpha: float = option(0.4, "weight of the entropy", gt=0)
    kappa: float = option(2.0, "the bonus is at most |A| / kappa", gt=1)

    def bonus(self, advantages: Tensor, batch: Batch) -> Tensor:
        return (self.alpha * old_entropy(batch)).minimum(advantages.abs() / self.kappa)


class ClarityBonus(AdvantageBonus):
    """A bonus for decisions whose next decision has low entropy."""

    equation: ClassVar[str] = (
        "zeta exp(-k H_{t+1}), H scaled to 0..1 over the decisions of the batch, none for the last"
    )
    source: ClassVar[str] = "reconstructed from memory of EMPG, arXiv 2509.09265, which has it for steps of agents"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "clarity"
    k: float = option(1.0, "how quickly doubt in the next decision lowers the bonus", ge=0)
    zeta: float = option(0.05, "weight of the bonus", ge=0)

    def bonus(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        mask = batch.rollouts.mask
        follows = torch.zeros_like(mask)
        follows[:, :-1] = mask[:, 1:] & mask[:, :-1]
        return self.zeta * (-self.k * scaled_entropy(batch).roll(-1, 1)).exp().where(follows, 0)


class SureWeight(Section):
    """Decisions with low entropy count more and those with high entropy less, for their gradients are larger."""

    k: float = option(1.0, "how quickly doubt lowers an advantage", ge=0)

    def factor(self, batch: Batch) -> Tensor:
        """Returns factors of the advantages, [rollout, decision], whose mean over the batch is 1."""
        sure = (-self.k * scaled_entropy(batch)).exp()
        return sure / batch.gather_decisions(sure).mean()


class EntropyShaping(Shaper):
    """Advantages follow the entropies of their decisions: by a factor, a bonus, or both."""

    equation: ClassVar[str] = (
        "A_t w_t + bonus_t, centred: less the mean over the batch; w_t = exp(-k H_t) / mean exp(-k H) with `sure`, "
        "else 1; doubt min(alpha H_t, |A_t| / kappa); clarity zeta exp(-k H_{t+1}); H scaled to 0..1 in all but doubt"
    )
    source: ClassVar[str] = (
        "a bonus for doubt: Reasoning with Exploration, arXiv 2506.14758; the others: reconstructed from memory of "
        "EMPG, arXiv 2509.09265, which has them for steps of agents"
    )
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "entropy"
    sure: SureWeight | None = option(None, "sure decisions count more; null: all count alike")
    bonus: AdvantageBonus | None = option(DoubtBonus(), "bonus that is added; null: none")
    centred: bool = option(False, "take the mean over the batch away in the end")

    @model_validator(mode="after")
    def _does_something(self) -> EntropyShaping:
        if self.sure is None and self.bonus is None:
            raise ValueError("set sure or bonus, by which advantages follow entropies")
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        if not len(batch.gather_decisions(old_entropy(batch))):
            return advantages
        shaped = advantages if self.sure is None else advantages * self.sure.factor(batch)
        if self.bonus is not None:
            shaped = shaped + self.bonus.bonus(shaped, batch)
        if not self.centred:
            return shaped
        return (shaped - batch.gather_decisions(shaped).mean()).where(batch.rollouts.mask, 0)


def old_entropy(batch: Batch) -> Tensor:
    """Returns the entropy of each decision of this rank when it was made, [rollout, decision]."""
    entropy = batch.rollouts.old_entropy
    assert entropy is not None
    return entropy


def scaled_entropy(batch: Batch) -> Tensor:
    """Returns `old_entropy` scaled to 0..1 over the decisions of the batch, of which there is one at least."""
    entropies = batch.gather_decisions(old_entropy(batch))
    return (old_entropy(batch) - entropies.min()) / (entropies.max() - entropies.min()).clamp(min=1e-12)


class EntropyRedistribution(Shaper):
    """At every position the group's right rollouts share a bonus in proportion to their entropies there, and its wrong
    ones a penalty in proportion to the reciprocals. This replaces the algorithm's advantages."""

    equation: ClassVar[str] = (
        "right: alpha + beta d_t H_it / sum_k H_kt, over the d_t right rollouts that reach t; wrong: "
        "-alpha - beta h_t (1 / H_jt) / sum_k (1 / H_kt), over the h_t wrong ones; H within [low, high]; standardised: "
        "over all right, and over all wrong decisions"
    )
    source: ClassVar[str] = "GTPO, arXiv 2508.04349"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "entropy_redistribution"
    alpha: float = option(1.0, "what every decision gets", ge=0)
    beta: float = option(0.1, "what is shared by entropy", ge=0)
    low: float = option(0.2, "entropies below count as it", unit="nats", gt=0)
    high: float = option(0.28, "entropies above count as it", unit="nats", gt=0)
    threshold: float = option(0.5, "rewards above it are of right answers")
    standardise: bool = option(
        False, "take away the mean and divide by the std of right and of wrong decisions, as in the paper"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        rollouts, shaped = batch.rollouts, torch.zeros_like(advantages)
        entropy, mask = old_entropy(batch).clamp(self.low, self.high), rollouts.mask
        rewards = batch.local(batch.combined_rewards())
        right, scored = rewards > self.threshold, ~rewards.isnan()
        for group in rollouts.group.unique():  # a group lies on one rank
            for of, sign, share in ((right, 1.0, entropy), (~right, -1.0, 1 / entropy)):
                rows = (rollouts.group == group) & of & scored
                weights, counted = share[rows].where(mask[rows], 0), mask[rows].sum(0)
                part = weights / weights.sum(0).clamp(min=1e-12) * counted
                shaped[rows] = (sign * (self.alpha + self.beta * part)).where(mask[rows], 0)
        if self.standardise:
            shaped = self._standardised(shaped, right, scored, batch)
        return shaped

    def _standardised(self, shaped: Tensor, right: Tensor, scored: Tensor, batch: Batch) -> Tensor:
        """Standardises advantages of right and of wrong rollouts separately, over all ranks. right, scored: [rollout]
        bool."""
        for of in (right & scored, ~right & scored):
            chosen = of[:, None] & batch.rollouts.mask
            selected = batch.gather(shaped[chosen])
            if len(selected) > 1:
                shaped = ((shaped - selected.mean()) / (selected.std() + 1e-6)).where(chosen, shaped)
        return shaped


class TokenBaseline(Shaper):
    """The baseline of token t is the mean reward of the group's rollouts that reach it, each weighted by the squared
    gradient of its tokens up to t, as far as its own logits tell it. It takes the place of the group's baseline: use it
    with algorithm.baseline=none and algorithm.scale=none."""

    equation: ClassVar[str] = (
        "A_t = A - sum_j W_jt A_j / sum_j W_jt,  W_jt = sum_{s <= t} (1 - 2 p_js + sum_k p_k^2), over the group"
    )
    source: ClassVar[str] = "the optimal token baseline of arXiv 2602.07078, with |d log p / d logits|^2 as the weight"
    type: str = "token_baseline"

    @property
    def needs(self) -> Needs:
        statistics = frozenset({"logp", "square_sum"})
        return Needs(offers=frozenset({"square_sum"}), statistics=statistics)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.old_square_sum is not None
        moved = (1 - 2 * rollouts.old_logp.exp() + rollouts.old_square_sum).where(rollouts.mask, 0)
        weight = moved.cumsum(1).where(rollouts.mask, 0)
        shaped = torch.zeros_like(advantages)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            w, a = weight[rows], advantages[rows]
            baseline = (w * a).sum(0) / w.sum(0).clamp(min=1e-12)
            shaped[rows] = (a - baseline).where(rollouts.mask[rows] & (w.sum(0) > 0), 0)
        return shaped
