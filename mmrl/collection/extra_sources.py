"""Sources of extra rollouts (`rollout.extras`), which are added to the freshly sampled rollouts of a step."""

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
    from pathlib import Path

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.offers import Offer
    from mmrl.protocols.parts import RolloutKind, Source, Task
    from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class SourceContext:
    """Objects and numbers that a source of rollouts receives at the start of a run.

    policy: has every ability that the source needs. prompts: the task's training prompts. rank_and_world: this rank's
    number, and the number of ranks. max_over_ranks: the maximum of a number over the ranks, a collective. folder: the
    run directory. checkpoints: the number of checkpoints that the run keeps; they may refer to files of a source.
    """

    policy: Any
    prompts: Source
    task: Task
    seed: int
    rank_and_world: tuple[int, int]
    max_over_ranks: Callable[[int], int]
    folder: Path
    checkpoints: int


class ExtraSource(Choice):
    """A source of rollouts that are added to the fresh ones of each step; every rank gets the same number.

    A source whose rollouts join groups (`in_group` above 0) is called in every round of dynamic sampling, before groups
    without signal are dropped; others are called once a step.

    The rollouts must set `origin` and `group`: the id of a fresh group that they join with their rewards, or a negative
    id that no other group has. Rollouts with NaN rewards do not count in the statistics of groups and get the advantage
    0. `old_logp` is kept if it is set. `nodes` says which decisions are shared with fresh rollouts: those of a fresh
    rollout have its row as node id, and a branch has the ids of its parent for the decisions that it shares.
    """

    title: ClassVar[str] = "source"
    changes: ClassVar[frozenset[str]] = frozenset({"prompts"})  # what a source changes in a step
    kinds: ClassVar[dict[str, str]] = {
        "branches": "mmrl.collection.branches.source:Branches",
        "demonstrations": "mmrl.collection.extra_sources:DemonstrationSource",
        "expert_labels": "mmrl.collection.expert_labels:ExpertLabels",
        "guided_groups": "mmrl.collection.guided_groups:GuidedGroups",
        "guided_prefixes": "mmrl.collection.guided_groups:GuidedPrefixes",
        "extra_rollouts": "mmrl.collection.resampling:ExtraRollouts",
        "self_corrections": "mmrl.collection.self_correction:SelfCorrections",
        "success_replay": "mmrl.collection.replay_buffer:SuccessReplay",
        "self_imitation": "mmrl.collection.replay_buffer:SelfImitation",
        "advantage_replay": "mmrl.collection.replay_buffer:AdvantageReplay",
        "stored_steps": "mmrl.collection.stored_steps.source:StoredSteps",
        "action_proposals": "mmrl.collection.stored_steps.proposals:ActionProposals",
    }
    test: ClassVar[str] = "tests/joints/test_collection.py"
    makes: ClassVar[RolloutKind | None] = None  # the kind of its rollouts; None: not declared

    _context: SourceContext = PrivateAttr()

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def offers(self) -> frozenset[Offer]:
        """Returns the keys of `OFFERS` that rollouts support because of this source, beyond those of the policy."""
        return frozenset()

    @property
    def rollouts(self) -> int:
        """Returns the number of rollouts that a step gets, over all ranks; 0 where it depends on the groups."""
        return 0

    @property
    def divided(self) -> int:
        """Returns the number that is divided among the ranks, so it must be a multiple of their number."""
        return self.rollouts

    @property
    def in_group(self) -> int:
        """Returns the largest number of rollouts that join a fresh group; 0 where the rollouts join no group."""
        return 0

    def start(self, context: SourceContext) -> None:
        """Receives what the source needs, before the first step of a run."""
        self._context = context

    @abstractmethod
    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns this rank's share of the source's rollouts. fresh: this rank's fresh rollouts, of a round of dynamic
        sampling or of the step."""

    def observe(self, batch: Batch) -> None:  # noqa: B027  (most sources need none)
        """Receives a step's batch after the updates on it."""

    def state(self) -> dict[str, Any]:
        """Returns the state that is equal on all ranks, as numbers, strings and lists; `load` restores it."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027  (many have none)
        """Restores a `state`."""

    def rank_state(self) -> dict[str, Any]:
        """Returns the state of this rank, as tensors, numbers, strings and lists. `load_rank` restores it in a run with
        the same number of ranks."""
        return {}

    def load_rank(self, state: dict[str, Any]) -> None:  # noqa: B027  (most have none)
        """Restores a `rank_state`."""


class ExtraRolloutSources:
    """The extra sources of a run, in their order."""

    def __init__(self, settings: Sequence[ExtraSource], context: SourceContext) -> None:
        # Copies, for a default is shared by all configurations of the process.
        self.sources = [source.model_copy(deep=True) for source in settings]
        self._max_over_ranks = context.max_over_ranks
        for source in self.sources:
            source.start(context)

    def add_to_groups(self, fresh: Rollouts) -> Rollouts:
        """Returns a round's fresh rollouts, followed by those of the sources whose rollouts join groups. Masked copies
        that only make ranks equal are removed; `add_separate` adds new ones for the rollouts that are kept."""
        import torch

        joined = self._add(fresh, [source for source in self.sources if source.in_group])
        if joined is fresh:
            return fresh
        no_fresh_group = ~torch.isin(joined.group, fresh.group)
        if bool((no_fresh_group & joined.mask.any(1)).any()):
            raise ValueError(
                "a source of rollouts that join groups (in_group above 0) made rollouts of another group, which "
                "rollout.dynamic_sampling cannot filter; return them from a source with in_group 0"
            )
        return joined.select(~no_fresh_group)

    def add_separate(self, rollouts: Rollouts) -> Rollouts:
        """Returns the rollouts that dynamic sampling kept, fresh ones first, followed by those of the sources whose
        rollouts join no group. A rank with fewer rollouts than another one gets masked copies in addition."""
        from mmrl.rollouts import FRESH, Rollouts

        if not self.sources:
            return rollouts
        assert rollouts.origin is not None
        rollouts = rollouts.select((rollouts.origin != FRESH).byte().argsort(stable=True))
        missing = self._max_over_ranks(len(rollouts)) - len(rollouts)
        rollouts = Rollouts.concat([rollouts, masked_copies(rollouts, missing)])
        return self._add(rollouts, [source for source in self.sources if not source.in_group])

    def add_all(self, fresh: Rollouts) -> Rollouts:
        """Returns a step's fresh rollouts, followed by those of every source."""
        return self._add(fresh, self.sources)

    def _add(self, fresh: Rollouts, sources: Sequence[ExtraSource]) -> Rollouts:
        """Returns fresh rollouts, with `origin` set to FRESH, followed by those of `sources`."""
        import torch

        from mmrl.rollouts import FRESH, Rollouts, fill_in_columns, fill_in_nodes

        if fresh.origin is None and self.sources:
            fresh.origin = torch.full((len(fresh),), FRESH)
        if not sources:
            return fresh
        added = fill_in_nodes(fresh, [source.make(fresh) for source in sources])
        if any(part.old_logp is not None for part in added):
            fresh = with_old_logp(fresh)
        fresh = with_records(fresh, added)
        return Rollouts.concat([fresh, *(fill_in_columns(part, fresh) for part in added)])

    def observe(self, batch: Batch) -> None:
        for source in self.sources:
            source.observe(batch)

    def state(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(source.state()) for source in self.sources]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        for source, state in zip(self.sources, states, strict=True):
            source.load(state)

    def rank_state(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(source.rank_state()) for source in self.sources]

    def load_rank(self, states: Sequence[dict[str, Any]]) -> None:
        for source, state in zip(self.sources, states, strict=True):
            source.load_rank(state)


class DemonstrationSource(ExtraSource):
    """Known answers to prompts of the task, or an expert's actions (task.demonstrations), for a loss term such as
    `likelihood`."""

    equation: ClassVar[str] = "rollouts of origin 1, without rewards"
    source: ClassVar[str] = "demonstrations beside rollouts, as in LUFFY, arXiv 2504.14945"

    makes: ClassVar[RolloutKind | None] = "demonstrations"
    type: str = "demonstrations"
    prompts: int = option(description="demonstrations per step, over all ranks", ge=1)
    _order: Permutation = PrivateAttr()
    _demonstrations: Source = PrivateAttr()

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations"}))

    @property
    def rollouts(self) -> int:
        return self.prompts

    def start(self, context: SourceContext) -> None:
        from mmrl.protocols.parts import get_demonstrations

        self._context, self._order = context, Permutation()
        self._demonstrations = get_demonstrations(context.task, context.prompts)
        self._order.start(len(self._demonstrations), context.seed + 1)  # another order than that of the rollouts

    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns this rank's share of the next `prompts` demonstrations, each in a group of its own."""
        import torch

        from mmrl.rollouts import DEMONSTRATION

        context, prompts = self._context, self._demonstrations
        rank, world = context.rank_and_world
        first, count = self._order.state()["drawn"], self.prompts // world
        indices = self._order.draw(self.prompts)[rank * count : (rank + 1) * count]
        positions = range(first + rank * count, first + (rank + 1) * count)
        demonstrations = context.policy.demonstrate([prompts[i] for i in indices], list(positions))
        demonstrations.group = -1 - torch.tensor(positions)  # negative, unlike the ids of fresh groups
        demonstrations.origin = torch.full((count,), DEMONSTRATION)
        return demonstrations

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)


def failed_groups(fresh: Rollouts, accuracy: float) -> tuple[list[int], list[int]]:
    """Returns the ids of the groups without a correct rollout, and the index of each group's prompt. Groups in which no
    rollout has a known accuracy are left out. accuracy: smallest accuracy of a correct rollout."""
    assert fresh.prompt is not None and fresh.accuracy is not None
    groups, prompts = [], []
    for group in fresh.group.unique().tolist():
        rows = fresh.group == group
        known = fresh.accuracy[rows][~fresh.accuracy[rows].isnan()]
        if len(known) and not bool((known >= accuracy).any()):
            groups.append(group)
            prompts.append(int(fresh.prompt[rows][0]))
    return groups, prompts


def pad_to_all_ranks(parts: list[Rollouts], fresh: Rollouts, context: SourceContext) -> Rollouts:
    """Concatenates `parts`, rollouts that join groups, and masked copies of a fresh rollout, so that all ranks have the
    same number of rollouts and make the same number of forward passes. A collective."""
    from mmrl.rollouts import Rollouts, fill_in_columns

    padding = masked_copies(fresh, context.max_over_ranks(sum(map(len, parts))) - sum(map(len, parts)))
    if any(part.old_logp is not None for part in parts):
        padding = with_old_logp(padding)
    return Rollouts.concat([*(fill_in_columns(part, padding) for part in parts), padding])


def masked_copies(rollouts: Rollouts, count: int) -> Rollouts:
    """Returns `count` copies of the first rollout without rewards, with all decisions masked, each in its own group.
    They add nothing to the loss."""
    import torch

    from mmrl.rollouts import REPLAYED

    copies = rollouts.select(torch.zeros(count, dtype=torch.int64))
    copies.mask = torch.zeros_like(copies.mask)
    copies.group = torch.iinfo(torch.int64).min + torch.arange(count)  # ids that no other group has
    copies.origin = torch.full((count,), REPLAYED)
    for name in ("rewards", "accuracy"):
        vars(copies)[name] = torch.full_like(vars(copies)[name], torch.nan)
    return copies


def with_old_logp(rollouts: Rollouts) -> Rollouts:
    """Returns rollouts whose `old_logp` is set: to NaN (unknown) where it was None."""
    import torch

    if rollouts.old_logp is not None:
        return rollouts
    return replace(rollouts, old_logp=torch.full(rollouts.mask.shape, torch.nan))


def with_records(rollouts: Rollouts, parts: Sequence[Rollouts]) -> Rollouts:
    """Returns rollouts with a blank record for each record of `extras` that one of `parts` has and they lack."""
    from mmrl.rollouts import Extra

    records = {name: record for part in parts for name, record in part.extras.items() if isinstance(record, Extra)}
    return replace(
        rollouts, extras={name: record.blank(rollouts) for name, record in records.items()} | rollouts.extras
    )
