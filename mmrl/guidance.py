"""Demonstrations that take part in the groups of rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PrivateAttr

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.sources import ExtraSource, SourceContext, joining

if TYPE_CHECKING:
    from mmrl.rollouts import Rollouts


class GuidedGroups(ExtraSource):
    """The demonstration of a prompt joins the group of its rollouts and is scored like them, so that a group in which
    all are wrong still says what right is. The surrogate `guided` weighs what such rollouts teach."""

    equation: ClassVar[str] = "A_i of the group G with the prompt's demonstration, scored by the task; origin 1"
    source: ClassVar[str] = "mixed-policy GRPO of LUFFY, arXiv 2504.14945; only where all are wrong: [variant]"
    test: ClassVar[str] = "tests/joints/test_guidance.py"

    type: str = "guided_groups"
    groups: Literal["all", "failed"] = option("all", "failed: only groups none of whose rollouts is right")
    accuracy: float = option(1.0, "of a rollout that counts as right", unit="accuracy")
    _context: Any = PrivateAttr()

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations"}))

    @property
    def rollouts(self) -> int:
        return 0

    @property
    def in_group(self) -> int:
        return 1

    def start(self, context: SourceContext) -> None:
        self._context = context

    def make(self, fresh: Rollouts) -> Rollouts:
        import torch

        from mmrl.rollouts import DEMONSTRATION

        context: SourceContext = self._context
        assert fresh.prompt is not None and fresh.accuracy is not None
        chosen: list[tuple[int, int]] = []
        for group in fresh.group.unique().tolist():
            rows = fresh.group == group
            if self.groups == "all" or not bool((fresh.accuracy[rows] >= self.accuracy).any()):
                chosen.append((group, int(fresh.prompt[rows][0])))
        if not chosen:
            return joining([], fresh, context)
        groups, prompts = (list(column) for column in zip(*chosen, strict=True))
        made = context.policy.demonstrate([context.prompts[prompt] for prompt in prompts], groups)
        made.group, made.prompt = torch.tensor(groups), torch.tensor(prompts)
        made.origin = torch.full((len(groups),), DEMONSTRATION)
        made.rewards = context.task.score(made.samples, made.group)
        made.accuracy = context.task.accuracy(made.samples)
        return joining([made], fresh, context)

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass
