"""Where further rollouts of a step come from, beside those that the policy has just made."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from mmrl.prompts.sampler import Permutation
from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.parts import Source, Task
    from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class SourceContext:
    """What a source may draw on. policy: with every ability that the source needs. share: this rank's number and how
    many ranks there are. most: the largest of a number over the ranks, which all of them ask for alike."""

    policy: Any
    prompts: Source
    task: Task
    seed: int
    share: tuple[int, int]
    most: Callable[[int], int]


class ExtraSource(Choice):
    """Rollouts that are added to each step's fresh ones; as many on every rank.

    They must hold `origin` and `group`: that of a fresh group which they join with their rewards, or an id below 0 that
    no other group has. Rewards that are NaN keep them out of the statistics of groups, and give them the advantage 0.
    An `old_logp` that they bring is kept. `nodes` say which decisions they share with fresh rollouts, whose decisions
    have the id of their row: those of a fork have its parent's as long as they are the same.
    """

    title: ClassVar[str] = "source"
    kinds: ClassVar[dict[str, str]] = {
        "demonstrations": "mmrl.collection.extra_sources:DemonstrationSource",
        "guided_groups": "mmrl.collection.guided_groups:GuidedGroups",
        "guided_prefixes": "mmrl.collection.guided_groups:GuidedPrefixes",
        "extra_rollouts": "mmrl.collection.resampling:ExtraRollouts",
        "self_corrections": "mmrl.collection.self_correction:SelfCorrections",
        "success_replay": "mmrl.collection.replay_buffer:SuccessReplay",
        "self_imitation": "mmrl.collection.replay_buffer:SelfImitation",
    }
    test: ClassVar[str] = "tests/joints/test_collection.py"

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    @abstractmethod
    def rollouts(self) -> int:
        """How many a step gets, over all ranks; 0 where that follows from the groups."""

    @property
    def in_group(self) -> int:
        """How many at most join a fresh group."""
        return 0

    @abstractmethod
    def start(self, context: SourceContext) -> None: ...

    @abstractmethod
    def make(self, fresh: Rollouts) -> Rollouts:
        """This rank's share of them."""

    def observe(self, batch: Batch) -> None:  # noqa: B027  (most sources do not ask)
        """Hears what became of a step's rollouts, after its updates."""

    def state(self) -> dict[str, Any]:
        """Numbers, texts and lists from which `load` goes on, equal on all ranks; later steps do not change them."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027  (many have none)
        """Goes on from a `state`."""

    def own_state(self) -> dict[str, Any]:
        """Tensors, numbers, texts and lists of this rank alone from which `load_own` goes on, on as many ranks."""
        return {}

    def load_own(self, state: dict[str, Any]) -> None:  # noqa: B027  (most have none)
        """Goes on from an `own_state`."""


class ExtraRolloutSources:
    """The further sources of a run, in their order."""

    def __init__(self, settings: Sequence[ExtraSource], context: SourceContext) -> None:
        # Copies, for a default is shared by all configurations of the process.
        self.sources = [source.model_copy(deep=True) for source in settings]
        for source in self.sources:
            source.start(context)

    def joined(self, fresh: Rollouts) -> Rollouts:
        """A step's rollouts with those of every source behind them."""
        import torch

        from mmrl.rollouts import FRESH, Rollouts, alike, with_nodes

        if not self.sources:
            return fresh
        fresh.origin = torch.full((len(fresh),), FRESH)
        added = with_nodes(fresh, [source.make(fresh) for source in self.sources])
        added = [alike(part, fresh) for part in added]
        if fresh.filler is not None:  # a group may teach something, now that it holds more
            joined = torch.cat([part.group for part in added])
            fresh = replace(fresh, filler=fresh.filler & ~torch.isin(fresh.group, joined))
        if any(part.old_logp is not None for part in added):
            fresh = replace(fresh, old_logp=torch.full(fresh.mask.shape, torch.nan))
            added = [alike(part, fresh) for part in added]
        return Rollouts.concat([fresh, *added])

    def observe(self, batch: Batch) -> None:
        for source in self.sources:
            source.observe(batch)

    def state(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(source.state()) for source in self.sources]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        for source, state in zip(self.sources, states, strict=True):
            source.load(state)

    def own_state(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(source.own_state()) for source in self.sources]

    def load_own(self, states: Sequence[dict[str, Any]]) -> None:
        for source, state in zip(self.sources, states, strict=True):
            source.load_own(state)


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


def joining(parts: list[Rollouts], fresh: Rollouts, context: SourceContext) -> Rollouts:
    """Rollouts that join groups, of which there may be another number on each rank: filled up with rollouts of which
    nothing counts, so that all ranks make as many passes of the model."""
    import torch

    from mmrl.rollouts import REPLAYED, Rollouts, alike

    missing = context.most(sum(map(len, parts))) - sum(map(len, parts))
    blank = fresh.select(torch.zeros(missing, dtype=torch.int64))
    blank.mask = torch.zeros_like(blank.mask)
    blank.group = torch.iinfo(torch.int64).min + torch.arange(missing)
    blank.origin = torch.full((missing,), REPLAYED)
    for name in ("rewards", "accuracy"):
        vars(blank)[name] = torch.full_like(vars(blank)[name], torch.nan)
    if any(part.old_logp is not None for part in parts):
        blank.old_logp = torch.full(blank.mask.shape, torch.nan)
    return Rollouts.concat([*(alike(part, blank) for part in parts), blank])
