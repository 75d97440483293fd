"""Policy steps of earlier episodes as a source of rollouts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from mmrl.collection.extra_sources import ExtraSource, SourceContext, masked_copies
from mmrl.protocols.abilities import EpisodeStoring
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.collection.stored_steps.ring import StepRing, StoredStep
    from mmrl.protocols.batch import Batch
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Prompt, Rollouts

# group ids of stored steps fall from here, below those of imitated rollouts and above those of expert labels
FIRST_GROUP = -(1 << 48)


class StoredSteps(ExtraSource):
    """Single policy steps of the policy's own episodes, including failures, with the executed actions and the rewards
    from this step on. Each rank stores its own steps on disk, in the run's folder. They are for the loss terms
    `likelihood` with of=replayed, which imitates them, and `advantage_weighted`, which imitates the better ones."""

    equation: ClassVar[str] = "rollouts of origin 2 (replayed), without rewards, uniform over the last `keep` steps"
    source: ClassVar[str] = "a replay buffer, as in self-imitation learning, arXiv 1806.05635"
    test: ClassVar[str] = "tests/collection/test_stored_steps.py"

    makes: ClassVar[RolloutKind | None] = "replayed"
    type: str = "stored_steps"
    steps: int = option(description="policy steps per training step that are trained on, over all ranks", ge=1)
    keep: int = option(
        100_000, "policy steps that a rank keeps; the oldest are removed first, a whole training step at a time", ge=1
    )
    of: Literal["all", "success", "failure"] = option("all", "episodes from which steps are sampled")
    _ring: StepRing = PrivateAttr()
    _drawn: int = PrivateAttr(default=0)  # training steps so far

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations", EpisodeStoring}))

    @property
    def rollouts(self) -> int:
        return self.steps

    def start(self, context: SourceContext) -> None:
        """Opens this rank's ring of stored steps in the run's folder."""
        from mmrl.collection.stored_steps.ring import StepRing

        self._context, self._drawn = context, 0
        folder = context.folder / self.type / f"rank_{context.rank_and_world[0]}"
        checkpoints = context.checkpoints + 1  # one more, since writing the newest checkpoint may fail
        self._ring = StepRing(folder, size=self.keep, chosen=self.of, checkpoints=checkpoints)

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns this rank's share of stored steps as rollouts, or as many masked rollouts if none is stored yet."""
        from mmrl.rollouts import REPLAYED

        prompts, positions = self._sample()
        if not prompts:
            return masked_copies(fresh, len(positions))
        replayed: Rollouts = self._context.policy.demonstrate(prompts, positions.tolist())
        replayed.group = FIRST_GROUP - positions
        replayed.origin = positions.new_full((len(positions),), REPLAYED)
        return replayed

    def _sample(self) -> tuple[list[Prompt], Tensor]:
        """Samples this rank's share of a training step's stored steps. Returns them as prompts, or no prompts where
        none is stored yet, and their positions among all steps that the run samples, [step] int64."""
        import torch

        (rank, world), training_step = self._context.rank_and_world, self._drawn
        self._drawn += 1
        count = self.steps // world
        first = training_step * self.steps + rank * count
        positions = torch.arange(first, first + count)
        if not self._ring.eligible:
            return [], positions
        rng = random.Random(f"{self._context.seed} {rank} {training_step}")
        stored = self._ring.draw(rng.choices(range(self._ring.eligible), k=count))
        return [as_prompt(step) for step in stored], positions

    def observe(self, batch: Batch) -> None:
        """Stores this rank's new episodes that the task could score."""
        from mmrl.rollouts import FRESH

        outcomes = batch.local(batch.combined_rewards())
        rollouts = batch.rollouts
        assert rollouts.origin is not None
        fresh = rollouts.select(rollouts.origin == FRESH)
        fresh_outcomes = outcomes[rollouts.origin == FRESH].tolist()
        scored = [
            (episode, outcome)
            for episode, outcome in zip(self._context.policy.trajectories(fresh), fresh_outcomes, strict=True)
            if episode is not None and outcome == outcome  # not NaN
        ]
        self._ring.add([episode for episode, _ in scored], [outcome for _, outcome in scored])

    def rank_state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "ring": self._ring.state()}

    def load_rank(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
        self._ring.load(state["ring"])


def as_prompt(step: StoredStep) -> Prompt:
    """Returns a stored step as a prompt for `demonstrate`; metadata["tail"] is an `EpisodeTail`."""
    from mmrl.rollouts import Prompt

    metadata = {"observation": step.observation, "actions": step.actions, "tail": step.tail}
    return Prompt(step.name, step.observation.instructions[0], metadata=metadata)
