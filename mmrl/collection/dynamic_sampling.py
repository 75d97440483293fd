"""Selection of groups in dynamic sampling, and their distribution over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.collection.extra_sources import with_old_logp
from mmrl.engine import Ranks
from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class Candidate:
    """A group that a rank has sampled. teaches: whether it is informative; turn: the round in which it was sampled;
    position: that of its draw."""

    teaches: bool
    turn: int
    position: int

    @property
    def order(self) -> tuple[bool, int, int]:
        """Returns the key by which candidates are taken: those that teach, then the others, each in the order of
        draw."""
        return (not self.teaches, self.turn, self.position)


class Candidates:
    """The groups that the rounds of a step have sampled so far. With `shared` ranks exchange groups, so that the step
    has those that one rank alone would have taken, and no rank waits for one with few informative groups."""

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
        """Returns whether all ranks have as many informative groups as wanted. A collective."""
        count = sum(candidate.teaches for candidate in self.candidates)
        if self.shared:
            return sum(self.ranks.gather(count)) >= self.wanted * self.ranks.world
        return self.ranks.max(count < self.wanted) == 0

    def taken(self) -> Rollouts:
        """Returns this rank's share, with `filler` True for uninformative groups. A collective."""
        rank_index = self.ranks.rank if self.shared else 0
        by_rank = self.ranks.gather(self.candidates) if self.shared else [self.candidates]
        dealt_out = dealt(by_rank, self.wanted)
        every = Rollouts.concat(self._alike())
        if self.shared and any(source != rank for rank, share in enumerate(dealt_out) for source, _ in share):
            parcels = [[c.position for s, c in share if s == rank_index] for share in dealt_out]
            parts = [every.select(_rows(every, positions)) if positions else None for positions in parcels]
            arrived = self.ranks.exchange(parts, instead="rollout.dynamic_sampling.shared=false")
            every = Rollouts.concat([part for part in arrived if part is not None])
        chosen = [candidate for _, candidate in dealt_out[rank_index]]
        batch = every.select(_rows(every, [candidate.position for candidate in chosen]))
        batch.filler = torch.isin(batch.group, torch.tensor([c.position for c in chosen if not c.teaches]))
        return batch

    def _alike(self) -> list[Rollouts]:
        """Returns the rounds with the same columns on all ranks, for sources add some where they join a group. A
        collective."""
        recorded = self.ranks.max(any(part.old_logp is not None for part in self.parts))
        return [with_old_logp(part) for part in self.parts] if recorded else self.parts


def dealt(by_rank: Sequence[Sequence[Candidate]], wanted: int) -> list[list[tuple[int, Candidate]]]:
    """Deals the groups that a step takes to ranks. Returns for every rank pairs of source rank and candidate, in the
    order of candidates.

    by_rank: the candidates of each rank. The first `wanted` x ranks are taken, wherever they are; a rank keeps the
    first `wanted` of its candidates, and the surplus goes to the ranks with too few, in order.
    """
    every = [(rank, candidate) for rank, share in enumerate(by_rank) for candidate in share]
    chosen = sorted(every, key=lambda pair: pair[1].order)[: wanted * len(by_rank)]
    shares: list[list[tuple[int, Candidate]]] = [[] for _ in by_rank]
    spare: list[tuple[int, Candidate]] = []
    for rank, candidate in chosen:
        (shares[rank] if len(shares[rank]) < wanted else spare).append((rank, candidate))
    for share in shares:
        room = wanted - len(share)
        share += spare[:room]
        spare = spare[room:]
        share.sort(key=lambda pair: pair[1].order)
    return shares


def _rows(rollouts: Rollouts, positions: Sequence[int]) -> Tensor:
    """Returns the rows of the groups at these positions, in their order."""
    return torch.cat([(rollouts.group == position).nonzero().flatten() for position in positions])
