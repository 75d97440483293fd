"""Demonstrations that take part in the groups of rollouts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr, model_validator

from mmrl.collection.extra_sources import ExtraSource, SourceContext, joining
from mmrl.protocols.abilities import Continuing
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from mmrl.rollouts import Rollouts


APART = 1 << 30  # added to the run's seed, so that no response is drawn twice; a seed is a word of 32 bits


class Guidance(ExtraSource):
    """What joins groups is made of the demonstration of their prompt."""

    test: ClassVar[str] = "tests/joints/test_guidance.py"
    groups: Literal["all", "failed"] = option("all", "failed: only groups none of whose rollouts is right")
    accuracy: float = option(1.0, "of a rollout that counts as right", unit="accuracy")
    _context: Any = PrivateAttr()

    @property
    def rollouts(self) -> int:
        return 0

    def start(self, context: SourceContext) -> None:
        self._context = context

    def chosen(self, fresh: Rollouts) -> tuple[list[int], list[int]]:
        """Groups that get something, and their prompts."""
        assert fresh.prompt is not None and fresh.accuracy is not None
        groups, prompts = [], []
        for group in fresh.group.unique().tolist():
            rows = fresh.group == group
            if self.groups == "all" or not bool((fresh.accuracy[rows] >= self.accuracy).any()):
                groups.append(group)
                prompts.append(int(fresh.prompt[rows][0]))
        return groups, prompts

    def joined(self, made: Rollouts, groups: list[int], prompts: list[int], origin: int) -> Rollouts:
        """`made`, scored, as members of groups."""
        import torch

        made.group, made.prompt = torch.tensor(groups), torch.tensor(prompts)
        made.origin = torch.full((len(groups),), origin)
        made.rewards = self._context.task.score(made.samples, made.group)
        made.accuracy = self._context.task.accuracy(made.samples)
        return made


class GuidedGroups(Guidance):
    """The demonstration of a prompt joins the group of its rollouts and is scored like them, so that a group in which
    all are wrong still says what right is. The surrogate `guided` weighs what such rollouts teach."""

    equation: ClassVar[str] = "A_i of the group G with the prompt's demonstration, scored by the task; origin 1"
    source: ClassVar[str] = "mixed-policy GRPO of LUFFY, arXiv 2504.14945; groups=failed is a variant"

    type: str = "guided_groups"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations"}))

    @property
    def in_group(self) -> int:
        return 1

    def make(self, fresh: Rollouts) -> Rollouts:
        from mmrl.rollouts import DEMONSTRATION

        context: SourceContext = self._context
        groups, prompts = self.chosen(fresh)
        if not groups:
            return joining([], fresh, context)
        made = context.policy.demonstrate([context.prompts[prompt] for prompt in prompts], groups)
        return joining([self.joined(made, groups, prompts, DEMONSTRATION)], fresh, context)


class GuidedPrefixes(Guidance):
    """Responses that begin as the demonstration of their prompt does, and go on as the policy likes, join its group.
    Each has another share of the demonstration; the beginning is not learned from unless that is asked for."""

    equation: ClassVar[str] = (
        "A_i of the group G with `count` responses that begin with floor(u n) of the demonstration's n decisions, u "
        "even in low .. high; origin 3"
    )
    source: ClassVar[str] = "reconstructed from BREAD, arXiv 2506.17211; learned: after Prefix-RFT, arXiv 2507.01679"

    type: str = "guided_prefixes"
    groups: Literal["all", "failed"] = option("failed", "failed: only groups none of whose rollouts is right")
    count: int = option(2, "such responses that join a group", ge=1)
    low: float = option(0.1, "least share of the demonstration", ge=0, lt=1)
    high: float = option(0.9, "largest share of the demonstration", gt=0, lt=1)
    learned: bool = option(False, "the beginning is learned from as well, with the advantage of what came of it")

    @model_validator(mode="after")
    def _rises(self) -> GuidedPrefixes:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: no share of a demonstration is left")
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations", Continuing}))

    @property
    def in_group(self) -> int:
        return self.count

    def make(self, fresh: Rollouts) -> Rollouts:
        import torch

        from mmrl.rollouts import EXTRA
        from mmrl.runtime.seeds import rollout_seeds

        context: SourceContext = self._context
        groups, prompts = self.chosen(fresh)
        if context.most(len(groups)) == 0:
            return joining([], fresh, context)
        assert fresh.prompt is not None
        asked = groups or [int(fresh.group[0])]  # ranks may have to generate together
        shown = [context.prompts[prompt] for prompt in prompts or [int(fresh.prompt[0])]]
        each = torch.arange(len(asked)).repeat_interleave(self.count)
        known = context.policy.demonstrate(shown, asked).select(each)
        seeds = rollout_seeds(context.seed + APART, asked, self.count)
        shares = [self.low + (self.high - self.low) * random.Random(number).random() for number in seeds]
        lengths = (known.mask.sum(1) * torch.tensor(shares)).long()
        made: Rollouts = context.policy.continued(known, lengths.tolist(), seeds)
        if not self.learned:
            made.mask = made.mask & (torch.arange(made.mask.shape[1]) >= lengths[:, None])
        if not groups:
            return joining([], fresh, context)
        each_group, each_prompt = ([column[i] for i in each.tolist()] for column in (groups, prompts))
        return joining([self.joined(made, each_group, each_prompt, EXTRA)], fresh, context)
