"""Advantages of single decisions from what follows them, and their standardisation, as REINFORCE++ has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.reward_kl import RewardKL
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch

TEST = "tests/joints/test_returns.py"


class KLReturns(Shaper):
    """Every decision pays for the divergence from the reference that it and all later ones cause, as a part of the
    reward: unlike the term kl, the price is credited to the decisions before it. With algorithm.baseline and scale none
    and `whitening` after it, this is REINFORCE++."""

    equation: ClassVar[str] = (
        "A_t <- A_t - coefficient sum_{u >= t} gamma^(u - t) k(logp_u - ref_logp_u), k the estimate"
    )
    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262; use_kl_in_reward of verl; RLHF, arXiv 2203.02155"
    test: ClassVar[str] = TEST
    type: str = "kl_returns"
    kl: RewardKL = option(RewardKL(), "the price of a decision")
    gamma: float = option(1.0, "discount of a decision", gt=0, le=1)

    @property
    def needs(self) -> Needs:
        return self.kl.needs

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import discounted

        scored = ~batch.local(batch.combined_rewards()).isnan()[:, None]
        return advantages - discounted(self.kl.costs(batch), self.gamma).where(scored & batch.rollouts.mask, 0)


class Whitening(Shaper):
    """Advantages are standardised over the batch, in which a rollout counts as often as it has decisions. With
    algorithm.baseline=mean and algorithm.scale=none this is REINFORCE++-baseline, as verl and OpenRLHF have it; the
    scale batch_std divides by the deviation of the rewards as they are instead, and takes nothing away."""

    equation: ClassVar[str] = "A <- (A - mean A) / sqrt(var A + 1e-8), over the decisions, or rollouts, of all ranks"
    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262; masked_whiten of verl"
    test: ClassVar[str] = TEST
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "whitening"
    over: Literal["decisions", "rollouts"] = option(
        "decisions", "what counts alike in mean and variance; of a rollout, the mean of its decisions"
    )

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        scored = ~batch.local(batch.combined_rewards()).isnan()[:, None]
        counted = batch.rollouts.mask & scored
        known = batch.gather_steps(*self._counted(advantages, counted))
        if len(known) < 2:
            return advantages.where(~counted, 0)
        variance = known.var() + 1e-8
        return ((advantages - known.mean()) * variance.rsqrt()).where(counted, 0)

    def _counted(self, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what mean and variance are of, and where it counts."""
        if self.over == "decisions":
            return advantages.expand(mask.shape), mask
        number = mask.sum(1)
        return advantages.where(mask, 0).sum(1) / number.clamp(min=1), number > 0
