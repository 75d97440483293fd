"""The source of branches: responses that begin as a member of their group does and go on by themselves."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from mmrl.collection.branches.points import BranchPoints, Point, UncertainTokens
from mmrl.collection.extra_sources import ExtraSource
from mmrl.protocols.abilities import ContinuingResponses
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Rollouts

APART = 3 << 30  # added to the run's seed, so that no response is drawn twice
State = tuple[int, int, int]  # a group, the node of the last decision that a branch keeps, and its number
AT_ONCE = 8  # rollouts whose entropies are computed at once


class Branches(ExtraSource):
    """The responses of a group branch into a tree: further members keep the beginning of one and go on by themselves.
    What they share is generated once, and decisions get credit as nodes of the tree. Where a group has too few points
    to branch at, whole new responses join it."""

    equation: ClassVar[str] = (
        "`count` members o' = (o_<t, o'_>=t), o'_>=t drawn from pi(. | x, o_<t), at the points (o, t) that `at` ranks "
        "first; a decision that several share is one node, worth the mean of their rewards"
    )
    source: ClassVar[str] = (
        "trees of text: TreePO, arXiv 2508.17445, and ARPO, arXiv 2507.19849; branches of finished responses, in "
        "rounds, where those branch while they generate"
    )
    test: ClassVar[str] = "tests/joints/test_branches.py"

    type: str = "branches"
    count: int = option(4, "branches that join a group", ge=1)
    rounds: int = option(
        1, "rounds in which branches are sampled; from the second round on, branches may branch too", ge=1
    )
    width: int = option(1, "branches at a point, beside the response itself", ge=1)
    at: BranchPoints = option(UncertainTokens(), "points at which responses branch")

    @model_validator(mode="after")
    def _one_a_round(self) -> Branches:
        if self.rounds > self.count:
            raise ValueError(f"rounds={self.rounds} is more than count={self.count}: a round would have no branch")
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

    def make(self, fresh: Rollouts) -> Rollouts:
        """Makes as many branches for every group, so that all ranks generate and compute entropies together."""
        import torch

        from mmrl.rollouts import Rollouts, fill_in_columns, unshared_nodes

        members = replace(fresh, nodes=unshared_nodes(fresh)) if fresh.nodes is None else fresh
        used: set[State] = set()
        for number in range(self.rounds):
            share = self.count // self.rounds + (number < self.count % self.rounds)
            new = self._grown(members, share, used)
            members = Rollouts.concat([members, fill_in_columns(new, members)])
        return members.select(torch.arange(len(fresh), len(members)))

    def _grown(self, members: Rollouts, share: int, used: set[State]) -> Rollouts:
        """Makes `share` branches of every group, scored."""
        import torch

        from mmrl.rollouts import EXTRA

        context = self._context
        points, seeds = self._chosen(members, share, used)
        parents = members.select(torch.tensor([row for row, _ in points]))
        new: Rollouts = context.policy.continue_from(parents, [length for _, length in points], seeds)
        new.group, new.prompt, new.version = parents.group, parents.prompt, parents.version
        new.origin = torch.full((len(new),), EXTRA)
        new.rewards = context.task.score(new.samples, new.group)
        new.accuracy = context.task.accuracy(new.samples)
        shared = beginnings(parents.mask, torch.tensor([length for _, length in points]), new.mask.shape[1])
        assert parents.nodes is not None
        own = (1 << 32) + torch.tensor(seeds)[:, None]  # above all numbers of rows
        new.nodes = within(parents.nodes, shared.shape[1]).where(shared, own)
        if new.behaviour_logp is not None and parents.behaviour_logp is not None:
            new.behaviour_logp = within(parents.behaviour_logp, shared.shape[1]).where(shared, new.behaviour_logp)
        return new

    def _chosen(self, members: Rollouts, share: int, used: set[State]) -> tuple[list[Point], list[int]]:
        """Returns the points at which groups branch, and the seed of each branch. used: where they did before, to which
        these are added."""
        from mmrl.runtime.seeds import continuation_seeds

        entropy = self._entropy(members)
        seed = self._context.seed + APART + zlib.crc32(self.key.encode())
        points, seeds = [], []
        for group in members.group.unique().tolist():
            rows = (members.group == group).nonzero().flatten()
            own, rng = members.select(rows), random.Random(f"{seed} {group} {len(rows)}")
            chosen = unused(own, self.at.rank_points(own, entropy[rows], rng), used, -(-share // self.width))
            branches = [(member, length, i) for member, length in chosen for i in range(self.width)][:share]
            # Beside those of earlier rounds, which had fewer members
            branches += [(0, 0, len(rows) + i) for i in range(share - len(branches))]
            points += [(int(rows[member]), length) for member, length, _ in branches]
            seeds += [continuation_seeds(seed, group, m, length, i + 1)[i] for m, length, i in branches]
        return points, seeds

    def _entropy(self, members: Rollouts) -> Tensor:
        """Returns the entropy of each decision under the weights that sampled, [rollout, decision]; 0 where `at` does
        not read it."""
        import torch

        if not self.at.reads_entropy:
            return torch.zeros(members.mask.shape)
        policy, parts = self._context.policy, torch.arange(len(members)).split(AT_ONCE)
        with torch.no_grad():
            replays = [policy.replay(members.select(part), policy.module) for part in parts]
        return torch.cat([replay.entropy.float().cpu() for replay in replays])


def unused(members: Rollouts, points: list[Point], used: set[State], most: int) -> list[Point]:
    """Returns the first `most` points that are none of `used`, and adds them to it. Rollouts that begin alike share the
    points of their beginning."""
    assert members.nodes is not None
    chosen: list[Point] = []
    for row, length in points:
        if len(chosen) == most:
            break
        node = int(members.nodes[row][members.mask[row]][length - 1])
        state = (int(members.group[row]), node, length)
        if state not in used:
            used.add(state)
            chosen.append((row, length))
    return chosen


def beginnings(mask: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Returns which of the first `width` columns come before the decision at which a rollout branches, [rollout,
    column] bool: its first lengths[i] decisions, with what it read before the next one. mask: [rollout, column]."""
    import torch
    import torch.nn.functional as F

    before = torch.cumsum(mask, 1) <= lengths[:, None]
    return F.pad(before[:, :width], (0, max(0, width - mask.shape[1])), value=False)


def within(values: Tensor, width: int) -> Tensor:
    """Returns values [rollout, column] cut or padded with 0 to `width` columns."""
    import torch.nn.functional as F

    return F.pad(values[:, :width], (0, max(0, width - values.shape[1])))
