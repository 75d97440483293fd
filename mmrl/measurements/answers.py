"""Measurements from additional responses to the prompts of a step: greedy responses, responses to a view of the prompt
(a changed image or text), or responses of the reference policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmrl.prompts.views import View
from mmrl.protocols.measurement import CollectedContext, CollectedMeasurement, PreparedContext, PreparedMeasurement
from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Column, FurtherResponses, Prompt, Rollouts


@dataclass(frozen=True)
class GreedyRewards(CollectedMeasurement["Column"]):
    """Rewards [rollout, component] of a greedy response to the rollout's prompt, which is not trained on."""

    cost: ClassVar[str] = "one more response per prompt"
    name: ClassVar[str] = "greedy"

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> Column:
        """Returns the rewards of one greedy response to each group's prompt, repeated for its rollouts, [rollout,
        component]."""
        import torch

        from mmrl.rollouts import Column

        prompts, _, member = grouped_prompts(rollouts)
        # greedy decoding (evaluation.temperature is 0) does not depend on the seeds
        answers = context.sampling.respond(prompts, [0] * len(prompts))
        return Column(context.task.score(answers, torch.arange(len(prompts)))[member])


@dataclass(frozen=True)
class ViewAnswers(CollectedMeasurement["FurtherResponses"]):
    """Responses to a view of each prompt, `group_size` per prompt, and their mean accuracy."""

    view: View
    cost: ClassVar[str] = "as many further responses under each view as the step has"

    @property
    def name(self) -> str:
        return f"answers {self.view.name}"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"views"})

    def check_prompt(self, prompt: Prompt) -> None:
        self.view.check(prompt)

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> FurtherResponses:
        """Samples `group_size` responses to the view of each group's prompt. Returns their mean accuracy [rollout] and
        their texts, repeated for the group's rollouts."""
        from mmrl.rollouts import FurtherResponses
        from mmrl.runtime.seeds import rollout_seeds

        prompts, groups, member = grouped_prompts(rollouts)
        size = context.group_size
        changed = [self.view.changed(prompt, context.step) for prompt in prompts]
        seeds = rollout_seeds(context.seed, groups, size)
        samples = context.sampling.rollout(changed, size, seeds, step=context.step).samples
        accuracy = context.task.accuracy(samples).view(-1, size).nanmean(1)
        # samples are ordered by prompt, `size` for each
        responses = [[sample.response for sample in samples[g * size : (g + 1) * size]] for g in range(len(groups))]
        return FurtherResponses(accuracy[member], [responses[g] for g in member.tolist()])


@dataclass(frozen=True)
class ReferenceRewards(PreparedMeasurement["Column"]):
    """The reward [rollout] of a response of the reference policy to the rollout's prompt; NaN if unknown."""

    cost: ClassVar[str] = "a response of the reference policy to each prompt, and its reward"
    name: ClassVar[str] = "reference_reward"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"reference_rollouts"})

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        """Returns the reward of one response of the reference policy to each group's prompt, repeated for its rollouts,
        [rollout]."""
        import torch

        from mmrl.rollouts import Column
        from mmrl.runtime.seeds import reference_seeds

        prompts, groups, member = grouped_prompts(rollouts)
        # every rank generates for as many prompts as the rank with most: ranks may have to generate together
        num_prompts = context.max_over_ranks(len(groups))
        indices = [i % len(groups) for i in range(num_prompts)]
        with context.weights("reference"):
            seeds = reference_seeds(context.seed, [groups[i] for i in indices])
            reference = context.policy.rollout([prompts[i] for i in indices], 1, seeds, step=context.step)
        return Column(context.score(reference.samples, torch.arange(num_prompts))[member])


def grouped_prompts(rollouts: Rollouts) -> tuple[list[Prompt], list[int], Tensor]:
    """Returns the prompt of each group, the groups' ids in rising order, and for each rollout the index of its group
    among these, [rollout] int64."""
    groups, member = rollouts.group.unique(return_inverse=True)
    first_rows = [int((member == g).nonzero()[0]) for g in range(len(groups))]
    return [rollouts.samples[row].prompt for row in first_rows], groups.tolist(), member
