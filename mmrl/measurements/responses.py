"""Measurements of the decisions of a response: their indices, their log-probabilities under a view, gains of
segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from mmrl.prompts.views import View
from mmrl.protocols.abilities import ContinuingResponses, DiscreteDecisions, ScoringPrompts
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

    from mmrl.rollouts import Column, DecisionColumn, Prompt, Replay, Rollouts


@dataclass(frozen=True)
class DecisionNumbers(PreparedMeasurement["DecisionColumn"]):
    """The index of each decision in its list, such as a token id, [rollout, decision] int64."""

    requires: ClassVar[type] = DiscreteDecisions
    cost: ClassVar[str] = ""
    name: ClassVar[str] = "numbers"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        from mmrl.rollouts import DecisionColumn

        return DecisionColumn(context.policy.decision_ids(rollouts))


@dataclass(frozen=True)
class ViewLikelihoods(PreparedMeasurement["DecisionColumn"]):
    """Log-probabilities [rollout, decision] under a view of the prompt, by the policy that sampled."""

    view: View
    cost: ClassVar[str] = "a forward pass under every view"
    scores: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"view {self.view.name}"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"views"})

    def check_prompt(self, prompt: Prompt) -> None:
        self.view.check(prompt)

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        from mmrl.rollouts import DecisionColumn

        return DecisionColumn(context.replayed(context.policy.view(rollouts, under(self.view, context.step)), "logp"))


@dataclass(frozen=True)
class ViewReplay(ReplayedMeasurement["Replay"]):
    """A replay of the same responses under a view of their prompts, with its gradient."""

    view: View
    cost: ClassVar[str] = "a forward and a backward pass under every view"

    @property
    def name(self) -> str:
        return f"replay {self.view.name}"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"views"})

    def check_prompt(self, prompt: Prompt) -> None:
        self.view.check(prompt)

    def measure(self, micro: Rollouts, context: ReplayedContext) -> Replay:
        viewed = context.policy.view(micro, under(self.view, context.step))
        replay: Replay = context.policy.replay(viewed, context.engine)
        return replay

    def of(self, replay: Replay) -> Replay:
        """Returns the replay under the view that was computed beside this replay."""
        viewed: Replay = replay.extras[self.name]
        return viewed


def under(view: View, step: int) -> Callable[[Prompt], Prompt]:
    """Returns the change of prompts under a view of a step."""
    return partial(view.changed, step=step)


@dataclass(frozen=True)
class PromptLikelihoods(PreparedMeasurement["Column"]):
    """The mean log-probability [rollout] of the prompt's tokens given the image that the policy made of it."""

    requires: ClassVar[type] = ScoringPrompts
    cost: ClassVar[str] = "a pass over every image and its prompt"
    name: ClassVar[str] = "inverse"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        import torch

        from mmrl.rollouts import Column

        rows = context.micro_batches
        logp = torch.cat([context.policy.prompt_logp(rollouts.select(part)) for part in rows])
        return Column(logp[torch.cat(rows).argsort()])


@dataclass(frozen=True)
class SegmentGains(CollectedMeasurement["DecisionColumn"]):
    """The gain in expected reward of the segment of `every` decisions that a decision belongs to, [rollout, decision]:
    the mean reward of `count` responses that are resampled from the segment's end, less that from its beginning. The
    expected reward at the beginning of a response is the mean of its group, at the end the reward itself."""

    every: int
    count: int
    requires: ClassVar[type] = ContinuingResponses
    cost: ClassVar[str] = "further responses from every edge of a segment, and their rewards"

    @property
    def name(self) -> str:
        return f"continued {self.count} times every {self.every}"

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> DecisionColumn:
        import torch

        from mmrl.core.credit import segment_gains
        from mmrl.rollouts import DecisionColumn

        rewards = context.rewards(rollouts)
        worth = torch.full((len(rollouts), -(-rollouts.mask.shape[1] // self.every)), torch.nan)
        worth[:, 0] = torch.stack([rewards[rollouts.group == group].nanmean() for group in rollouts.group])
        lengths = rollouts.mask.sum(1).tolist()
        cuts = [(row, cut) for row, length in enumerate(lengths) for cut in range(self.every, length, self.every)]
        if context.max_over_ranks(len(cuts)):  # ranks may have to generate together
            earned = self._earned(rollouts, cuts or [(0, 0)], context)
            for (row, cut), value in zip(cuts, earned[: len(cuts)], strict=True):
                worth[row, cut // self.every] = value
        return DecisionColumn(segment_gains(worth, rewards, rollouts.mask, every=self.every))

    def _earned(self, rollouts: Rollouts, cuts: list[tuple[int, int]], context: CollectedContext) -> Tensor:
        """Returns the mean reward of responses that are resampled from these decisions of these rows, [cut]."""
        import torch

        from mmrl.runtime.seeds import continuation_seeds

        rows = torch.tensor([row for row, _ in cuts]).repeat_interleave(self.count)
        members = [int((rollouts.group[:row] == rollouts.group[row]).sum()) for row, _ in cuts]
        seeds = [
            number
            for (row, cut), member in zip(cuts, members, strict=True)
            for number in continuation_seeds(context.seed, int(rollouts.group[row]), member, cut, self.count)
        ]
        lengths = [cut for _, cut in cuts for _ in range(self.count)]
        continued = context.policy.continue_from(rollouts.select(rows), lengths, seeds)
        earned = context.score(continued.samples, torch.arange(len(rows)) // self.count)
        return earned.view(-1, self.count).nanmean(1)
