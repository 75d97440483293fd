"""The source of branches: new members of a group that keep the beginning of a response and sample the rest again."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from mmrl.collection.branches.points import BranchPoints, Point, UncertainTokens
from mmrl.collection.extra_sources import ExtraSource, SourceContext
from mmrl.protocols.abilities import ContinuingResponses
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.parts import RolloutKind
    from mmrl.rollouts import Rollouts

SEED_OFFSET = 3 << 30  # added to the run's seed, so that no response is sampled twice
State = tuple[int, int, int]  # (group, node of the last decision that a branch keeps, number of decisions kept)
ENTROPY_BATCH = 8  # rollouts of one forward pass for entropies


class Branches(ExtraSource):
    """The responses of a group branch into a tree: new members keep the beginning of a response and sample the rest
    again. Shared decisions are generated once, and decisions get credit as nodes of the tree. If a group has too few
    points to branch at, whole new responses join it."""

    equation: ClassVar[str] = (
        "`count` members o' = (o_<t, o'_>=t), o'_>=t drawn from pi(. | x, o_<t), at the points (o, t) that `at` ranks "
        "first; a decision that several share is one node, worth the mean of their rewards"
    )
    source: ClassVar[str] = (
        "trees of text: TreePO, arXiv 2508.17445, and ARPO, arXiv 2507.19849; branches of finished responses, in "
        "rounds, where those branch while they generate"
    )
    test: ClassVar[str] = "tests/joints/test_branches.py"

    makes: ClassVar[RolloutKind | None] = "other"
    type: str = "branches"
    count: int = option(4, "branches that join a group", ge=1)
    rounds: int = option(
        1, "rounds in which branches are sampled; from the second round on, branches may branch too", ge=1
    )
    width: int = option(1, "branches per point, besides the response itself", ge=1)
    at: BranchPoints = option(UncertainTokens(), "points at which responses branch")

    @model_validator(mode="after")
    def _check_rounds(self) -> Branches:
        if self.rounds > self.count:
            raise ValueError(
                f"rounds={self.rounds} is more than count={self.count}, so a round would have no branch; lower rounds"
            )
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({ContinuingResponses})) | self.at.needs

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"nodes"})

    @property
    def in_group(self) -> int:
        return self.count

    def start(self, context: SourceContext) -> None:
        super().start(context)
        self.at.start(context.policy)

    def make(self, fresh: Rollouts) -> Rollouts:
        """Samples and returns `count` branches of every group, so that ranks make the same number of forward passes."""
        import torch

        from mmrl.rollouts import Rollouts, fill_in_columns, unshared_nodes

        members = replace(fresh, nodes=unshared_nodes(fresh)) if fresh.nodes is None else fresh
        used: set[State] = set()
        for number in range(self.rounds):
            # the first rounds have one more if `count` is not a multiple of `rounds`
            num_branches = self.count // self.rounds + (number < self.count % self.rounds)
            new = self._sample_branches(members, num_branches, used)
            members = Rollouts.concat([members, fill_in_columns(new, members)])
        return members.select(torch.arange(len(fresh), len(members)))

    def _sample_branches(self, members: Rollouts, num_branches: int, used: set[State]) -> Rollouts:
        """Samples and scores `num_branches` branches of every group. members: the rollouts of all groups so far. used:
        states at which groups have branched before; new ones are added."""
        import torch

        from mmrl.rollouts import EXTRA

        context = self._context
        points, seeds = self._select_points(members, num_branches, used)
        parents = members.select(torch.tensor([row for row, _ in points]))
        new: Rollouts = context.policy.continue_from(parents, [length for _, length in points], seeds)
        new.group, new.prompt, new.version = parents.group, parents.prompt, parents.version
        new.origin = torch.full((len(new),), EXTRA)
        new.rewards = context.task.score(new.samples, new.group)
        new.accuracy = context.task.accuracy(new.samples)
        shared = shared_prefix(parents.mask, torch.tensor([length for _, length in points]), new.mask.shape[1])
        assert parents.nodes is not None
        own_node = (1 << 32) + torch.tensor(seeds)[:, None]  # larger than all row numbers, which are ids of other nodes
        new.nodes = resize_columns(parents.nodes, shared.shape[1]).where(shared, own_node)
        if new.behaviour_logp is not None and parents.behaviour_logp is not None:
            parent_logp = resize_columns(parents.behaviour_logp, shared.shape[1])
            new.behaviour_logp = parent_logp.where(shared, new.behaviour_logp)
        return new

    def _select_points(self, members: Rollouts, num_branches: int, used: set[State]) -> tuple[list[Point], list[int]]:
        """Selects `num_branches` points for each group, with rows of `members`, and the seed of each branch. Where a
        group has too few points, branches keep no decisions. used: as in `_sample_branches`."""
        from mmrl.runtime.seeds import continuation_seeds

        entropy = self._entropy(members)
        seed = self._context.seed + SEED_OFFSET + zlib.crc32(self.key.encode())
        points, seeds = [], []
        for group in members.group.unique().tolist():
            rows = (members.group == group).nonzero().flatten()
            group_members, rng = members.select(rows), random.Random(f"{seed} {group} {len(rows)}")
            ranked = self.at.rank_points(group_members, entropy[rows], rng)
            # -(-a // b) is a / b rounded up: the points that `num_branches` branches need, `width` at each
            selected = take_unused(group_members, ranked, used, -(-num_branches // self.width))
            branches = [(member, length, i) for member, length in selected for i in range(self.width)][:num_branches]
            # Whole new responses. Their numbers were not used in earlier rounds, in which the group had fewer members.
            branches += [(0, 0, len(rows) + i) for i in range(num_branches - len(branches))]
            points += [(int(rows[member]), length) for member, length, _ in branches]
            seeds += [continuation_seeds(seed, group, m, length, i + 1)[i] for m, length, i in branches]
        return points, seeds

    def _entropy(self, members: Rollouts) -> Tensor:
        """Returns the entropy of each decision under the current weights, [rollout, decision]; 0 if the rule `at`
        does not need it."""
        import torch

        if not self.at.reads_entropy:
            return torch.zeros(members.mask.shape)
        policy, parts = self._context.policy, torch.arange(len(members)).split(ENTROPY_BATCH)
        with torch.no_grad():
            replays = [policy.replay(members.select(part), policy.module) for part in parts]
        return torch.cat([replay.entropy.float().cpu() for replay in replays])


def take_unused(members: Rollouts, points: list[Point], used: set[State], max_points: int) -> list[Point]:
    """Returns the first `max_points` points whose state is not in `used`, and adds their states to it. Rollouts with
    the same first decisions have the same states there."""
    assert members.nodes is not None
    selected: list[Point] = []
    for row, length in points:
        if len(selected) == max_points:
            break
        node = int(members.nodes[row][members.mask[row]][length - 1])
        state = (int(members.group[row]), node, length)  # the same for all rollouts that share these decisions
        if state not in used:
            used.add(state)
            selected.append((row, length))
    return selected


def shared_prefix(mask: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Returns a bool mask [rollout, width] of the columns that a branch shares with its parent: those before decision
    lengths[i] of rollout i, including the parent's observations before it. mask: [rollout, column] bool, the parents'
    decisions."""
    import torch
    import torch.nn.functional as F

    prefix = torch.cumsum(mask, 1) <= lengths[:, None]
    return F.pad(prefix[:, :width], (0, max(0, width - mask.shape[1])), value=False)


def resize_columns(values: Tensor, width: int) -> Tensor:
    """Returns values [rollout, column] cut, or padded with 0, to `width` columns."""
    import torch.nn.functional as F

    return F.pad(values[:, :width], (0, max(0, width - values.shape[1])))
