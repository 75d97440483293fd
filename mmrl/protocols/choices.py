"""Alternatives to the decisions of rollouts, with a teacher's log-probabilities: the record that a teacher fills in and
a replay reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from mmrl.rollouts import DecisionColumn, Rollouts, column


@dataclass
class TeacherChoices(DecisionColumn):
    """Alternatives to decisions: their indices, `values` [rollout, decision, k] int64, and the teacher's
    log-probabilities; NaN for one that is not listed, and for all where there is no teacher."""

    logp: Tensor | None = column(0)  # [rollout, decision, k] fp32

    @property
    def is_full_vocabulary(self) -> bool:
        """Returns whether there are no other alternatives."""
        return False


@dataclass
class WholeVocabulary(TeacherChoices):
    """All alternatives that there are, the same for every decision; `values` is a view of one row."""

    @classmethod
    def from_ids(cls, ids: Tensor, shape: Sequence[int]) -> WholeVocabulary:
        """Returns the alternatives ids [k] to the decisions of rollouts of this shape."""
        return cls(ids.expand(*shape, -1))

    @property
    def is_full_vocabulary(self) -> bool:
        return True

    @property
    def ids(self) -> Tensor:
        """Returns the alternatives, [k] int64."""
        return self.values[0, 0]

    def select(self, index: Tensor) -> Self:
        rows = index.nonzero().flatten() if index.dtype == torch.bool else index
        values = self.ids.expand(len(rows), self.values.shape[1], -1)
        return replace(self, values=values, logp=None if self.logp is None else self.logp[rows])


def top_k_choices(rollouts: Rollouts, parts: Sequence[Tensor], policy: Any, model: Any, count: int) -> TeacherChoices:
    """Returns the likeliest alternatives under `model`, a network of `policy`, without log-probabilities. parts: rows
    that are computed at once; rows in none of them hold 0."""
    ids = torch.zeros(*rollouts.mask.shape, count, dtype=torch.int64)
    for rows in parts:
        ids[rows] = policy.top_k(rollouts.select(rows), model, count)
    return TeacherChoices(ids)
