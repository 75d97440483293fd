"""Which groups are worth a gradient (dynamic sampling, DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.advantages import COMPONENTS, Moments, combined_reward, gated_reward, group_index, moments


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
    found: list[int] = []
    for one in dict.fromkeys(group.tolist()):
        if len(found) >= least:
            break
        found += (group == one).nonzero().flatten().tolist()
    return torch.tensor(found, dtype=torch.int64)


def informative_groups(
    rewards: Tensor, group: Tensor, weights: Tensor, *, components: str = "sum", gates: int = 1
) -> Tensor:
    """[rollout] bool: whether its group gets advantages other than 0 from `rewards` [rollout, component], combined as
    `advantages.group_advantages` does it with the same options.

    With components "normalise_each" a group is informative if any component that weighs something varies in it, among
    the rollouts that are scored in all of these.

    Raises ValueError for unknown components.
    """
    if components not in COMPONENTS:
        raise ValueError(f"components must be one of {', '.join(COMPONENTS)}; got {components!r}")
    if components == "gated":
        return varied_groups(gated_reward(rewards, weights, gates), group)
    total = combined_reward(rewards, weights)
    if components == "sum":
        return varied_groups(total, group)
    columns = [rewards[:, k].where(~total.isnan(), torch.nan) for k in weights.nonzero().flatten().tolist()]
    return torch.stack([varied_groups(column, group) for column in columns]).any(0)


def _of_groups(values: Tensor, group: Tensor) -> tuple[Moments, Tensor]:
    if values.shape != group.shape or values.dim() != 1:
        raise ValueError(f"values {tuple(values.shape)} and group {tuple(group.shape)} must both be [rollout]")
    index, groups = group_index(group)
    return moments(values.to(torch.promote_types(values.dtype, torch.float32)), index, groups), index
