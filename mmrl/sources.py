"""Where further rollouts of a step come from, beside those that the policy has just made."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from mmrl.needs import Needs
from mmrl.prompt_samplers import Permutation
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from mmrl.protocols import Policy, Source
    from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class SourceContext:
    """What a source may draw on. share: this rank's number and how many ranks there are."""

    policy: Policy
    prompts: Source
    seed: int
    share: tuple[int, int]


class ExtraSource(Choice):
    """Rollouts that are added to each step's fresh ones. They must hold `origin` and `group`, with ids below 0 that no
    other group has; rewards that are NaN keep them out of the statistics of groups, and give them the advantage 0.
    An `old_logp` that they bring is kept."""

    title: ClassVar[str] = "source"
    kinds: ClassVar[dict[str, str]] = {"demonstrations": "mmrl.sources:DemonstrationSource"}
    test: ClassVar[str] = "tests/joints/test_collection.py"

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    @abstractmethod
    def rollouts(self) -> int:
        """How many a step gets, over all ranks."""

    @abstractmethod
    def start(self, context: SourceContext) -> None: ...

    @abstractmethod
    def make(self, fresh: Rollouts) -> Rollouts:
        """This rank's share of them."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Numbers, lists and tensors from which `load` goes on; later steps do not change them."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None: ...


class DemonstrationSource(ExtraSource):
    """Known answers to prompts of the task, for a loss term such as `likelihood`."""

    equation: ClassVar[str] = "rollouts of origin 1, without rewards"
    source: ClassVar[str] = "demonstrations beside rollouts, as in LUFFY, arXiv 2504.14945"

    type: str = "demonstrations"
    prompts: int = option(description="demonstrations a step, over all ranks", ge=1)
    _order: Permutation = PrivateAttr()
    _context: Any = PrivateAttr()

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations"}))

    @property
    def rollouts(self) -> int:
        return self.prompts

    def start(self, context: SourceContext) -> None:
        self._context, self._order = context, Permutation()
        self._order.start(len(context.prompts), context.seed + 1)

    def make(self, fresh: Rollouts) -> Rollouts:
        import torch

        from mmrl.rollouts import DEMONSTRATION

        context: SourceContext = self._context
        rank, world = context.share
        first, own = self._order.state()["drawn"], self.prompts // world
        indices = self._order.draw(self.prompts)[rank * own : (rank + 1) * own]
        places = range(first + rank * own, first + (rank + 1) * own)
        made = context.policy.demonstrate([context.prompts[i] for i in indices], list(places))
        made.group = -1 - torch.tensor(places)
        made.origin = torch.full((own,), DEMONSTRATION)
        return made

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)
