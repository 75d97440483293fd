"""Advantages by denoising step, from what completions of the chain's states earn."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class StepGains(Shaper):
    """What each stochastic step of the chain added: the reward of where its end leads without further noise, less that
    of its beginning; compared with the same step of the other rollouts of the group. A step at which the chain turns
    towards its outcome gets all that comes after its beginning."""

    equation: ClassVar[str] = (
        "d_k = R_k - R_(k-1), R_k the reward of k steps and then the ODE, R_K the rollout's; s_k = sign(d_k) sign(R_K "
        "- R_0); where s_(k-1) < 0 < s_k and d_k (R_K - R_k) > 0 (first step: the latter alone) it is R_K - R_(k-1); "
        "A_k = outcome A + weight (d_k - mean) / (std + eps), by group"
    )
    source: ClassVar[str] = "TP-GRPO, arXiv 2602.06422, without its balance of positive and negative turning points"
    test: ClassVar[str] = "tests/joints/test_step_gains.py"
    type: str = "step_gains"
    turning_points: bool = option(True, "a step at which the chain turns gets all that comes after; false: none does")
    weight: float = option(1.0, "of the steps' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "what differences are divided by")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"completions"}), completions=True)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.credit import gains, turned
        from mmrl.core.turns import turn_advantages

        worth = batch.column("completions")
        found = turned(worth) if self.turning_points else gains(worth)
        known = ~found.isnan() & batch.rollouts.mask & batch.kept[:, None]
        own = turn_advantages(found.nan_to_num(0.0), known, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * own
