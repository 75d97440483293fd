"""Advantage shapers that use the entropy of decisions.

`entropy` changes the algorithm's advantages, `entropy_redistribution` replaces them. See also the mask `entropy_share`,
which trains only on decisions of high entropy, and the reward transform `sequence_entropy`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, Section, option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch

Unit = Literal["decision", "turn"]


class AdvantageBonus(Choice):
    """An entropy-dependent bonus that is added to a decision's advantage."""

    title: ClassVar[str] = "bonus by entropy"
    kinds: ClassVar[dict[str, str]] = {
        "doubt": "mmrl.terms.shapers.entropy:DoubtBonus",
        "clarity": "mmrl.terms.shapers.entropy:ClarityBonus",
    }

    @property
    def by_turn(self) -> bool:
        """Returns whether the bonus reads the turns of a conversation."""
        return False

    @abstractmethod
    def bonus(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Computes the bonus, [rollout, decision]. advantages: [rollout, decision], the advantages of this rank's
        rollouts before the bonus is added."""


class DoubtBonus(AdvantageBonus):
    """A bonus for decisions of high entropy, too small to change the sign of an advantage."""

    equation: ClassVar[str] = "min(alpha H, |A| / kappa), H of the policy that made the rollout, without gradient"
    source: ClassVar[str] = "Reasoning with Exploration, arXiv 2506.14758"
    test: ClassVar[str] = "tests/joints/test_terms.py"
    type: str = "doubt"
    alpha: float = option(0.4, "weight of the entropy", gt=0)
    kappa: float = option(2.0, "the bonus is at most |A| / kappa", gt=1)

    def bonus(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns alpha H, at most |advantage| / kappa, so that no advantage changes its sign (kappa > 1)."""
        return (self.alpha * old_entropy(batch)).minimum(advantages.abs() / self.kappa)


class ClarityBonus(AdvantageBonus):
    """A bonus for decisions (or turns) that are followed by a decision (or turn) of low entropy."""

    equation: ClassVar[str] = (
        "zeta exp(-k H_{t+1}), H scaled to 0..1 over the decisions of the batch, none for the last"
    )
    source: ClassVar[str] = "reconstructed from memory of EMPG, arXiv 2509.09265, whose unit is the turn"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "clarity"
    k: float = option(1.0, "how quickly the bonus falls with the entropy of the next decision", ge=0)
    zeta: float = option(0.05, "weight of the bonus", ge=0)
    unit: Unit = option("decision", "what t counts: decisions, or turns of a conversation, whose H is their mean")

    @property
    def by_turn(self) -> bool:
        return self.unit == "turn"

    def bonus(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns zeta exp(-k H) with H the scaled entropy of the next decision (or turn), 0 for the last one;
        [rollout, decision]."""
        import torch
        import torch.nn.functional as F

        mask, entropy = batch.rollouts.mask, scaled_entropy(batch, self.unit)
        if self.by_turn:
            turn_means, turn_mask, number = by_turn(batch, entropy)
            next_entropy = F.pad(turn_means, (0, 1))[:, 1:].gather(1, number)
            has_next = F.pad(turn_mask, (0, 1))[:, 1:].gather(1, number) & mask
        else:
            has_next = torch.zeros_like(mask)
            has_next[:, :-1] = mask[:, 1:] & mask[:, :-1]
            next_entropy = entropy.roll(-1, 1)  # what wraps around to the last column is not used
        return self.zeta * (-self.k * next_entropy).exp().where(has_next, 0)


class SureWeight(Section):
    """A weight of advantages that falls with the entropy of the decision (or turn), since gradients grow with it."""

    k: float = option(1.0, "how quickly the weight falls with the entropy", ge=0)
    unit: Unit = option("decision", "whose entropy counts: the decision's, or the mean of its turn of a conversation")

    def factor(self, batch: Batch) -> Tensor:
        """Computes factors of the advantages, [rollout, decision], whose mean over the batch is 1."""
        weight = (-self.k * scaled_entropy(batch, self.unit)).exp()
        return weight / batch.gather_decisions(weight).mean()


class EntropyShaping(Shaper):
    """Changes advantages by the entropies of their decisions: by a factor, a bonus, or both."""

    equation: ClassVar[str] = (
        "A_t w_t + bonus_t, centred: minus the mean over the batch; w_t = exp(-k H_t) / mean exp(-k H) with `sure`, "
        "else 1; doubt min(alpha H_t, |A_t| / kappa); clarity zeta exp(-k H_{t+1}); H scaled to 0..1 in all but doubt"
    )
    source: ClassVar[str] = (
        "doubt: Reasoning with Exploration, arXiv 2506.14758; the others: reconstructed from memory of EMPG, arXiv "
        "2509.09265, which has them for turns (unit)"
    )
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "entropy"
    sure: SureWeight | None = option(None, "weight decisions of low entropy more; null: equal weights")
    bonus: AdvantageBonus | None = option(DoubtBonus(), "bonus that is added; null: none")
    centred: bool = option(False, "subtract the mean over the batch at the end")

    @model_validator(mode="after")
    def _check_change(self) -> EntropyShaping:
        if self.sure is None and self.bonus is None:
            raise ValueError("sure and bonus are both null, so advantages would not change; set one of them")
        return self

    @property
    def needs(self) -> Needs:
        by_turn = (self.sure is not None and self.sure.unit == "turn") or (
            self.bonus is not None and self.bonus.by_turn
        )
        offers = frozenset({"entropy", "turns"} if by_turn else {"entropy"})
        return Needs(offers=offers, statistics=frozenset({"entropy"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns advantages x factor + bonus, minus the mean over the batch if `centred`; [rollout, decision]."""
        if not len(batch.gather_decisions(old_entropy(batch))):  # no rank has a decision
            return advantages
        shaped = advantages if self.sure is None else advantages * self.sure.factor(batch)
        if self.bonus is not None:
            shaped = shaped + self.bonus.bonus(shaped, batch)
        if self.centred:
            shaped = (shaped - batch.gather_decisions(shaped).mean()).where(batch.rollouts.mask, 0)
        return shaped


def old_entropy(batch: Batch) -> Tensor:
    """Returns the entropy of each decision of this rank under the policy that sampled it, [rollout, decision]."""
    entropy = batch.rollouts.old_entropy
    assert entropy is not None
    return entropy


def scaled_entropy(batch: Batch, unit: Unit = "decision") -> Tensor:
    """Returns `old_entropy`, or its mean over the decision's turn, scaled to 0..1 over the decisions of all ranks,
    which must not be empty."""
    entropy = old_entropy(batch)
    if unit == "turn":
        means, _, number = by_turn(batch, entropy)
        entropy = means.gather(1, number)
    entropies = batch.gather_decisions(entropy)
    return (entropy - entropies.min()) / (entropies.max() - entropies.min()).clamp(min=1e-12)


def by_turn(batch: Batch, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Averages values [rollout, decision] over the decisions of each turn. Returns the means [rollout, turn], 0 for a
    turn without decisions; which turns have decisions, [rollout, turn] bool; and the turn of each decision, [rollout,
    decision] int64."""
    import torch

    from mmrl.rollouts import Turns

    mask, turns = batch.rollouts.mask, batch.rollouts.extra("turns", Turns)
    number = turns.number.to(values.device)
    count = torch.zeros(turns.mask.shape, dtype=values.dtype).scatter_add(1, number, mask.to(values))
    total = torch.zeros(turns.mask.shape, dtype=values.dtype).scatter_add(1, number, values.where(mask, 0))
    return total / count.clamp(min=1), count > 0, number


class EntropyRedistribution(Shaper):
    """Replaces advantages by ones that depend on the entropies of the group's rollouts at the same position.

    At each position, the group's correct rollouts get a bonus in proportion to their entropies there, and its wrong
    rollouts a penalty in proportion to the reciprocals of their entropies.
    """

    equation: ClassVar[str] = (
        "right: alpha + beta d_t H_it / sum_k H_kt, over the d_t right rollouts that reach t; wrong: "
        "-alpha - beta h_t (1 / H_jt) / sum_k (1 / H_kt), over the h_t wrong ones; H clamped to [low, high]; "
        "standardise: over all right, and over all wrong decisions"
    )
    source: ClassVar[str] = "GTPO, arXiv 2508.04349"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "entropy_redistribution"
    alpha: float = option(1.0, "constant part of the advantage", ge=0)
    beta: float = option(0.1, "part that is distributed by entropy", ge=0)
    low: float = option(0.2, "lower clamp of entropies", unit="nats", gt=0)
    high: float = option(0.28, "upper clamp of entropies", unit="nats", gt=0)
    threshold: float = option(0.5, "a rollout is right if its reward is above it")
    standardise: bool = option(
        False, "normalize advantages over right and over wrong decisions separately, as in the paper"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns alpha + beta x the entropy's share among the group's right rollouts at the position, for wrong ones
        -alpha - beta x the share of 1 / entropy; [rollout, decision]. They replace the algorithm's advantages."""
        import torch

        rollouts, shaped = batch.rollouts, torch.zeros_like(advantages)
        entropy, mask = old_entropy(batch).clamp(self.low, self.high), rollouts.mask
        rewards = batch.local(batch.combined_rewards())
        right, scored = rewards > self.threshold, ~rewards.isnan()
        for group in rollouts.group.unique():  # a group lies on one rank
            for has_outcome, sign, raw_weight in ((right, 1.0, entropy), (~right, -1.0, 1 / entropy)):
                rows = (rollouts.group == group) & has_outcome & scored
                weights = raw_weight[rows].where(mask[rows], 0)
                num_rollouts = mask[rows].sum(0)  # [decision], rollouts that reach the decision
                share = weights / weights.sum(0).clamp(min=1e-12) * num_rollouts
                shaped[rows] = (sign * (self.alpha + self.beta * share)).where(mask[rows], 0)
        if self.standardise:
            shaped = self._standardize(shaped, right, scored, batch)
        return shaped

    def _standardize(self, shaped: Tensor, right: Tensor, scored: Tensor, batch: Batch) -> Tensor:
        """Normalizes the advantages of right and of wrong rollouts separately, over all ranks. right, scored: [rollout]
        bool."""
        for rows in (right & scored, ~right & scored):
            selected = rows[:, None] & batch.rollouts.mask
            values = batch.gather(shaped[selected])
            if len(values) > 1:
                shaped = ((shaped - values.mean()) / (values.std() + 1e-6)).where(selected, shaped)
        return shaped


class TokenBaseline(Shaper):
    """Subtracts a separate baseline at each token: the weighted mean reward of the group's rollouts that reach it.

    The weight of a rollout is the squared gradient of its log-probabilities up to that token with respect to their own
    logits. It replaces the group baseline: use it with algorithm.baseline=none and algorithm.scale=none.
    """

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
        """Returns advantages minus the weighted mean at each token of the group's advantages; [rollout, decision]. The
        weight is the sum, up to the token, of |d log p / d logits|^2 = 1 - 2 p + sum_k p_k^2."""
        import torch

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.old_square_sum is not None
        # an unscored rollout has the advantage 0, which is no reward to compare with
        used = rollouts.mask & batch.scored()[:, None]
        squared_gradient = (1 - 2 * rollouts.old_logp.exp() + rollouts.old_square_sum).where(used, 0)
        weight = squared_gradient.cumsum(1).where(used, 0)
        shaped = torch.zeros_like(advantages)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            w, a = weight[rows], advantages[rows]
            baseline = (w * a).sum(0) / w.sum(0).clamp(min=1e-12)
            shaped[rows] = (a - baseline).where(rollouts.mask[rows] & (w.sum(0) > 0), 0)
        return shaped
