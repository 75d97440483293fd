"""A source of observations from the policy's own episodes with the actions of an expert, as in DAgger."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from mmrl.collection.extra_sources import ExtraSource, SourceContext
from mmrl.errors import UserError
from mmrl.prompts.sampler import Permutation
from mmrl.protocols.abilities import ExpertLabelling
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Prompt, Rollouts

FIRST_GROUP = -(1 << 50)  # labels' group ids fall from here, below those of demonstrations and imitated rollouts


class ExpertLabels(ExtraSource):
    """Observations of the policy's own episodes with the actions of the simulator's expert at them, for the loss term
    `likelihood`. A rank keeps the observations of earlier steps, and draws from all that it has."""

    equation: ClassVar[str] = "rollouts of origin 1, without rewards, drawn at random from the last `keep` observations"
    source: ClassVar[str] = "DAgger, arXiv 1011.0686, where beta is 0 from the first step on"
    test: ClassVar[str] = "tests/whole_runs/test_robot_demonstrations.py"

    makes: ClassVar[RolloutKind | None] = "demonstrations"
    type: str = "expert_labels"
    episodes: int = option(16, "episodes that are played per step, over all ranks", ge=1)
    prompts: int = option(description="observations per step that are trained on, over all ranks", ge=1)
    keep: int = option(4096, "observations that a rank keeps; the oldest are removed first", ge=1)
    _order: Permutation = PrivateAttr()
    _kept: list[Prompt] = PrivateAttr(default_factory=list)  # oldest first

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations", ExpertLabelling}))

    @property
    def rollouts(self) -> int:
        return self.prompts

    def start(self, context: SourceContext) -> None:
        self._context, self._kept, self._order = context, [], Permutation()
        # another order than those of rollouts (seed) and of demonstrations (seed + 1)
        self._order.start(len(context.prompts), context.seed + 2)

    def make(self, fresh: Rollouts) -> Rollouts:
        """Plays new episodes, and returns this rank's share of `prompts` labelled observations, drawn with replacement
        from those that it keeps. Raises UserError if it has none."""
        import torch

        from mmrl.rollouts import DEMONSTRATION

        rank, world = self._context.rank_and_world
        step = self._order.state()["drawn"] // self.episodes
        self._play()
        if not self._kept:
            raise UserError(
                "rollout.extras (expert_labels): the simulator failed in all episodes that were to be labelled; see "
                "the warnings above"
            )
        count = self.prompts // world
        # numbers of the labels among those of the run: their seeds, and distinct group ids
        positions = torch.arange(step * self.prompts, (step + 1) * self.prompts)[rank * count : (rank + 1) * count]
        drawn = random.Random(f"{self._context.seed} {rank} {step}").choices(self._kept, k=count)
        labels: Rollouts = self._context.policy.demonstrate(drawn, positions.tolist())
        labels.group = FIRST_GROUP - positions
        labels.origin = torch.full((count,), DEMONSTRATION)
        return labels

    def _play(self) -> None:
        """Plays this rank's share of the episodes and adds their labelled observations to those that are kept."""
        (rank, world), first = self._context.rank_and_world, self._order.state()["drawn"]
        count = self.episodes // world
        share = slice(rank * count, (rank + 1) * count)
        starts = [self._context.prompts[i] for i in self._order.draw(self.episodes)[share]]
        # an episode's seed is its number in the run
        seeds = list(range(first, first + self.episodes))[share]
        self._kept = [*self._kept, *self._context.policy.label_with_expert(starts, seeds)][-self.keep :]

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)

    def rank_state(self) -> dict[str, Any]:
        return {"kept": [pack(prompt) for prompt in self._kept]}

    def load_rank(self, state: dict[str, Any]) -> None:
        self._kept = [unpack(label) for label in state["kept"]]


def pack(prompt: Prompt) -> dict[str, Any]:
    """Returns a labelled observation as tensors and strings, for a checkpoint."""
    import torch

    observation = prompt.metadata["observation"]
    return {
        "id": prompt.id,
        "text": prompt.text,
        "images": torch.from_numpy(observation.images.copy()),
        "state": torch.from_numpy(observation.state.copy()),
        "cameras": list(observation.cameras),
        "actions": torch.from_numpy(prompt.metadata["actions"].copy()),
    }


def unpack(label: dict[str, Any]) -> Prompt:
    """Returns the prompt that `pack` stored."""
    from mmrl.rollouts import Prompt
    from mmrl.sims import Observation

    images, state = label["images"].numpy(), label["state"].numpy()
    observation = Observation(images, state, [label["text"]], tuple(label["cameras"]))
    return Prompt(
        label["id"], label["text"], metadata={"observation": observation, "actions": label["actions"].numpy()}
    )
