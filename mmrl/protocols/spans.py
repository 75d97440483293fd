"""The record of the spans (parts of a response with a reward of their own) that the decisions of rollouts belong to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.rollouts import Extra, Rollouts


@dataclass
class SpanColumn(Extra):
    """The spans of rollouts and their rewards; a rollout that was not scored has no spans."""

    values: list[Tensor]  # for each rollout, [span] float32: the reward of each span
    # For each rollout, [3, entry] float64: decision index, span index, and the share of the decision in the span; see
    # `mmrl.core.turns`
    shares: list[Tensor]
    texts: list[list[str]]  # for each rollout, the text of each span

    def blank(self, rollouts: Rollouts) -> SpanColumn:
        count = len(rollouts)
        return SpanColumn([torch.zeros(0)] * count, [torch.zeros(3, 0, dtype=torch.float64)] * count, [[]] * count)
