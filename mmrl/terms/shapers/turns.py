"""Credit assignment to turns of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs, merge_needs, needs_column
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Conversation


class TurnReturns(Shaper):
    """The discounted return of each turn from the environment's rewards, compared with the same turn of the other
    rollouts of the group. A turn that no other rollout of its group reached gets 0. MT-GRPO's own case is tools with a
    `reward` and a reward of the task as `answer`."""

    equation: ClassVar[str] = (
        "R_t = sum_{k>=t} gamma^(k-t) r_k, r of the last turn with that of the answer; A = outcome A_rollout + weight "
        "(R_t - b_t) / (std R_t + eps), by group; b_t = mean R_t, or that of the others"
    )
    source: ClassVar[str] = (
        "per-turn credit: MT-GRPO, arXiv 2505.11821; discounted returns: VLM-Gym, arXiv 2505.13426; the others of a "
        "turn as its baseline: reconstructed from a summary of TRLOO (Dr. Kernel)"
    )
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    paid_by_environment: ClassVar[bool] = True
    type: str = "turn_returns"
    gamma: float = option(1.0, "discount of a turn", ge=0, le=1)
    weight: float = option(1.0, "weight of the turns' advantages", ge=0)
    outcome: float = option(0.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    baseline: Literal["mean", "leave_one_out"] = option(
        "mean",
        "what a turn is compared with: all of the group, or the others (not itself)",
    )
    scale: Literal["group_std", "none"] = option("group_std", "scale by which differences are divided")
    answer: str | None = option(
        None, "a reward of the task that the last turn earns beside the environment's, such as exact_match; null: none"
    )
    gate: str | None = option(
        None, "a reward that must be above 0 for a rollout's turns to earn anything (gated turn rewards); null: none"
    )

    @property
    def needs(self) -> Needs:
        named = [needs_column(f"reward/{name}") for name in (self.gate, self.answer) if name is not None]
        return merge_needs([Needs(offers=frozenset({"turns"})), *named])

    @property
    def needs_paid_turns(self) -> bool:
        return self.answer is None

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        from mmrl.core.turns import discounted, turn_advantages
        from mmrl.rollouts import Turns

        turns = batch.rollouts.extra("turns", Turns)
        rewards, counted = turns.rewards * turns.mask, turns.mask & batch.rollout_mask[:, None]
        if self.answer is not None:
            earned = batch.local(batch.column(f"reward/{self.answer}"))[:, None]
            last = torch.arange(turns.mask.shape[1]) == turns.mask.sum(1, keepdim=True) - 1
            rewards, counted = rewards + earned.where(last, 0.0), counted & ~earned.isnan()
        if self.gate is not None:
            gate = batch.local(batch.column(f"reward/{self.gate}"))[:, None]
            rewards, counted = rewards * (gate > 0), counted & ~gate.isnan()
        shaped = turn_advantages(
            discounted(rewards, self.gamma),
            counted,
            batch.rollouts.group,
            baseline=self.baseline,
            scale=self.scale,
        )
        return self.outcome * advantages + self.weight * shaped.gather(1, turns.number)


class Milestones(Shaper):
    """A turn that the environment rewards is a milestone, and the turns up to it are a segment. A segment earns more
    the fewer turns it took, and is compared with the same segment of the others of the group; the advantage of the
    whole conversation is added."""

    equation: ClassVar[str] = (
        "A = outcome A_rollout + weight (w_k - mean w_k) / (std w_k + eps), by group; w_k = gamma^(turns - 1) of the "
        "k-th segment if it ends with a reward above 0, else 0"
    )
    source: ClassVar[str] = "reconstructed from BEACON: credit of milestone segments beside that of the trajectory"
    test: ClassVar[str] = "tests/joints/test_milestones.py"
    paid_by_environment: ClassVar[bool] = True
    type: str = "milestones"
    gamma: float = option(0.9, "discount of a turn within a segment", ge=0, le=1)
    weight: float = option(1.0, "weight of the segments' advantages", ge=0)
    outcome: float = option(1.0, "weight of the advantages that the algorithm gave the whole rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "scale by which differences are divided")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    @property
    def needs_paid_turns(self) -> bool:
        return True

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.turns import milestone_segments, turn_advantages
        from mmrl.rollouts import Turns

        turns = batch.rollouts.extra("turns", Turns)
        number, worth, exists = milestone_segments(turns.rewards, turns.mask, self.gamma)
        shaped = turn_advantages(worth, exists & batch.rollout_mask[:, None], batch.rollouts.group, scale=self.scale)
        return self.outcome * advantages + self.weight * shaped.gather(1, number.gather(1, turns.number))


class Curiosity(Shaper):
    """A bonus for rollouts that use a tool, as large as the group's share of them falls short of a target. It is added
    to the advantages, for in the reward it would move the group's mean too."""

    equation: ClassVar[str] = "A + weight max(0, target - share) for rollouts that used a tool"
    source: ClassVar[str] = "Pixel Reasoner's curiosity, arXiv 2505.15966"
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    type: str = "curiosity"
    target: float = option(0.3, "share of a group's rollouts that should use a tool", gt=0, le=1)
    weight: float = option(0.5, "of the bonus", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        from mmrl.rollouts import require

        used = torch.tensor(
            [float(uses_tool(require(s.conversation, "conversations"))) for s in batch.rollouts.samples]
        )
        group = batch.rollouts.group
        share = torch.stack([used[group == g].mean() for g in group])
        bonus = self.weight * (self.target - share).clamp_min(0) * used * batch.rollout_mask
        batch.report({"curiosity/share": float(used.mean())})
        return advantages + bonus[:, None]


def uses_tool(conversation: Conversation) -> bool:
    """Returns whether a tool was called without an error."""
    return any(turn.tool is not None and turn.error is None for turn in conversation.turns)
