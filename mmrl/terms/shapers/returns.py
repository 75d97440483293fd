"""KL penalties as returns of single decisions, and whitening of advantages, as in REINFORCE++."""

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
    """Subtracts from the advantage of each decision the discounted KL penalties of itself and all later decisions.

    This is the KL penalty as a part of the reward: unlike with the term kl, a decision is held responsible for the
    divergence of later ones. With algorithm.baseline and scale none and `whitening` after it, this is REINFORCE++.
    """

    equation: ClassVar[str] = (
        "A_t <- A_t - coefficient sum_{u >= t} gamma^(u - t) k(logp_u - ref_logp_u), k the estimator"
    )
    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262; use_kl_in_reward of verl; RLHF, arXiv 2203.02155"
    test: ClassVar[str] = TEST
    type: str = "kl_returns"
    kl: RewardKL = option(RewardKL(), "KL penalty of a decision")
    gamma: float = option(1.0, "discount per decision", gt=0, le=1)

    @property
    def needs(self) -> Needs:
        return self.kl.needs

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages minus the discounted KL penalties from each decision on; [rollout, decision]."""
        from mmrl.core.turns import discounted_returns

        scored = batch.scored()[:, None]
        penalties = discounted_returns(self.kl.costs(batch), self.gamma)
        return advantages - penalties.where(scored & batch.rollouts.mask, 0)


class Whitening(Shaper):
    """Normalizes advantages to mean 0 and variance 1 over the decisions (or rollouts) of all ranks.

    With algorithm.baseline=mean and algorithm.scale=none this is REINFORCE++-baseline, as in verl and OpenRLHF. The
    scale batch_std, in contrast, divides by the std of the rewards and subtracts nothing.
    """

    equation: ClassVar[str] = "A <- (A - mean A) / sqrt(var A + 1e-8), over the decisions, or rollouts, of all ranks"
    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262; masked_whiten of verl"
    test: ClassVar[str] = TEST
    type: str = "whitening"
    over: Literal["decisions", "rollouts"] = option(
        "decisions", "whether decisions or rollouts have equal weights in mean and variance"
    )

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages, [rollout, decision], normalized to mean 0 and variance 1 over the decisions or
        rollouts of all ranks; 0 outside the mask and for unknown rewards."""
        scored = batch.scored()[:, None]
        mask = batch.rollouts.mask & scored
        values = batch.gather_steps(*self._values_and_mask(advantages, mask))
        if len(values) < 2:
            return advantages.where(~mask, 0)
        variance = values.var() + 1e-8
        return ((advantages - values.mean()) * variance.rsqrt()).where(mask, 0)

    def _values_and_mask(self, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the values whose mean and variance are used and their mask: the advantages [rollout, decision], or
        their means per rollout [rollout]."""
        if self.over == "decisions":
            return advantages.expand(mask.shape), mask
        num_decisions = mask.sum(1)
        return advantages.where(mask, 0).sum(1) / num_decisions.clamp(min=1), num_decisions > 0
