"""The record of spans that the decisions of a rollout lie in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.rollouts import Extra, Rollouts


@dataclass
class SpanColumn(Extra):
    """Values of the spans of rollouts; none where a rollout was not scored."""

    values: list[Tensor]  # by rollout [span] float32
    shares: list[Tensor]  # by rollout [3, entry] float64: decision, span, share; see `mmrl.core.turns`
    texts: list[list[str]]  # by rollout, of each span

    def blank(self, rollouts: Rollouts) -> SpanColumn:
        count = len(rollouts)
        return SpanColumn([torch.zeros(0)] * count, [torch.zeros(3, 0, dtype=torch.float64)] * count, [[]] * count)
