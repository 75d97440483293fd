"""Filters that keep the groups with a learning signal (dynamic sampling, DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.advantages import Moments, combined_reward, group_index, moments


def varied_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """Returns whether the group of each rollout has at least two different rewards, [rollout] bool.

    rewards: [rollout], NaN (unknown) is ignored; group: [rollout] int64.

    Raises ValueError if rewards and group differ in shape.
    """
    m, index = _group_moments(rewards, group)
    return ((m.scored >= 2) & ~m.equal)[index]


def groups_in_range(values: Tensor, group: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """Returns whether the group mean of `values` lies in [low, high], for each rollout, [rollout] bool.

    values: [rollout], NaN (unknown) is ignored; group: [rollout] int64; low, high: None for no bound. A group without
    known values lies in no bounded range.

    Raises ValueError if values and group differ in shape.
    """
    m, index = _group_moments(values, group)
    in_range = torch.ones_like(m.scored, dtype=torch.bool)
    if low is not None:
        in_range &= (m.scored > 0) & (m.mean >= low)
    if high is not None:
        in_range &= (m.scored > 0) & (m.mean <= high)
    return in_range[index]


def whole_groups(group: Tensor, min_rollouts: int) -> Tensor:
    """Returns the rows of the first complete groups of `group` [rollout] that have `min_rollouts` rollouts together.

    The rows are [n] int64, group by group in order of first appearance. All rows are returned if there are fewer.
    """
    rows: list[int] = []
    for group_id in dict.fromkeys(group.tolist()):
        if len(rows) >= min_rollouts:
            break
        rows += (group == group_id).nonzero().flatten().tolist()
    return torch.tensor(rows, dtype=torch.int64)


def varied_components(rewards: Tensor, group: Tensor, weights: Tensor) -> Tensor:
    """Returns whether any reward component with a weight other than 0 varies in the rollout's group, [rollout] bool.

    rewards: [rollout, component]; group: [rollout]; weights: [component]. Rollouts with a NaN in one of these
    components are ignored.
    """
    scored = ~combined_reward(rewards, weights).isnan()
    varied = torch.zeros_like(scored)
    for k in weights.nonzero().flatten().tolist():
        varied = varied | varied_groups(rewards[:, k].where(scored, torch.nan), group)
    return varied


def _group_moments(values: Tensor, group: Tensor) -> tuple[Moments, Tensor]:
    """Returns the moments of `values` [rollout] in each group, and each rollout's index into them, [rollout] int64."""
    if values.shape != group.shape or values.dim() != 1:
        raise ValueError(f"values {tuple(values.shape)} and group {tuple(group.shape)} must both be [rollout]")
    index, groups = group_index(group)
    return moments(values.to(torch.promote_types(values.dtype, torch.float32)), index, groups), index
