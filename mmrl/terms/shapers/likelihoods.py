"""Advantage shapers by the perplexity of a response and by the position of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch

TEST = "tests/joints/test_shapers.py"


class PerplexityWeight(Shaper):
    """Multiplies the advantages of a response by a weight that is above 1 if its perplexity is low for the batch, and
    below 1 if it is high."""

    equation: ClassVar[str] = "A <- A (1 - alpha (x - mean x) / (std x + 1e-6)), x = log PPL = -mean_t logp_t, of all"
    source: ClassVar[str] = "reconstructed from a summary of arXiv 2508.02260: perplexity-based shaping of advantages"
    test: ClassVar[str] = TEST
    type: str = "perplexity_weight"
    alpha: float = option(0.01, "strength of the weight", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), statistics=frozenset({"logp"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the weighted advantages, [rollout, decision]; mean and std are over the scored rollouts of all
        ranks."""
        perplexity, scored = -batch.column("logp"), ~batch.combined_rewards().isnan()
        if int(scored.sum()) < 2:
            return advantages
        mean, std = perplexity[scored].mean(), perplexity[scored].std()
        weights = 1 - self.alpha * (perplexity - mean) / (std + 1e-6)
        return advantages * batch.local(weights).to(advantages)[:, None]


class PositionBonus(Shaper):
    """Enlarges the advantages of late tokens of a response, whatever their sign."""

    equation: ClassVar[str] = "A_t <- A_t + sign(A_t) weight t / T, t = 1 .. T"
    source: ClassVar[str] = (
        "reconstructed from a summary of arXiv 2508.02260: position-based shaping of advantages; that the bonus grows "
        "linearly is mmrl's choice"
    )
    test: ClassVar[str] = TEST
    type: str = "position_bonus"
    weight: float = option(0.1, "bonus of the last token", gt=0)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages plus the bonus of each decision's position, [rollout, decision]."""
        mask = batch.rollouts.mask
        position = mask.cumsum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return advantages + advantages.sign() * self.weight * position
