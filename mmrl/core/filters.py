"""Which groups are worth a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.advantages import group_index, moments


def keep_informative_groups(
    rewards: Tensor, group: Tensor, *, low: float | None = None, high: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mask [B] of the rollouts whose group can teach something (dynamic sampling, arXiv 2503.14476).

    A group of `group` [B] is dropped if fewer than two of its `rewards` [B] are scored (not NaN), if the scored ones
    are all equal, or if their mean lies outside [low, high] where those are given. Groups are kept or dropped whole.

    Statistics (0-d), shares of the groups: kept_groups, equal_groups, small_groups, out_of_range_groups (of those that
    are neither small nor equal).

    Raises ValueError if rewards and group differ in shape.
    """
    if rewards.shape != group.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group {tuple(group.shape)} must both be [B]")
    index, groups = group_index(group)
    m = moments(rewards.to(torch.promote_types(rewards.dtype, torch.float32)), index, groups)
    small = m.scored < 2
    equal = m.equal & ~small
    outside = torch.zeros_like(small)
    if low is not None:
        outside |= m.mean < low
    if high is not None:
        outside |= m.mean > high
    outside &= ~(small | equal)
    kept = ~(small | equal | outside)
    shares = {"kept_groups": kept, "equal_groups": equal, "small_groups": small, "out_of_range_groups": outside}
    return kept[index], {name: share.float().mean() for name, share in shares.items()}
