"""Chunks of actions that the policy samples at observations of earlier episodes, as a source of rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.collection.extra_sources import masked_copies
from mmrl.collection.stored_steps.source import StoredSteps
from mmrl.protocols.abilities import EpisodeStoring, OffPolicyLearning
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Rollouts

FIRST_GROUP = -(1 << 49)  # group ids of proposals fall from here, below those of stored steps


class ActionProposals(StoredSteps):
    """Chunks of actions that the current policy samples at observations of its own earlier episodes, several for each
    observation. They are not executed; they are for the loss term `q_policy_gradient`. Each rank stores the episodes on
    disk, as `stored_steps` does."""

    equation: ClassVar[str] = "rollouts of origin 4 (proposed), without rewards: group_size chunks for each stored step"
    source: ClassVar[str] = "OGPO, arXiv 2605.03065"
    test: ClassVar[str] = "tests/joints/test_q_policy_gradient.py"

    makes: ClassVar[RolloutKind | None] = "proposals"
    type: str = "action_proposals"
    group_size: int = option(8, "chunks for each stored observation", ge=2)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({EpisodeStoring, OffPolicyLearning}))

    @property
    def rollouts(self) -> int:
        return self.steps * self.group_size

    @property
    def divided(self) -> int:
        return self.steps

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns `group_size` sampled chunks for each of this rank's drawn steps, as a group; as many masked rollouts
        if no step is stored yet."""
        from mmrl.rollouts import PROPOSED

        stored, positions = self._sample()
        if not stored:
            return masked_copies(fresh, len(positions) * self.group_size)
        prompts = [prompt for prompt in stored for _ in range(self.group_size)]
        groups = positions.repeat_interleave(self.group_size)
        # the number of a chunk among all of the run
        seeds = range(int(positions[0]) * self.group_size, (int(positions[-1]) + 1) * self.group_size)
        proposed: Rollouts = self._context.policy.off_policy.propose(prompts, list(seeds), groups.tolist())
        proposed.group = FIRST_GROUP - groups
        proposed.origin = groups.new_full((len(groups),), PROPOSED)
        return proposed
