"""Credit assignment to the turns of conversations with an environment."""

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
    """The discounted return of each turn from the environment's rewards, normalized among the same turn of the group.

    A turn that no other rollout of the group reaches gets 0. MT-GRPO itself is the case of tools with a `reward`, and a
    reward of the task as `answer`.
    """

    equation: ClassVar[str] = (
        "R_t = sum_{k>=t} gamma^(k-t) r_k, r of the last turn with that of the answer; A = outcome A_rollout + weight "
        "(R_t - b_t) / (std R_t + eps), by group; b_t = mean R_t, or the mean of the other rollouts"
    )
    source: ClassVar[str] = (
        "per-turn credit: MT-GRPO, arXiv 2505.11821; discounted returns: VLM-Gym, arXiv 2505.13426; the others of a "
        "turn as its baseline: reconstructed from a summary of TRLOO (Dr. Kernel)"
    )
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    uses_environment_rewards: ClassVar[bool] = True
    type: str = "turn_returns"
    gamma: float = option(1.0, "discount per turn", ge=0, le=1)
    weight: float = option(1.0, "weight of the turns' advantages", ge=0)
    outcome: float = option(0.0, "weight of the algorithm's own advantage of the rollout", ge=0)
    baseline: Literal["mean", "leave_one_out"] = option(
        "mean",
        "baseline of a turn: the mean over the group, or over the group's other rollouts",
    )
    scale: Literal["group_std", "none"] = option("group_std", "divide differences by the std of the group, or not")
    answer: str | None = option(
        None, "reward of the task that is added to the last turn's reward, such as exact_match; null: none"
    )
    gate: str | None = option(
        None, "reward that must be above 0, or else all turn rewards of the rollout become 0; null: none"
    )

    @property
    def needs(self) -> Needs:
        named = [needs_column(f"reward/{name}") for name in (self.gate, self.answer) if name is not None]
        # a gate is open for prompts that its reward does not judge
        gates = frozenset() if self.gate is None else frozenset({self.gate})
        return merge_needs([Needs(offers=frozenset({"turns"}), gates=gates), *named])

    @property
    def needs_turn_rewards(self) -> bool:
        return self.answer is None

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns outcome x the advantages + weight x the discounted returns of the turns, normalized among the same
        turn of the group; each decision gets the value of its turn, [rollout, decision]. The reward `answer` is added
        to the last turn's; where the reward `gate` is not above 0, all turn rewards are 0."""
        import torch

        from mmrl.core.turns import discounted_returns, turn_advantages
        from mmrl.rollouts import Turns

        turns = batch.rollouts.extra("turns", Turns)
        rewards, mask = turns.rewards * turns.mask, turns.mask & batch.rollout_mask[:, None]
        if self.answer is not None:
            answer_reward = batch.local(batch.column(f"reward/{self.answer}"))[:, None]
            is_last = torch.arange(turns.mask.shape[1]) == turns.mask.sum(1, keepdim=True) - 1
            rewards, mask = rewards + answer_reward.where(is_last, 0.0), mask & ~answer_reward.isnan()
        if self.gate is not None:
            gate = batch.local(batch.column(f"reward/{self.gate}"))[:, None]
            rewards, mask = rewards * (gate > 0), mask & ~gate.isnan()
        advantages_by_turn = turn_advantages(
            discounted_returns(rewards, self.gamma),
            mask,
            batch.rollouts.group,
            baseline=self.baseline,
            scale=self.scale,
        )
        return self.outcome * advantages + self.weight * advantages_by_turn.gather(1, turns.number)


class Milestones(Shaper):
    """Credit of the segments between milestones, which are turns that the environment rewards (BEACON).

    The return of a segment is larger the fewer turns it took. It is normalized among the same segment of the group's
    rollouts and added to the algorithm's advantage of the whole conversation.
    """

    equation: ClassVar[str] = (
        "A = outcome A_rollout + weight (w_k - mean w_k) / (std w_k + eps), by group; w_k = gamma^(turns - 1) of the "
        "k-th segment if it ends with a reward above 0, else 0"
    )
    source: ClassVar[str] = "reconstructed from BEACON: credit of milestone segments beside that of the trajectory"
    test: ClassVar[str] = "tests/joints/test_milestones.py"
    uses_environment_rewards: ClassVar[bool] = True
    type: str = "milestones"
    gamma: float = option(0.9, "discount per turn of a segment", ge=0, le=1)
    weight: float = option(1.0, "weight of the segments' advantages", ge=0)
    outcome: float = option(1.0, "weight of the algorithm's own advantage of the rollout", ge=0)
    scale: Literal["group_std", "none"] = option("group_std", "divide differences by the std of the group, or not")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    @property
    def needs_turn_rewards(self) -> bool:
        return True

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns outcome x the advantages + weight x the returns of the segments between milestones, normalized among
        the same segment of the group; each decision gets the value of its segment, [rollout, decision]."""
        from mmrl.core.turns import milestone_segments, turn_advantages
        from mmrl.rollouts import Turns

        turns = batch.rollouts.extra("turns", Turns)
        segment, returns, exists = milestone_segments(turns.rewards, turns.mask, self.gamma)
        mask = exists & batch.rollout_mask[:, None]
        by_segment = turn_advantages(returns, mask, batch.rollouts.group, scale=self.scale)
        segment_of_decision = segment.gather(1, turns.number)
        return self.outcome * advantages + self.weight * by_segment.gather(1, segment_of_decision)


class Curiosity(Shaper):
    """A bonus for rollouts that use a tool, as long as fewer rollouts of the group do so than a target.

    It is added to the advantages and not to the rewards, since there it would change the group's mean too.
    """

    equation: ClassVar[str] = "A + weight max(0, target - share) for rollouts that used a tool"
    source: ClassVar[str] = "Pixel Reasoner's curiosity, arXiv 2505.15966"
    test: ClassVar[str] = "tests/joints/test_turn_credit.py"
    type: str = "curiosity"
    target: float = option(0.3, "fraction of a group's rollouts that should use a tool", gt=0, le=1)
    weight: float = option(0.5, "weight of the bonus", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"turns"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the advantages plus a bonus for rollouts that used a tool, as long as fewer than the share `target`
        of their group did; [rollout, decision]."""
        import torch

        from mmrl.rollouts import require

        conversations = [require(sample.conversation, "conversations") for sample in batch.rollouts.samples]
        used_tool = torch.tensor([float(uses_tool(conversation)) for conversation in conversations])
        group = batch.rollouts.group
        share = torch.stack([used_tool[group == g].mean() for g in group])  # [rollout], the share in its group
        bonus = self.weight * (self.target - share).clamp_min(0) * used_tool * batch.rollout_mask
        batch.report({"curiosity/share": float(used_tool.mean())})
        return advantages + bonus[:, None]


def uses_tool(conversation: Conversation) -> bool:
    """Returns whether the conversation has a tool call without an error."""
    return any(turn.tool is not None and turn.error is None for turn in conversation.turns)
