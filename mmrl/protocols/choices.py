"""Alternatives to the decisions of rollouts, such as other tokens, with a teacher's log-probabilities for distillation.
A teacher fills them in; the policy's replay computes the student's log-probabilities of the same alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from mmrl.rollouts import DecisionColumn, Rollouts, column


@dataclass
class TeacherChoices(DecisionColumn):
    """The k alternatives to each decision that a teacher scores. values: [rollout, decision, k] int64, their ids."""

    # [rollout, decision, k] fp32, the teacher's log-probabilities; NaN where a teacher server does not list an id; None
    # before a teacher has scored them
    logp: Tensor | None = column(0)

    @property
    def is_full_vocabulary(self) -> bool:
        """Returns whether the alternatives are the whole vocabulary, not only the k likeliest tokens."""
        return False


@dataclass
class WholeVocabulary(TeacherChoices):
    """The whole vocabulary as alternatives, the same for every decision. `values` is a view of one row of ids."""

    @classmethod
    def from_ids(cls, ids: Tensor, shape: Sequence[int]) -> WholeVocabulary:
        """Builds the record from the ids of the vocabulary, [k]. shape: (rollouts, decisions)."""
        return cls(ids.expand(*shape, -1))

    @property
    def is_full_vocabulary(self) -> bool:
        return True

    @property
    def ids(self) -> Tensor:
        """Returns the ids of the vocabulary, [k] int64."""
        return self.values[0, 0]

    def select(self, index: Tensor) -> Self:
        """Returns the record of some rollouts. index: their row numbers [n], or a bool mask [rollout]."""
        rows = index.nonzero().flatten() if index.dtype == torch.bool else index
        values = self.ids.expand(len(rows), self.values.shape[1], -1)
        return replace(self, values=values, logp=None if self.logp is None else self.logp[rows])


def top_k_choices(rollouts: Rollouts, parts: Sequence[Tensor], policy: Any, model: Any, count: int) -> TeacherChoices:
    """Returns the ids of the `count` likeliest alternatives under `model`, without their log-probabilities.

    policy: has the ability `TopK`. model: one of its networks. parts: rows [n] of each micro-batch; rows that are in
    none of them get id 0.
    """
    ids = torch.zeros(*rollouts.mask.shape, count, dtype=torch.int64)
    for rows in parts:
        ids[rows] = policy.top_k(rollouts.select(rows), model, count)
    return TeacherChoices(ids)
