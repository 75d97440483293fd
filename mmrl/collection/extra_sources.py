"""Sources of rollouts that are added to a step's fresh ones."""

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
    from mmrl.protocols.parts import Source, Task
    from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class SourceContext:
    """What a source of rollouts gets at the start of a run.

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
    """Rollouts that are added to each step's fresh ones; as many on every rank. A source of rollouts that join groups
    (`in_group` above 0) is asked in every round of dynamic sampling, before groups are dropped; others once a step.

    They must have `origin` and `group`: that of a fresh group which they join with their rewards, or an id below 0 that
    no other group has. Rollouts with NaN rewards are not in the statistics of groups, and get the advantage 0. Their
    `old_logp`, if any, is kept. `nodes` mark decisions that are shared with fresh rollouts, whose decisions have the id
    of their row: a fork has its parent's ids as long as the decisions are the same.
    """

    title: ClassVar[str] = "source"
    changes: ClassVar[frozenset[str]] = frozenset({"prompts"})  # in a step, by itself
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
        "stored_steps": "mmrl.collection.stored_steps.source:StoredSteps",
    }
    test: ClassVar[str] = "tests/joints/test_collection.py"

    _context: SourceContext = PrivateAttr()

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def offers(self) -> frozenset[Offer]:
        """Returns what the job's rollouts support by it, beside what its model offers."""
        return frozenset()

    @property
    def rollouts(self) -> int:
        """Returns the number of rollouts that a step gets, over all ranks; 0 where it depends on the groups."""
        return 0

    @property
    def in_group(self) -> int:
        """Returns the largest number of rollouts that join a fresh group; above 0 all of the source's rollouts do."""
        return 0

    def start(self, context: SourceContext) -> None:
        """Begins a run, before its first step."""
        self._context = context

    @abstractmethod
    def make(self, fresh: Rollouts) -> Rollouts:
        """Returns this rank's share of the rollouts. fresh: this rank's fresh rollouts, of a round or of the step."""

    def observe(self, batch: Batch) -> None:  # noqa: B027  (most sources need none)
        """Observes a step's batch after its updates."""

    def state(self) -> dict[str, Any]:
        """Returns numbers, strings and lists that `load` restores, equal on all ranks; later steps do not change
        them."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027  (many have none)
        """Restores a `state`."""

    def rank_state(self) -> dict[str, Any]:
        """Returns tensors, numbers, strings and lists of this rank alone, which `load_rank` restores on as many
        ranks."""
        return {}

    def load_rank(self, state: dict[str, Any]) -> None:  # noqa: B027  (most have none)
        """Restores a `rank_state`."""


class ExtraRolloutSources:
    """The extra sources of a run, in their order."""

    def __init__(self, settings: Sequence[ExtraSource], context: SourceContext) -> None:
        # Copies, for a default is shared by all configurations of the process.
        self.sources = [source.model_copy(deep=True) for source in settings]
        self._most = context.max_over_ranks
        for source in self.sources:
            source.start(context)

    def rescued(self, fresh: Rollouts) -> Rollouts:
        """Returns a round's rollouts, followed by those of the sources whose rollouts join groups, not filled up;
        `added` completes what is kept of them."""
        import torch

        joined = self._joined(fresh, [source for source in self.sources if source.in_group])
        if joined is fresh:
            return fresh
        strange = ~torch.isin(joined.group, fresh.group)
        if bool((strange & joined.mask.any(1)).any()):
            raise ValueError(
                "a source of rollouts that join groups (in_group above 0) made some of another group, which "
                "rollout.dynamic_sampling can not judge; make them in a source of their own"
            )
        return joined.select(~strange)

    def added(self, rollouts: Rollouts) -> Rollouts:
        """Returns the rollouts that dynamic sampling kept, fresh ones first, as many on every rank, followed by those
        of the sources whose rollouts join no group."""
        from mmrl.rollouts import FRESH, Rollouts

        if not self.sources:
            return rollouts
        assert rollouts.origin is not None
        rollouts = rollouts.select((rollouts.origin != FRESH).byte().argsort(stable=True))
        missing = self._most(len(rollouts)) - len(rollouts)
        rollouts = Rollouts.concat([rollouts, masked_copies(rollouts, missing)])
        return self._joined(rollouts, [source for source in self.sources if not source.in_group])

    def joined(self, fresh: Rollouts) -> Rollouts:
        """Returns a step's rollouts, followed by those of every source."""
        return self._joined(fresh, self.sources)

    def _joined(self, fresh: Rollouts, sources: Sequence[ExtraSource]) -> Rollouts:
        """Appends the rollouts of each source to the sampled ones, and marks the origin of each rollout."""
        import torch

        from mmrl.rollouts import FRESH, Rollouts, fill_in_columns, fill_in_nodes

        if fresh.origin is None and self.sources:
            fresh.origin = torch.full((len(fresh),), FRESH)
        if not sources:
            return fresh
        added = fill_in_nodes(fresh, [source.make(fresh) for source in sources])
        added = [fill_in_columns(part, fresh) for part in added]
        if any(part.old_logp is not None for part in added):
            fresh = with_old_logp(fresh)
            added = [fill_in_columns(part, fresh) for part in added]
        return Rollouts.concat([fresh, *added])

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

    type: str = "demonstrations"
    prompts: int = option(description="demonstrations a step, over all ranks", ge=1)
    _order: Permutation = PrivateAttr()
    _shown: Source = PrivateAttr()

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"demonstrations"}))

    @property
    def rollouts(self) -> int:
        return self.prompts

    def start(self, context: SourceContext) -> None:
        from mmrl.protocols.parts import get_demonstrations

        self._context, self._order = context, Permutation()
        self._shown = get_demonstrations(context.task, context.prompts)
        self._order.start(len(self._shown), context.seed + 1)

    def make(self, fresh: Rollouts) -> Rollouts:
        import torch

        from mmrl.rollouts import DEMONSTRATION

        context, shown = self._context, self._shown
        rank, world = context.rank_and_world
        first, count = self._order.state()["drawn"], self.prompts // world
        indices = self._order.draw(self.prompts)[rank * count : (rank + 1) * count]
        positions = range(first + rank * count, first + (rank + 1) * count)
        demonstrations = context.policy.demonstrate([shown[i] for i in indices], list(positions))
        demonstrations.group = -1 - torch.tensor(positions)
        demonstrations.origin = torch.full((count,), DEMONSTRATION)
        return demonstrations

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)


def failed_groups(fresh: Rollouts, accuracy: float) -> tuple[list[int], list[int]]:
    """Returns the groups none of whose rollouts is right, and the index of each one's prompt. A group none of whose
    rollouts could be judged has not failed. accuracy: of a rollout that counts as right."""
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
    """Concatenates rollouts that join groups, and fills them up with masked ones to the largest number of any rank, so
    that all ranks make as many passes of the model."""
    from mmrl.rollouts import Rollouts, fill_in_columns

    blank = masked_copies(fresh, context.max_over_ranks(sum(map(len, parts))) - sum(map(len, parts)))
    if any(part.old_logp is not None for part in parts):
        blank = with_old_logp(blank)
    return Rollouts.concat([*(fill_in_columns(part, blank) for part in parts), blank])


def masked_copies(like: Rollouts, count: int) -> Rollouts:
    """Returns `count` rollouts, each a group of its own, of which nothing is learned."""
    import torch

    from mmrl.rollouts import REPLAYED

    blank = like.select(torch.zeros(count, dtype=torch.int64))
    blank.mask = torch.zeros_like(blank.mask)
    blank.group = torch.iinfo(torch.int64).min + torch.arange(count)
    blank.origin = torch.full((count,), REPLAYED)
    for name in ("rewards", "accuracy"):
        vars(blank)[name] = torch.full_like(vars(blank)[name], torch.nan)
    return blank


def with_old_logp(rollouts: Rollouts) -> Rollouts:
    """Returns rollouts with `old_logp`: NaN, for unknown, where they have none."""
    import torch

    if rollouts.old_logp is not None:
        return rollouts
    return replace(rollouts, old_logp=torch.full(rollouts.mask.shape, torch.nan))
