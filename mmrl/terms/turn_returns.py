"""Advantages by turn, from the environment's own rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class TurnReturns(Shaper):
    """What came of each turn: the environment's rewards of it and of those after it, discounted, compared with the same
    turn of the other rollouts of the group. A turn that no other rollout of its group reached gets nothing."""

    equation: ClassVar[str] = (
        "R_t = sum_{k>=t} gamma^(k-t) r_k; A = outcome A_rollout + weight (R_t - b_t) / (std R_t + eps), by group; "
        "b_t = mean R_t, or that of the others"
    )
    source: ClassVar[str] = (
        "per-turn credit: MT-GRPO, arXiv 2505.11821; discounted returns: VLM-Gym, arXiv 2505.13426; the others of a "
        "turn as its baseline: reconstructed from a summary of TRLOO (Dr. Kernel)"
    )
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    type: str = "turn_returns"
    gamma: float = option(1.0, "discount of a turn", ge=0, le=1)
    weight: float = option(1.0, "of the turns' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    baseline: Literal["mean", "leave_one_out"] = option(
        "mean",
        "what a turn is compared with: all of the group, or the others (not itself)",
    )
    scale: Literal["group_std", "none"] = option("group_std", "what differences are divided by")
    gate: str | None = option(
        None, "a reward that must be above 0 for a rollout's turns to earn anything (gated turn rewards); null: none"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import discounted, turn_advantages
        from mmrl.rollouts import Turns

        turns = batch.rollouts.extras["turns"]
        assert isinstance(turns, Turns)
        rewards = turns.rewards * turns.mask
        if self.gate is not None:
            rewards = rewards * (batch.mine(batch.fact(f"reward/{self.gate}")) > 0)[:, None]
        found = turn_advantages(
            discounted(rewards, self.gamma),
            turns.mask & batch.kept[:, None],
            batch.rollouts.group,
            baseline=self.baseline,
            scale=self.scale,
        )
        return self.outcome * advantages + self.weight * found.gather(1, turns.number)
