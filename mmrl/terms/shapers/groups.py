"""Advantages that are changed within groups, or from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.measurements.answers import ReferenceRewards
from mmrl.protocols.requirements import Needs, Reference, needs_column
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Stratified(Shaper):
    """Rollouts are compared with those of their group that are built alike, such as those that called a tool as often,
    and the result is blended with the comparison with all."""

    equation: ClassVar[str] = (
        "A <- alpha (r - mean of the stratum) / (std of the stratum + 1e-6) + (1 - alpha) A; a stratum without two "
        "different rewards gives 0"
    )
    source: ClassVar[str] = "Stratified GRPO, arXiv 2510.06214"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "stratified"
    by: str = option(
        description="the fact that makes strata: tool_calls, turns, truncated, ... (`mmrl.protocols.columns`)"
    )
    alpha: float = option(0.5, "weight of the comparison within the stratum", ge=0, le=1)

    @property
    def needs(self) -> Needs:
        return needs_column(self.by, varies=True)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        from mmrl.core.advantages import group_advantages

        pairs = torch.stack([batch.column("group").double(), batch.column(self.by).double()], 1)
        stratum = pairs.unique(dim=0, return_inverse=True)[1]
        pairs_of_one = torch.bincount(stratum)[stratum] == 1
        rewards = batch.combined_rewards()
        # A stratum of one has nothing to compare with, which is not a mistake here.
        within, _ = group_advantages(rewards.where(~pairs_of_one, torch.nan), stratum)
        return self.alpha * batch.local(within)[:, None] + (1 - self.alpha) * advantages


class SetDiversity(Shaper):
    """A bonus for the diversity that a group would lose without the rollout."""

    equation: ClassVar[str] = (
        "A_i <- A_i + weight (d_i - mean d), d_i = logdet(I + K / tau) - logdet of the same without i, K the cosine of "
        "counted n-grams of characters of the group's responses"
    )
    source: ClassVar[str] = "reconstructed from the abstract on set-level diversity: leave-one-out of a kernel's logdet"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "set_diversity"
    weight: float = option(0.1, "of the diversity", gt=0)
    tau: float = option(1.0, "the kernel is divided by it", gt=0)
    n: int = option(3, "characters of an n-gram", ge=1)
    threshold: float | None = option(None, "only for rollouts whose reward is above it; null: for all")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"text"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        from mmrl.core.distances import similarity

        rollouts, gained = batch.rollouts, torch.zeros(len(batch.rollouts))
        rewards = batch.local(batch.combined_rewards())
        allowed = ~rewards.isnan() if self.threshold is None else rewards > self.threshold
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = ((rollouts.group == group) & allowed).nonzero().flatten()
            if not len(rows):
                continue
            kernel = similarity([rollouts.samples[row].response for row in rows.tolist()], self.n) / self.tau
            inverse = torch.linalg.inv(torch.eye(len(rows), dtype=kernel.dtype) + kernel)
            lost = -inverse.diagonal().log()  # det(M without i) / det M is the inverse's diagonal
            gained[rows] = (lost - lost.mean()).to(gained)
        return advantages + self.weight * gained[:, None]


class LongWrong(Shaper):
    """The advantage of a wrong rollout grows, up to twice, with how much longer it is than the group's right ones on
    average. A group without a right one stays as it is."""

    equation: ClassVar[str] = "A <- A (2 - base^-(L - mean L of the right)) of wrong rollouts that are longer"
    source: ClassVar[str] = "STCR of View-R1, from its released code"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "long_wrong"
    base: float = option(1.00001, "the further above 1, the sooner the factor is 2", gt=1)
    threshold: float = option(0.5, "rewards above it are of right answers")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"lengths"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        rewards, lengths, group = batch.combined_rewards(), batch.column("length").float(), batch.column("group")
        right, factor = rewards > self.threshold, torch.ones(len(rewards))
        for g in group.unique():
            rows = group == g
            if bool((rows & right).any()):
                excess = lengths - lengths[rows & right].mean()
                wrong = rows & (rewards <= self.threshold) & (excess > 0)
                factor[wrong] = 2 - self.base ** -excess[wrong]
        return advantages * batch.local(factor)[:, None]


class AdvantageMomentum(Shaper):
    """A rollout gains by how much its reward is above that of a response of the reference policy to the same prompt,
    within bounds: a group whose rewards are all equal teaches as well, and dynamic sampling keeps it. AAPO has no
    ratio; that is algorithm.surrogate=reinforce."""

    equation: ClassVar[str] = "A + clamp(r - reward of a response of the reference policy, -low, high)"
    source: ClassVar[str] = (
        "AAPO, arXiv 2505.14264, and its published code, where every rollout has such a response of its own"
    )
    test: ClassVar[str] = "tests/joints/test_advantage_momentum.py"
    of_flat_groups: ClassVar[bool] = True
    type: str = "advantage_momentum"
    low: float = option(0.2, "most that is taken off an advantage", ge=0)
    high: float = option(0.28, "most that is added to it", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(reference=Reference(), measurements=(ReferenceRewards(),))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        ahead = batch.local(batch.combined_rewards()) - batch.measured(ReferenceRewards()).values
        gain = ahead.clamp(-self.low, self.high).nan_to_num(0.0)  # where either could not be scored
        return advantages + gain[:, None].to(advantages)


class SignalCorrection(Shaper):
    """Advantages grow by the share of groups that teach nothing, so that these do not make a step smaller. With
    algorithm.scale=none and the surrogate reinforce this is GPG."""

    equation: ClassVar[str] = "A <- A n / m, n the scored rollouts of the batch, m those whose group has two rewards"
    source: ClassVar[str] = "alpha of GPG, arXiv 2504.02546, as in AMAP-ML/GPG at e096da8, R1-V's grpo_trainer.py"
    test: ClassVar[str] = "tests/joints/test_returns.py"
    at_dynamic_sampling: ClassVar[str] = "every group that is left teaches something, so that the factor is 1"
    type: str = "signal_correction"

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.filters import varied_groups

        rewards = batch.combined_rewards()
        signal = int(varied_groups(rewards, batch.column("group")).logical_and(~rewards.isnan()).sum())
        return advantages * (int((~rewards.isnan()).sum()) / max(signal, 1))
