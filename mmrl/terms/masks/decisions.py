"""Masks of single decisions (tokens, denoising steps or actions)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.term import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class EntropyShare(Mask):
    """Keeps only the decisions with the highest entropy in the objective. The others stay in its denominator and in the
    loss terms, as in TRL and the paper."""

    equation: ClassVar[str] = "keep where H >= quantile(H, 1 - share), over the decisions of all ranks"
    source: ClassVar[str] = "Beyond the 80/20 rule, arXiv 2506.01939"
    of: ClassVar[Literal["rollouts", "decisions", "objective"]] = "objective"
    type: str = "entropy_share"
    share: float = option(0.2, "fraction of the decisions that is kept", gt=0, le=1)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"entropy"}), statistics=frozenset({"entropy"}))

    def keep(self, batch: Batch) -> Tensor:
        """Returns which decisions have at least the quantile 1 - share of the entropies of all ranks, with linear
        interpolation as in TRL, [rollout, decision] bool."""
        entropy = batch.rollouts.old_entropy
        assert entropy is not None
        ascending = batch.gather_decisions(entropy).sort().values
        # no decision lies between the quantile and the next larger entropy; 1e-9: 0.8 x 5 may be slightly above 4
        first_kept = math.ceil((1 - self.share) * (len(ascending) - 1) - 1e-9)
        return entropy >= ascending[first_kept]


class CovarianceClip(Mask):
    """Drops a small random fraction of the decisions whose covariance of log-probability and advantage is within low ..
    high from the objective. They stay in its denominator and in the loss terms."""

    equation: ClassVar[str] = "cov = (logp - mean logp) (A - mean A), over the decisions of all ranks"
    source: ClassVar[str] = "Clip-Cov, arXiv 2505.22617"
    of: ClassVar[Literal["rollouts", "decisions", "objective"]] = "objective"
    type: str = "covariance_clip"
    share: float = option(2e-4, "fraction of all decisions that is dropped", gt=0, lt=1)
    low: float = option(1.0, "smallest covariance of a decision that may be dropped")
    high: float = option(5.0, "largest covariance of a decision that may be dropped")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), statistics=frozenset({"logp"}))

    def keep(self, batch: Batch) -> Tensor:
        """Returns which decisions stay in the objective, [rollout, decision] bool. A random `share` of all decisions is
        dropped, only ones whose covariance of log-probability and advantage is within low..high."""
        import torch

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.advantages is not None
        logp, advantages = rollouts.old_logp, rollouts.advantages.expand(rollouts.mask.shape)
        all_logp, all_advantages = batch.gather_decisions(logp), batch.gather_decisions(advantages)  # of all ranks
        covariance = (logp - all_logp.mean()) * (advantages - all_advantages.mean())
        eligible = rollouts.mask & (covariance >= self.low) & (covariance <= self.high)
        num_dropped = max(1, int(self.share * len(all_logp)))
        # the eligible decisions with the smallest random numbers are dropped; 2 is above all random numbers
        priority = torch.rand(eligible.shape, generator=batch.generator()).where(eligible, 2.0)
        lowest = batch.gather_decisions(priority).sort().values[:num_dropped]
        return ~(eligible & (priority <= lowest[-1]))


class TokenBudget(Mask):
    """Keeps a random sample of at most `budget` decisions per step, so that steps with long responses do not weigh
    more."""

    equation: ClassVar[str] = "keep the decisions with the `budget` smallest of uniform random numbers, over all ranks"
    source: ClassVar[str] = "C3PO of Ring-lite, arXiv 2506.14731; that single decisions are sampled is mmrl's choice"
    test: ClassVar[str] = "tests/joints/test_masks.py"
    type: str = "token_budget"
    budget: int = option(description="largest number of decisions per step, over all ranks", unit="decisions", ge=1)

    def keep(self, batch: Batch) -> Tensor:
        """Returns which decisions have the `budget` smallest random numbers over all ranks, [rollout, decision]
        bool."""
        import torch

        priority = torch.rand(batch.rollouts.mask.shape, generator=batch.generator(self.type))
        ascending = batch.gather_decisions(priority).sort().values
        if not len(ascending):
            return torch.ones_like(batch.rollouts.mask)
        return priority <= ascending[min(self.budget, len(ascending)) - 1]


class SmallAdvantages(Mask):
    """Drops new rollouts with a small mean advantage from the loss. Unlike masks of rollouts, it leaves them in their
    group's statistics. EFRame also drops truncated rollouts with a positive advantage, and of the responses of
    rollout.extras=[extra_rollouts] it keeps only those with a large advantage."""

    equation: ClassVar[str] = (
        "keep where |A| >= least, |A| >= extra for extra rollouts, and not (truncated and A > 0); A the mean over the "
        "decisions of the rollout"
    )
    source: ClassVar[str] = "EFRame, arXiv 2506.22200, and 597358816/EFRame at 173b698"
    test: ClassVar[str] = "tests/joints/test_large_advantages.py"
    type: str = "small_advantages"
    least: float = option(0.05, "smallest size of a new rollout's mean advantage", ge=0)
    extra: float = option(1.0, "the same for rollouts of rollout.extras that join groups, such as extra_rollouts", ge=0)
    truncated: bool = option(True, "drop truncated rollouts with a positive advantage")

    def keep(self, batch: Batch) -> Tensor:
        """Returns which rollouts are kept, [rollout, decision] bool, and logs their share. Replayed rollouts and
        demonstrations are kept."""
        import torch

        from mmrl.rollouts import EXTRA, FRESH

        rollouts = batch.rollouts
        advantages, truncated = batch.local(batch.column("advantage")), batch.local(batch.column("truncated")) > 0
        origin = torch.full((len(rollouts),), FRESH) if rollouts.origin is None else rollouts.origin
        least = torch.tensor(self.extra).where(origin == EXTRA, self.least)
        large = (advantages.abs() >= least) & ~(truncated & (advantages > 0) & self.truncated)
        selected = large | ((origin != FRESH) & (origin != EXTRA))
        batch.report({"small_advantages/kept": float(batch.gather(selected).float().mean())})
        return selected[:, None].expand(rollouts.mask.shape)


class Mastered(Mask):
    """Drops the tokens of right responses that are nearly certain already from the objective, if the whole response has
    a low entropy. So the policy does not become more certain than it has to be. They stay in its denominator and in the
    loss terms."""

    equation: ClassVar[str] = "drop where r > threshold, p_old >= probability and mean_t H_t < entropy, by rollout"
    source: ClassVar[str] = "UloRL's dynamic masking of well-mastered positive tokens (DMMPTs), from its paper"
    test: ClassVar[str] = "tests/joints/test_masks.py"
    of: ClassVar[Literal["rollouts", "decisions", "objective"]] = "objective"
    type: str = "mastered"
    probability: float = option(0.99, "smallest probability of a token that is dropped", gt=0, le=1)
    entropy: float = option(0.2, "responses whose mean entropy is at least this are not changed", gt=0)
    threshold: float = option(0.5, "a response is right if its reward is above it")

    @property
    def needs(self) -> Needs:
        offers = frozenset({"single_sample_kl", "entropy"})
        return Needs(offers=offers, statistics=frozenset({"logp", "entropy"}))

    def keep(self, batch: Batch) -> Tensor:
        """Returns which decisions stay in the objective, [rollout, decision] bool, and logs the share of the others."""
        rollouts = batch.rollouts
        assert rollouts.old_logp is not None
        right = batch.local((batch.combined_rewards() > self.threshold) & (batch.column("entropy") < self.entropy))
        mastered = right[:, None] & (rollouts.old_logp.exp() >= self.probability)
        batch.report({"mastered/share": float(batch.gather_decisions(mastered).float().mean())})
        return ~mastered
