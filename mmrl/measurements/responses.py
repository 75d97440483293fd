"""Measurements of the decisions (tokens) of a response: their ids, their log-probabilities under a view of the prompt
(a changed image or text), and the gain in expected reward of each segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from mmrl.protocols.teachers import TaughtTokens

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Column, DecisionColumn, Prompt, Replay, Rollouts


@dataclass(frozen=True)
class DecisionNumbers(PreparedMeasurement["DecisionColumn"]):
    """The index of each decision among its alternatives, such as a token id, [rollout, decision] int64."""

    requires: ClassVar[type] = DiscreteDecisions
    cost: ClassVar[str] = ""
    name: ClassVar[str] = "numbers"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        from mmrl.rollouts import DecisionColumn

        return DecisionColumn(context.policy.decision_ids(rollouts))


@dataclass(frozen=True)
class ViewLikelihoods(PreparedMeasurement["DecisionColumn"]):
    """Log-probabilities [rollout, decision] given a view of the prompt, under the policy that sampled the rollouts."""

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
        """Returns the log-probabilities of the same responses given the view of each prompt, [rollout, decision]."""
        from mmrl.rollouts import DecisionColumn

        viewed = context.policy.view(rollouts, bind_step(self.view, context.step))
        return DecisionColumn(context.replayed(viewed, "logp"))


@dataclass(frozen=True)
class ViewReplay(ReplayedMeasurement["Replay"]):
    """A replay (log-probabilities and other outputs, with gradients) of the same responses to the view of each
    prompt."""

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
        viewed = context.policy.view(micro, bind_step(self.view, context.step))
        replay: Replay = context.policy.replay(viewed, context.engine)
        return replay

    def of(self, replay: Replay) -> Replay:
        """Returns the replay of the viewed prompts, which is stored in `replay`, that of the original prompts."""
        viewed: Replay = replay.extras[self.name]
        return viewed


def bind_step(view: View, step: int) -> Callable[[Prompt], Prompt]:
    """Returns the function that maps a prompt to its view in this training step."""
    return partial(view.changed, step=step)


@dataclass(frozen=True)
class PromptLikelihoods(PreparedMeasurement["Column"]):
    """The mean log-probability [rollout] of the prompt's tokens given the image that the policy generated for it."""

    requires: ClassVar[type] = ScoringPrompts
    cost: ClassVar[str] = "a forward pass over every image and its prompt"
    name: ClassVar[str] = "inverse"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        """Returns the mean log-probability of each prompt's tokens given its image, [rollout]."""
        import torch

        from mmrl.rollouts import Column

        micro_batches = context.micro_batches
        logp = torch.cat([context.policy.prompt_logp(rollouts.select(rows)) for rows in micro_batches])
        return Column(logp[torch.cat(micro_batches).argsort()])  # back in the order of the rollouts


@dataclass(frozen=True)
class SegmentGains(CollectedMeasurement["DecisionColumn"]):
    """The gain in expected reward over the segment of `every` decisions that a decision is in, [rollout, decision].

    The expected reward at the boundary of two segments is the mean reward of `count` responses resampled from there. At
    the beginning of a response it is the mean reward of its group, at the end the reward itself.
    """

    every: int
    count: int
    requires: ClassVar[type] = ContinuingResponses
    cost: ClassVar[str] = "additional responses from every boundary between segments, and their rewards"

    @property
    def name(self) -> str:
        return f"continued {self.count} times every {self.every}"

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> DecisionColumn:
        """Returns the gain in expected reward over each decision's segment, [rollout, decision]; responses are
        resampled from every boundary between segments."""
        import torch

        from mmrl.core.credit import segment_gains
        from mmrl.rollouts import DecisionColumn

        rewards = context.rewards(rollouts)
        max_segments = -(-rollouts.mask.shape[1] // self.every)  # rounded up
        values = torch.full((len(rollouts), max_segments), torch.nan)  # expected reward at each segment's beginning
        values[:, 0] = torch.stack([rewards[rollouts.group == group].nanmean() for group in rollouts.group])
        lengths = rollouts.mask.sum(1).tolist()
        cuts = [(row, cut) for row, length in enumerate(lengths) for cut in range(self.every, length, self.every)]
        if context.max_over_ranks(len(cuts)):  # a rank without cuts resamples too: ranks may have to generate together
            expected = self._expected_rewards(rollouts, cuts or [(0, 0)], context)
            for (row, cut), value in zip(cuts, expected[: len(cuts)], strict=True):
                values[row, cut // self.every] = value
        return DecisionColumn(segment_gains(values, rewards, rollouts.mask, segment_length=self.every))

    def _expected_rewards(self, rollouts: Rollouts, cuts: list[tuple[int, int]], context: CollectedContext) -> Tensor:
        """Returns the mean reward of `count` responses resampled from each cut, [cut]. cuts: (row, decision) pairs."""
        import torch

        from mmrl.runtime.seeds import continuation_seeds

        rows = torch.tensor([row for row, _ in cuts]).repeat_interleave(self.count)
        # the number of a response in its group, by which its continuations get seeds of their own
        members = [int((rollouts.group[:row] == rollouts.group[row]).sum()) for row, _ in cuts]
        seeds: list[int] = []
        for (row, cut), member in zip(cuts, members, strict=True):
            seeds += continuation_seeds(context.seed, int(rollouts.group[row]), member, cut, self.count)
        lengths = [cut for _, cut in cuts for _ in range(self.count)]
        continued = context.policy.continue_from(rollouts.select(rows), lengths, seeds)
        rewards = context.score(continued.samples, torch.arange(len(rows)) // self.count)
        return rewards.view(-1, self.count).nanmean(1)


@dataclass(frozen=True)
class GroupDivergence(PreparedMeasurement["DecisionColumn"]):
    """The divergence of the distributions of a group's rollouts at the same decision, [rollout, decision] (see
    `mmrl.core.credit.divergence_in_group`), under the policy that sampled them.

    block: tokens of the vocabulary whose log-probabilities are stored at once.
    """

    block: int
    requires: ClassVar[type] = TaughtTokens
    cost: ClassVar[str] = (
        "a forward pass for each `block` tokens of the vocabulary, which stores rollouts x decisions x block numbers"
    )
    scores: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "group divergence"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> DecisionColumn:
        """Returns the divergence, [rollout, decision], summed over blocks of the vocabulary, so that the
        log-probabilities of only one block are stored at a time."""
        import torch

        from mmrl.core.credit import divergence_in_group
        from mmrl.protocols.choices import WholeVocabulary
        from mmrl.rollouts import ALTERNATIVES, DecisionColumn

        ids = context.policy.teachers.vocabulary()
        divergence = torch.zeros(rollouts.mask.shape)
        for block_ids in ids.split(self.block):
            listed = WholeVocabulary.from_ids(block_ids, rollouts.mask.shape)
            changed = replace(rollouts, extras={**rollouts.extras, ALTERNATIVES.name: listed})
            logp = context.replayed(changed, ALTERNATIVES.name).float().cpu()
            divergence += divergence_in_group(logp, rollouts.mask, rollouts.group, len(ids))
        return DecisionColumn(divergence)

    def token_weights(self, batch: Batch, max_weight: float) -> Tensor:
        """Returns weights from 1, at the position of the group's smallest divergence, to `max_weight`, at that of the
        largest; [rollout, decision]."""
        from mmrl.core.credit import scale_within_group

        rollouts = batch.rollouts
        scaled = scale_within_group(batch.measured(self).values, rollouts.mask, rollouts.group)
        return 1 + (max_weight - 1) * scaled
