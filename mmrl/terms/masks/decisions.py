"""Masks of single decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.term import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class EntropyShare(Mask):
    """Only the share of the step's decisions with the highest entropy counts in the objective. The others stay in its
    denominator and in the terms, as in TRL and the paper."""

    equation: ClassVar[str] = "keep where H >= quantile(H, 1 - share), over the decisions of all ranks"
    source: ClassVar[str] = "Beyond the 80/20 rule, arXiv 2506.01939"
    of: ClassVar[Literal["rollouts", "decisions", "objective"]] = "objective"
    type: str = "entropy_share"
    share: float = option(0.2, "share of the decisions that are trained on", gt=0, le=1)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def keep(self, batch: Batch) -> Tensor:
        entropy = batch.rollouts.old_entropy
        assert entropy is not None
        ranked = batch.gather_decisions(entropy).sort(descending=True).values
        last = max(1, round(self.share * len(ranked))) - 1
        return entropy >= ranked[last]


class CovarianceClip(Mask):
    """A small share of the decisions whose likelihood and advantage are both far above the mean is left out of the
    objective, drawn by chance from those within the bounds. It stays in the denominator and in the terms."""

    equation: ClassVar[str] = "cov = (logp - mean logp) (A - mean A), over the decisions of all ranks"
    source: ClassVar[str] = "Clip-Cov, arXiv 2505.22617"
    of: ClassVar[Literal["rollouts", "decisions", "objective"]] = "objective"
    type: str = "covariance_clip"
    share: float = option(2e-4, "of the decisions that is left out", gt=0, lt=1)
    low: float = option(1.0, "smallest covariance of a decision that may be left out")
    high: float = option(5.0, "largest covariance of a decision that may be left out")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), statistics=frozenset({"logp"}))

    def keep(self, batch: Batch) -> Tensor:
        import torch

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.advantages is not None
        logp, advantages = rollouts.old_logp, rollouts.advantages.expand(rollouts.mask.shape)
        everyone = batch.gather_decisions(logp), batch.gather_decisions(advantages)
        covariance = (logp - everyone[0].mean()) * (advantages - everyone[1].mean())
        eligible = rollouts.mask & (covariance >= self.low) & (covariance <= self.high)
        wanted = max(1, int(self.share * len(everyone[0])))
        chance = torch.rand(eligible.shape, generator=batch.generator()).where(eligible, 2.0)
        lowest = batch.gather_decisions(chance).sort().values[:wanted]
        return ~(eligible & (chance <= lowest[-1]))


class TokenBudget(Mask):
    """At most so many decisions of a step, drawn by chance, are learned from, so that a step of long responses is not a
    larger one."""

    equation: ClassVar[str] = "keep the decisions with the `budget` smallest draws, uniform, over all ranks"
    source: ClassVar[str] = "C3PO of Ring-lite, arXiv 2506.14731; that they are drawn one by one is mmrl's choice"
    test: ClassVar[str] = "tests/joints/test_masks.py"
    type: str = "token_budget"
    budget: int = option(description="decisions of a step, over all ranks", unit="decisions", ge=1)

    def keep(self, batch: Batch) -> Tensor:
        import torch

        chance = torch.rand(batch.rollouts.mask.shape, generator=batch.generator(self.type))
        ranked = batch.gather_decisions(chance).sort().values
        return chance <= ranked[min(self.budget, len(ranked)) - 1] if len(ranked) else chance >= 0
