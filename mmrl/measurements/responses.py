"""Knowledge of the decisions of a response: which they were, how likely a view makes them, where segments lead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmrl.prompts.views import View
from mmrl.protocols.abilities import Continuing, Inverting, Numbered
from mmrl.protocols.measurement import (
    CollectedContext,
    CollectedMeasurement,
    PreparedContext,
    PreparedMeasurement,
    ReplayedContext,
    ReplayedMeasurement,
)
from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Column, DecisionColumn, Replay, Rollouts


@dataclass(frozen=True)
class DecisionNumbers(PreparedMeasurement["DecisionColumn"]):
    """Which number of their list the decisions are, [rollout, decision] int64."""

    requires: ClassVar[type] = Numbered
    cost: ClassVar[str] = ""
    name: ClassVar[str] = "numbers"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        from mmrl.rollouts import DecisionColumn

        return DecisionColumn(context.policy.numbers(rollouts))


@dataclass(frozen=True)
class ViewLikelihoods(PreparedMeasurement["DecisionColumn"]):
    """Log-likelihoods [rollout, decision] under a view of the prompt, by the policy that made the rollouts."""

    view: View
    cost: ClassVar[str] = "a forward pass under every view"

    @property
    def name(self) -> str:
        return f"view {self.view.name}"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"views"})

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        from mmrl.rollouts import DecisionColumn

        return DecisionColumn(context.replayed(context.policy.view(rollouts, self.view.changed), "logp"))


@dataclass(frozen=True)
class ViewReplay(ReplayedMeasurement["Replay"]):
    """What the policy says of the same responses under a view of their prompts, with its gradient."""

    view: View
    cost: ClassVar[str] = "a forward and a backward pass under every view"

    @property
    def name(self) -> str:
        return f"replay {self.view.name}"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"views"})

    def measure(self, micro: Rollouts, context: ReplayedContext) -> Replay:
        found: Replay = context.policy.replay(context.policy.view(micro, self.view.changed), context.engine)
        return found

    def of(self, replay: Replay) -> Replay:
        """What was measured beside this replay."""
        found: Replay = replay.extras[self.name]
        return found


@dataclass(frozen=True)
class PromptLikelihoods(PreparedMeasurement["Column"]):
    """How likely [rollout] the policy finds the prompt where it sees what it made of it, a mean over tokens."""

    requires: ClassVar[type] = Inverting
    cost: ClassVar[str] = "a pass over every image and its prompt"
    name: ClassVar[str] = "inverse"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        import torch

        from mmrl.rollouts import Column

        rows = context.micro_batches
        found = torch.cat([context.policy.inverse(rollouts.select(part)) for part in rows])
        return Column(found[torch.cat(rows).argsort()])


@dataclass(frozen=True)
class SegmentGains(CollectedMeasurement["DecisionColumn"]):
    """What the segment of `every` decisions that a decision belongs to added to the reward that is expected,
    [rollout, decision]: the mean reward of `count` responses that go on anew from the segment's end, less that of its
    beginning; at the beginning of a response it is the mean of its group, at its end its own reward."""

    every: int
    count: int
    requires: ClassVar[type] = Continuing
    cost: ClassVar[str] = "further responses from every edge of a segment, and their rewards"

    @property
    def name(self) -> str:
        return f"continued {self.count} times every {self.every}"

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> DecisionColumn:
        import torch

        from mmrl.core.credit import segment_gains
        from mmrl.rollouts import DecisionColumn

        own = context.rewards(rollouts)
        worth = torch.full((len(rollouts), -(-rollouts.mask.shape[1] // self.every)), torch.nan)
        worth[:, 0] = torch.stack([own[rollouts.group == group].nanmean() for group in rollouts.group])
        lengths = rollouts.mask.sum(1).tolist()
        cuts = [(row, cut) for row, length in enumerate(lengths) for cut in range(self.every, length, self.every)]
        if context.most(len(cuts)):  # ranks may have to generate together
            earned = self._earned(rollouts, cuts or [(0, 0)], context)
            for (row, cut), value in zip(cuts, earned[: len(cuts)], strict=True):
                worth[row, cut // self.every] = value
        return DecisionColumn(segment_gains(worth, own, rollouts.mask, every=self.every))

    def _earned(self, rollouts: Rollouts, cuts: list[tuple[int, int]], context: CollectedContext) -> Tensor:
        """[cut] the mean reward of responses that go on from these decisions of these rows."""
        import torch

        from mmrl.runtime.seeds import continuation_seeds

        rows = torch.tensor([row for row, _ in cuts]).repeat_interleave(self.count)
        members = [int((rollouts.group[:row] == rollouts.group[row]).sum()) for row, _ in cuts]
        seeds = [
            number
            for (row, cut), member in zip(cuts, members, strict=True)
            for number in continuation_seeds(context.seed, int(rollouts.group[row]), member, cut, self.count)
        ]
        places = [cut for _, cut in cuts for _ in range(self.count)]
        made = context.policy.continued(rollouts.select(rows), places, seeds)
        earned = context.earned(made.samples, torch.arange(len(rows)) // self.count)
        return earned.view(-1, self.count).nanmean(1)
