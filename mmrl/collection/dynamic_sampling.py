"""Dynamic sampling (DAPO, arXiv 2503.14476): selection of groups with a learning signal, and exchange between ranks."""

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
    """A group that a rank has sampled. informative: whether its rewards differ, so that it has a learning signal.
    sampling_round: the round in which it was sampled, from 0. position: the position of its prompt in the order of the
    run, which is also the group's id."""

    informative: bool
    sampling_round: int
    position: int

    @property
    def order(self) -> tuple[bool, int, int]:
        """Returns the sort key of candidates: informative groups first, then by round and position."""
        return (not self.informative, self.sampling_round, self.position)


class Candidates:
    """The groups that the rounds of a step have sampled so far, from which the step's batch is selected."""

    def __init__(self, num_groups: int, ranks: Ranks, *, shared: bool) -> None:
        """num_groups: groups of a rank in the batch. shared: ranks exchange groups, so that a rank with few informative
        groups gets some from other ranks. The batch is then the one that a single rank would have selected."""
        self.num_groups, self.ranks, self.shared = num_groups, ranks, shared and ranks.world > 1
        self.parts: list[Rollouts] = []
        self.candidates: list[Candidate] = []

    def add(self, batch: Rollouts, informative: Tensor) -> None:
        """Adds the groups of a round. informative: [rollout] bool, equal within a group."""
        sampling_round = len(self.parts)
        for position in dict.fromkeys(batch.group.tolist()):
            has_signal = bool(informative[batch.group == position].any())
            self.candidates.append(Candidate(has_signal, sampling_round, position))
        self.parts.append(batch)

    @property
    def full(self) -> bool:
        """Returns whether all ranks have `num_groups` informative groups, or with `shared` that many on average. A
        collective."""
        num_informative = sum(candidate.informative for candidate in self.candidates)
        if self.shared:
            return sum(self.ranks.gather(num_informative)) >= self.num_groups * self.ranks.world
        return self.ranks.max(num_informative < self.num_groups) == 0

    def select(self) -> Rollouts:
        """Returns this rank's share of the batch, with `filler` True for groups without signal. A collective."""
        rank_index = self.ranks.rank if self.shared else 0  # without sharing, `shares` has this rank alone
        by_rank = self.ranks.gather(self.candidates) if self.shared else [self.candidates]
        shares = assign_groups(by_rank, self.num_groups)  # for each rank: (rank that sampled the group, candidate)
        rollouts = Rollouts.concat(self._same_columns())
        if self.shared and any(source != rank for rank, share in enumerate(shares) for source, _ in share):
            # for each rank, the groups that it gets from this rank
            positions_to_send = [[c.position for source, c in share if source == rank_index] for share in shares]
            parts = [rollouts.select(_rows(rollouts, p)) if p else None for p in positions_to_send]
            received = self.ranks.exchange(parts, instead="rollout.dynamic_sampling.shared=false")
            rollouts = Rollouts.concat([part for part in received if part is not None])
        selected = [candidate for _, candidate in shares[rank_index]]
        batch = rollouts.select(_rows(rollouts, [candidate.position for candidate in selected]))
        batch.filler = torch.isin(batch.group, torch.tensor([c.position for c in selected if not c.informative]))
        return batch

    def _same_columns(self) -> list[Rollouts]:
        """Returns the rollouts of each round, with `old_logp` if it is set on any rank: sources that join groups may
        set it on some ranks only. A collective."""
        recorded = self.ranks.max(any(part.old_logp is not None for part in self.parts))
        return [with_old_logp(part) for part in self.parts] if recorded else self.parts


def assign_groups(by_rank: Sequence[Sequence[Candidate]], num_groups: int) -> list[list[tuple[int, Candidate]]]:
    """Selects the groups of a step and assigns them to ranks. Returns, for each rank, pairs of the rank that sampled a
    group and the candidate, in the order of candidates.

    by_rank: the candidates of each rank. The first `num_groups` x ranks of all candidates are selected. Each rank keeps
    up to `num_groups` of its own; the surplus goes, in order, to ranks that have fewer.
    """
    candidates = [(rank, candidate) for rank, local in enumerate(by_rank) for candidate in local]
    selected = sorted(candidates, key=lambda pair: pair[1].order)[: num_groups * len(by_rank)]
    shares: list[list[tuple[int, Candidate]]] = [[] for _ in by_rank]
    surplus: list[tuple[int, Candidate]] = []
    for rank, candidate in selected:
        (shares[rank] if len(shares[rank]) < num_groups else surplus).append((rank, candidate))
    for share in shares:
        missing = num_groups - len(share)
        share += surplus[:missing]
        surplus = surplus[missing:]
        share.sort(key=lambda pair: pair[1].order)
    return shares


def _rows(rollouts: Rollouts, positions: Sequence[int]) -> Tensor:
    """Returns the rows [n] of the groups with these ids, group by group in this order."""
    return torch.cat([(rollouts.group == position).nonzero().flatten() for position in positions])
