"""Filters for groups that are worth a gradient (dynamic sampling, DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.advantages import Moments, combined_reward, group_index, moments


def varied_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """[rollout] bool: whether at least two of the `rewards` [rollout] of its `group` [rollout] are scored (not NaN) and
    not all of those are equal.

    Raises ValueError if rewards and group differ in shape.
    """
    m, index = _of_groups(rewards, group)
    return ((m.scored >= 2) & ~m.equal)[index]


def groups_within(values: Tensor, group: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """[rollout] bool: whether the mean of the scored `values` [rollout] of its group lies in [low, high]; None: no
    bound. A group without a scored value is outside of any bound.

    Raises ValueError if values and group differ in shape.
    """
    m, index = _of_groups(values, group)
    inside = torch.ones_like(m.scored, dtype=torch.bool)
    if low is not None:
        inside &= (m.scored > 0) & (m.mean >= low)
    if high is not None:
        inside &= (m.scored > 0) & (m.mean <= high)
    return inside[index]


def whole_groups(group: Tensor, least: int) -> Tensor:
    """[n] int64: the rollouts of the groups that come first in `group` [rollout], group by group: of as many groups as
    it takes to have `least` rollouts, or of all."""
    rows: list[int] = []
    for one in dict.fromkeys(group.tolist()):
        if len(rows) >= least:
            break
        rows += (group == one).nonzero().flatten().tolist()
    return torch.tensor(rows, dtype=torch.int64)


def varied_components(rewards: Tensor, group: Tensor, weights: Tensor) -> Tensor:
    """[rollout] bool: whether any of the `rewards` [rollout, component] that weighs something varies in the rollout's
    group, among the rollouts that are scored in all of these."""
    scored = ~combined_reward(rewards, weights).isnan()
    varied = torch.zeros_like(scored)
    for k in weights.nonzero().flatten().tolist():
        varied = varied | varied_groups(rewards[:, k].where(scored, torch.nan), group)
    return varied


def _of_groups(values: Tensor, group: Tensor) -> tuple[Moments, Tensor]:
    if values.shape != group.shape or values.dim() != 1:
        raise ValueError(f"values {tuple(values.shape)} and group {tuple(group.shape)} must both be [rollout]")
    index, groups = group_index(group)
    return moments(values.to(torch.promote_types(values.dtype, torch.float32)), index, groups), index
