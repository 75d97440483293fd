"""Rounds of dynamic sampling: which groups a step learns from, and on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.engine import Ranks
from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class Candidate:
    """A group that a rank has sampled. teaches: whether anything is learned from it; turn: the round it came in;
    position: the place of its draw."""

    teaches: bool
    turn: int
    position: int

    @property
    def order(self) -> tuple[bool, int, int]:
        """Candidates are taken in this order: those that teach, then the others, each as they were drawn."""
        return (not self.teaches, self.turn, self.position)


class Candidates:
    """The groups that the rounds of a step have brought so far. Ranks that share give each other those they have to
    spare, so that the step has those that one rank alone would have taken, and none waits for a rank without luck."""

    def __init__(self, wanted: int, ranks: Ranks, *, shared: bool) -> None:
        """wanted: groups of a rank's share."""
        self.wanted, self.ranks, self.shared = wanted, ranks, shared and ranks.world > 1
        self.parts: list[Rollouts] = []
        self.candidates: list[Candidate] = []

    def add(self, batch: Rollouts, teaches: Tensor) -> None:
        """teaches: [rollout] bool, equal within a group."""
        turn = len(self.parts)
        for position in dict.fromkeys(batch.group.tolist()):
            self.candidates.append(Candidate(bool(teaches[batch.group == position].any()), turn, position))
        self.parts.append(batch)

    @property
    def full(self) -> bool:
        """Whether all ranks have what they want. A collective."""
        found = sum(candidate.teaches for candidate in self.candidates)
        if self.shared:
            return sum(self.ranks.gather(found)) >= self.wanted * self.ranks.world
        return self.ranks.max(found < self.wanted) == 0

    def taken(self) -> Rollouts:
        """This rank's share, with `filler` where a group that teaches nothing takes a place. A collective."""
        mine = self.ranks.rank if self.shared else 0
        told = self.ranks.gather(self.candidates) if self.shared else [self.candidates]
        dealt_out = dealt(told, self.wanted)
        every = Rollouts.concat(self.parts)
        if self.shared and any(source != rank for rank, own in enumerate(dealt_out) for source, _ in own):
            parcels = [[c.position for s, c in own if s == mine] for own in dealt_out]
            parts = [every.select(_rows(every, positions)) if positions else None for positions in parcels]
            arrived = self.ranks.exchange(parts, instead="rollout.dynamic_sampling.shared=false")
            every = Rollouts.concat([part for part in arrived if part is not None])
        kept = [candidate for _, candidate in dealt_out[mine]]
        found = every.select(_rows(every, [candidate.position for candidate in kept]))
        size = len(found) // len(kept)
        found.filler = torch.tensor([not candidate.teaches for candidate in kept]).repeat_interleave(size)
        return found


def dealt(told: Sequence[Sequence[Candidate]], wanted: int) -> list[list[tuple[int, Candidate]]]:
    """Who has each of the groups that a step takes, and which, for every rank, in the order of candidates.

    told: the candidates of each rank. The first `wanted` for each rank are taken, wherever they are; a rank keeps its
    own as long as it has room, and what is too many goes to the ranks that lack some, in order.
    """
    every = [(rank, candidate) for rank, own in enumerate(told) for candidate in own]
    chosen = sorted(every, key=lambda pair: pair[1].order)[: wanted * len(told)]
    share: list[list[tuple[int, Candidate]]] = [[] for _ in told]
    spare: list[tuple[int, Candidate]] = []
    for rank, candidate in chosen:
        (share[rank] if len(share[rank]) < wanted else spare).append((rank, candidate))
    for own in share:
        room = wanted - len(own)
        own += spare[:room]
        spare = spare[room:]
        own.sort(key=lambda pair: pair[1].order)
    return share


def _rows(rollouts: Rollouts, positions: Sequence[int]) -> Tensor:
    """Those of the groups at these positions, in their order."""
    return torch.cat([(rollouts.group == position).nonzero().flatten() for position in positions])
