"""Rewards that go to the tokens that were in doubt where the answer was right."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class EntropyRedistribution(Shaper):
    """At every place the group's right rollouts share what they earn by their entropies there, and its wrong ones share
    what they lose by their reciprocals. It takes the place of the algorithm's advantages."""

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
        assert rollouts.old_entropy is not None
        entropy, mask = rollouts.old_entropy.clamp(self.low, self.high), rollouts.mask
        rewards = batch.mine(batch.combined())
        right, scored = rewards > self.threshold, ~rewards.isnan()
        for group in rollouts.group.unique():  # a group lies on one rank
            for of, sign, share in ((right, 1.0, entropy), (~right, -1.0, 1 / entropy)):
                rows = (rollouts.group == group) & of & scored
                own, counted = share[rows].where(mask[rows], 0), mask[rows].sum(0)
                part = own / own.sum(0).clamp(min=1e-12) * counted
                shaped[rows] = (sign * (self.alpha + self.beta * part)).where(mask[rows], 0)
        if self.standardise:
            shaped = self._standardised(shaped, right, scored, batch)
        return shaped

    def _standardised(self, shaped: Tensor, right: Tensor, scored: Tensor, batch: Batch) -> Tensor:
        for of in (right & scored, ~right & scored):
            chosen = of[:, None] & batch.rollouts.mask
            everyone = batch.everyone(shaped[chosen])
            if len(everyone) > 1:
                shaped = ((shaped - everyone.mean()) / (everyone.std() + 1e-6)).where(chosen, shaped)
        return shaped
