"""Advantage shapers that compare the rollouts of a group, or of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.measurements.answers import ReferenceRewards
from mmrl.measurements.responses import GroupDivergence
from mmrl.protocols.requirements import Needs, Reference, needs_column
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Stratified(Shaper):
    """Mixes the algorithm's advantages with advantages within strata of the group.

    A stratum holds the group's rollouts that agree in some quantity, such as the number of tool calls.
    """

    equation: ClassVar[str] = (
        "A <- alpha (r - mean of the stratum) / (std of the stratum + 1e-6) + (1 - alpha) A; a stratum without two "
        "different rewards gives 0"
    )
    source: ClassVar[str] = "Stratified GRPO, arXiv 2510.06214"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "stratified"
    by: str = option(
        description="quantity that defines the strata: tool_calls, turns, truncated, ... (`mmrl.protocols.columns`)"
    )
    alpha: float = option(0.5, "weight of the advantages within the stratum", ge=0, le=1)

    @property
    def needs(self) -> Needs:
        return needs_column(self.by, varies=True)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns alpha x the advantages within the rollout's stratum + (1 - alpha) x the algorithm's; [rollout,
        decision]. A stratum: the rollouts of a group with the same value of `by`."""
        import torch

        from mmrl.core.advantages import group_advantages

        pairs = torch.stack([batch.column("group").double(), batch.column(self.by).double()], 1)
        stratum = pairs.unique(dim=0, return_inverse=True)[1]
        is_single = torch.bincount(stratum)[stratum] == 1
        # NaN: a stratum of one rollout has no baseline, and gets 0
        rewards = batch.combined_rewards().where(~is_single, torch.nan)
        stratum_advantages, _ = group_advantages(rewards, stratum)
        return self.alpha * batch.local(stratum_advantages)[:, None] + (1 - self.alpha) * advantages


class SetDiversity(Shaper):
    """A bonus for the diversity of responses that the group would lose without the rollout."""

    equation: ClassVar[str] = (
        "A_i <- A_i + weight (d_i - mean d), d_i = logdet(I + K / tau) - logdet of the same without i, K the cosine "
        "similarity of the character n-gram counts of the group's responses"
    )
    source: ClassVar[str] = "reconstructed from the abstract on set-level diversity: leave-one-out of a kernel's logdet"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "set_diversity"
    weight: float = option(0.1, "weight of the bonus", gt=0)
    tau: float = option(1.0, "divisor of the kernel K", gt=0)
    n: int = option(3, "characters per n-gram", ge=1)
    threshold: float | None = option(None, "only rollouts with a reward above it are used; null: all")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"text"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages plus weight x bonus, [rollout, decision]. The bonus is the fall of logdet(I + K / tau)
        if the rollout is left out, minus its mean over the group; K is the similarity of the group's responses."""
        import torch

        from mmrl.core.distances import ngram_similarity

        rollouts, bonus = batch.rollouts, torch.zeros(len(batch.rollouts))
        rewards = batch.local(batch.combined_rewards())
        selected = ~rewards.isnan() if self.threshold is None else rewards > self.threshold
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = ((rollouts.group == group) & selected).nonzero().flatten()
            if not len(rows):
                continue
            kernel = ngram_similarity([rollouts.samples[row].response for row in rows.tolist()], self.n) / self.tau
            inverse = torch.linalg.inv(torch.eye(len(rows), dtype=kernel.dtype) + kernel)
            contribution = -inverse.diagonal().log()  # det(M without i) / det M is the inverse's diagonal
            bonus[rows] = (contribution - contribution.mean()).to(bonus)
        return advantages + self.weight * bonus[:, None]


class DivergenceWeight(Shaper):
    """Multiplies the advantages of tokens by a weight, which is largest at the position in the response where the
    distributions of the group's rollouts differ most, and 1 where they differ least.

    TW-GRPO clips asymmetrically and averages over tokens: algorithm.surrogate={type: clip, low: 0.2, high: 0.28},
    algorithm.reduce=token_mean. It also weights the KL term: algorithm.terms=[{type: kl, weighting: divergence}].
    """

    equation: ClassVar[str] = (
        "A_t <- A_t (1 + (max_weight - 1) scaled D_t), D_t = mean_i sum_v (exp(d) - d - 1), d = mean_j log p_j(v) - "
        "log p_i(v), clamped to -11..11; D_t scaled to 0..1 over the positions of the group"
    )
    source: ClassVar[str] = (
        "TW-GRPO, arXiv 2505.24718, as in longmalongma/TW-GRPO at aa529ff, but without a gradient through the weights"
    )
    test: ClassVar[str] = "tests/joints/test_group_divergence.py"
    type: str = "divergence_weight"
    max_weight: float = option(1.4, "weight at the position of the largest divergence", ge=1)
    block: int = option(
        32768,
        "tokens of the vocabulary whose log-probabilities are stored at once; each block takes a forward pass",
        unit="tokens",
        ge=1,
    )

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(self.divergence,))

    @property
    def divergence(self) -> GroupDivergence:
        return GroupDivergence(self.block)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages times 1 to `max_weight`, by the divergence within the group at the position; [rollout,
        decision]."""
        return advantages * self.divergence.token_weights(batch, self.max_weight).to(advantages)


class LongWrong(Shaper):
    """Multiplies the advantage of wrong rollouts that are longer than the group's right rollouts on average.

    The factor grows from 1 to 2 with the difference in length. A group without a right rollout is not changed.
    """

    equation: ClassVar[str] = "A <- A (2 - base^-(L - mean L of the right)) of wrong rollouts that are longer"
    source: ClassVar[str] = "STCR of View-R1, from its released code"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "long_wrong"
    base: float = option(1.00001, "base of the power; a larger one makes the factor approach 2 sooner", gt=1)
    threshold: float = option(0.5, "a rollout is right if its reward is above it")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"lengths"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages, [rollout, decision], times 2 - base^-excess for wrong rollouts; excess: their tokens
        beyond the mean length of the group's right rollouts."""
        import torch

        rewards, lengths, group = batch.combined_rewards(), batch.column("length").float(), batch.column("group")
        right, factor = rewards > self.threshold, torch.ones(len(rewards))
        for g in group.unique():
            rows = group == g
            if bool((rows & right).any()):
                excess = lengths - lengths[rows & right].mean()
                long_wrong = rows & (rewards <= self.threshold) & (excess > 0)
                factor[long_wrong] = 2 - self.base ** -excess[long_wrong]
        return advantages * batch.local(factor)[:, None]


class AdvantageMomentum(Shaper):
    """Adds the clamped difference between the rollout's reward and the reward of a reference policy's response to the
    same prompt.

    So a group of equal rewards has a learning signal too, and dynamic sampling keeps it. AAPO uses no likelihood ratio;
    set algorithm.surrogate=reinforce for that.
    """

    equation: ClassVar[str] = "A + clamp(r - reward of a response of the reference policy, -low, high)"
    source: ClassVar[str] = (
        "AAPO, arXiv 2505.14264, and its published code, where every rollout has such a response of its own"
    )
    test: ClassVar[str] = "tests/joints/test_advantage_momentum.py"
    learns_from_equal_rewards: ClassVar[bool] = True
    type: str = "advantage_momentum"
    low: float = option(0.2, "largest amount that is subtracted", ge=0)
    high: float = option(0.28, "largest amount that is added", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(reference=Reference(), measurements=(ReferenceRewards(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        difference = batch.local(batch.combined_rewards()) - batch.measured(ReferenceRewards()).values
        bonus = difference.clamp(-self.low, self.high).nan_to_num(0.0)  # NaN: one of the rewards is unknown
        return advantages + bonus[:, None].to(advantages)


class SignalCorrection(Shaper):
    """Multiplies advantages to make up for groups of equal rewards, whose zero advantages would make the step smaller.

    With algorithm.scale=none and the surrogate reinforce this is GPG.
    """

    equation: ClassVar[str] = "A <- A n / m, n the scored rollouts of the batch, m those whose group has two rewards"
    source: ClassVar[str] = "alpha of GPG, arXiv 2504.02546, as in AMAP-ML/GPG at e096da8, R1-V's grpo_trainer.py"
    test: ClassVar[str] = "tests/joints/test_returns.py"
    at_dynamic_sampling: ClassVar[str] = "every group that is left has a learning signal, so the factor is 1"
    type: str = "signal_correction"

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages times the number of scored rollouts, divided by the number of scored rollouts whose
        group has different rewards."""
        from mmrl.core.filters import varied_groups

        rewards = batch.combined_rewards()
        num_scored = int((~rewards.isnan()).sum())
        num_with_signal = int(varied_groups(rewards, batch.column("group")).logical_and(~rewards.isnan()).sum())
        return advantages * (num_scored / max(num_with_signal, 1))
