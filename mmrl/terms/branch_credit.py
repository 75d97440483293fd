"""Advantages by denoising step, from the branches that part there."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class BranchCredit(Shaper):
    """At every step of the window the rollouts of a group branch off from one state, each with noise of its own, and
    every branch is led to its end without further noise. What it earns is compared with the other branches of the step:
    all else is equal, so that the difference is that step's own. With `denoising.likelihood.trunk=ode` and
    `step_weight=std` this is TempFlow-GRPO; a group is its seed group."""

    equation: ClassVar[str] = (
        "A_k = outcome A + weight (R_k - mean) / (std + eps), over the branches of step k in the group, R_k the reward "
        "of the branch's ODE completion"
    )
    source: ClassVar[str] = "TempFlow-GRPO, arXiv 2508.04324, with one seed a group"
    test: ClassVar[str] = "tests/joints/test_branch_credit.py"
    type: str = "branch_credit"
    weight: float = option(1.0, "of the steps' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "what differences are divided by")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"candidates"}), outcomes=True)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import turn_advantages

        worth = batch.column("outcomes")
        known = ~worth.isnan() & batch.rollouts.mask & batch.kept[:, None]
        own = turn_advantages(worth.nan_to_num(0.0), known, batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * own
