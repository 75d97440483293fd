"""Leaving out the decisions that make entropy collapse."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class CovarianceClip(Mask):
    """A small share of the decisions whose likelihood and advantage are both far above the mean is left out, drawn by
    chance from those within the bounds."""

    equation: ClassVar[str] = "cov = (logp - mean logp) (A - mean A), over the decisions of all ranks"
    source: ClassVar[str] = "Clip-Cov, arXiv 2505.22617"
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
        everyone = batch.decisions(logp), batch.decisions(advantages)
        covariance = (logp - everyone[0].mean()) * (advantages - everyone[1].mean())
        eligible = rollouts.mask & (covariance >= self.low) & (covariance <= self.high)
        wanted = max(1, int(self.share * len(everyone[0])))
        chance = torch.rand(eligible.shape, generator=batch.generator()).where(eligible, 2.0)
        lowest = batch.decisions(chance).sort().values[:wanted]
        return ~(eligible & (chance <= lowest[-1]))
