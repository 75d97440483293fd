"""Sources of rollouts from demonstrations: whole demonstrations, or responses that continue the beginning of one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from mmrl.collection.extra_sources import ExtraSource, SourceContext, failed_groups, pad_to_all_ranks
from mmrl.errors import UserError
from mmrl.protocols.abilities import ContinuingResponses
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Rollouts


SEED_OFFSET = 1 << 30  # added to the run's seed, so that no response is sampled twice; seeds have 32 bits


class Guidance(ExtraSource):
    """A source whose rollouts are made from the known answer (demonstration) of a group's prompt."""

    test: ClassVar[str] = "tests/joints/test_guidance.py"
    groups: Literal["all", "failed"] = option("all", "failed: only groups none of whose rollouts is right")
    accuracy: float = option(1.0, "smallest accuracy of a right rollout", unit="accuracy")

    def start(self, context: SourceContext) -> None:
        """Raises UserError for a task whose demonstrations answer other prompts than those of its rollouts."""
        from mmrl.protocols.parts import TaskWithDemonstrations

        if isinstance(context.task, TaskWithDemonstrations):
            raise UserError(
                f"rollout.extras ({self.type}) needs a demonstration in the metadata of each prompt, but "
                "task.demonstrations has episodes with other prompts; use type demonstrations or expert_labels"
            )
        self._context = context

    def select_groups(self, fresh: Rollouts) -> tuple[list[int], list[int]]:
        """Returns the ids of the groups that get further rollouts, and the index of each group's prompt."""
        if self.groups == "failed":
            return failed_groups(fresh, self.accuracy)
        assert fresh.prompt is not None
        prompts = dict(zip(fresh.group.tolist(), fresh.prompt.tolist(), strict=True))
        return sorted(prompts), [prompts[group] for group in sorted(prompts)]

    def add_to_groups(self, rollouts: Rollouts, groups: list[int], prompts: list[int], origin: int) -> Rollouts:
        """Scores rollouts and sets their group ids, prompt indices and origin."""
        import torch

        rollouts.group, rollouts.prompt = torch.tensor(groups), torch.tensor(prompts)
        rollouts.origin = torch.full((len(groups),), origin)
        rollouts.rewards = self._context.task.score(rollouts.samples, rollouts.group)
        rollouts.accuracy = self._context.task.accuracy(rollouts.samples)
        return rollouts


class GuidedGroups(Guidance):
    """The demonstration of a prompt joins the group of its rollouts and is scored like them, so that a group in which
    all are wrong has a right one. The surrogate `guided` weights such rollouts."""

    equation: ClassVar[str] = "A_i of the group G with the prompt's demonstration, scored by the task; origin 1"
    source: ClassVar[str] = "mixed-policy GRPO of LUFFY, arXiv 2504.14945; groups=failed is a variant"

    makes: ClassVar[RolloutKind | None] = "demonstrations"
    type: str = "guided_groups"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations"}))

    @property
    def in_group(self) -> int:
        return 1

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns the scored demonstrations of the selected groups' prompts, with the ids of these groups."""
        from mmrl.rollouts import DEMONSTRATION

        context = self._context
        groups, prompts = self.select_groups(fresh)
        if not groups:
            return pad_to_all_ranks([], fresh, context)
        demonstrations = context.policy.demonstrate([context.prompts[prompt] for prompt in prompts], groups)
        return pad_to_all_ranks([self.add_to_groups(demonstrations, groups, prompts, DEMONSTRATION)], fresh, context)


class GuidedPrefixes(Guidance):
    """Responses that begin with a part of their prompt's demonstration and are continued by the policy join its group.
    Each keeps a random share of the demonstration; the kept decisions are trained on only with `learned`."""

    equation: ClassVar[str] = (
        "A_i of the group G with `count` responses that begin with floor(u n) of the demonstration's n decisions, u "
        "even in low .. high; origin 3"
    )
    source: ClassVar[str] = "reconstructed from BREAD, arXiv 2506.17211; learned: after Prefix-RFT, arXiv 2507.01679"

    makes: ClassVar[RolloutKind | None] = "other"
    type: str = "guided_prefixes"
    groups: Literal["all", "failed"] = option("failed", "failed: only groups none of whose rollouts is right")
    count: int = option(2, "responses that join a group", ge=1)
    low: float = option(0.1, "smallest share of the demonstration that is kept", ge=0, lt=1)
    high: float = option(0.9, "largest share of the demonstration that is kept", gt=0, lt=1)
    learned: bool = option(False, "also train on the demonstration's part, with the advantage of the whole response")

    @model_validator(mode="after")
    def _check_range(self) -> GuidedPrefixes:
        if self.low > self.high:
            raise ValueError(
                f"low={self.low} is above high={self.high}, so no share of a demonstration fits; lower low"
            )
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations", ContinuingResponses}))

    @property
    def in_group(self) -> int:
        return self.count

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns for each selected group `count` scored responses that begin with a random share of the prompt's
        demonstration and are continued by the policy."""
        import torch

        from mmrl.rollouts import EXTRA
        from mmrl.runtime.seeds import rollout_seeds

        context = self._context
        groups, prompts = self.select_groups(fresh)
        if context.max_over_ranks(len(groups)) == 0:
            return pad_to_all_ranks([], fresh, context)
        assert fresh.prompt is not None
        # A rank without such groups generates for another one, since ranks may have to generate together.
        targets = groups or [int(fresh.group[0])]
        target_prompts = [context.prompts[prompt] for prompt in prompts or [int(fresh.prompt[0])]]
        repeated = torch.arange(len(targets)).repeat_interleave(self.count)
        demonstrations = context.policy.demonstrate(target_prompts, targets).select(repeated)
        seeds = rollout_seeds(context.seed + SEED_OFFSET, targets, self.count)
        shares = [self.low + (self.high - self.low) * random.Random(seed).random() for seed in seeds]
        lengths = (demonstrations.mask.sum(1) * torch.tensor(shares)).long()
        continued: Rollouts = context.policy.continue_from(demonstrations, lengths.tolist(), seeds)
        if not self.learned:
            continued.mask = continued.mask & (continued.mask.cumsum(1) > lengths[:, None])
        if not groups:
            return pad_to_all_ranks([], fresh, context)
        group_ids, prompt_indices = ([column[i] for i in repeated.tolist()] for column in (groups, prompts))
        return pad_to_all_ranks([self.add_to_groups(continued, group_ids, prompt_indices, EXTRA)], fresh, context)
