"""Credit of the turns of conversations."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted(rewards: Tensor, gamma: float) -> Tensor:
    """[rollout, turn] R_t = sum_{k >= t} gamma^(k - t) r_k of rewards [rollout, turn], 0 where there was no turn."""
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = rewards[:, t] + gamma * following
        returns[:, t] = following
    return returns


def turn_advantages(
    returns: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    baseline: str = "mean",
    scale: str = "group_std",
    eps: float = 1e-6,
) -> Tensor:
    """[rollout, turn] returns against the same turn in the same group: against its mean, or that of the others
    ("leave_one_out"); divided by their unbiased std + eps ("group_std") or not ("none"). mask: [rollout, turn] True
    where there was a turn. Exactly 0 where all are equal, where one is alone, and where there was no turn. A group lies
    on one rank.

    Raises ValueError for an unknown baseline or scale.
    """
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline of turn advantages must be mean or leave_one_out; got {baseline!r}")
    if scale not in ("group_std", "none"):
        raise ValueError(f"scale of turn advantages must be group_std or none; got {scale!r}")
    result = torch.zeros_like(returns)
    for g in group.unique():
        for t in range(returns.shape[1]):
            rows = ((group == g) & mask[:, t]).nonzero().flatten()
            values = returns[rows, t]
            if len(rows) < 2 or bool((values == values[0]).all()):
                continue
            difference = values - values.mean()
            if baseline == "leave_one_out":
                difference = difference * len(rows) / (len(rows) - 1)
            result[rows, t] = difference / (values.std() + eps) if scale == "group_std" else difference
    return result


def milestone_segments(rewards: Tensor, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts turns [rollout, turn] behind every one that earned something. Returns each turn's segment, int64; and, both
    [rollout, segment], its worth, gamma^(its turns - 1) if it ends with a milestone, else 0, and whether it exists,
    bool. BEACON, as a reading of "milestone-partitioned trajectories"."""
    reached = rewards > 0
    number = reached.cumsum(1) - reached.long()
    count = rewards.shape[1]
    member = torch.nn.functional.one_hot(number, count) * mask[..., None]  # [rollout, turn, segment]
    length, ended = member.sum(1), (member * reached[..., None]).sum(1)
    worth = gamma ** (length - 1).clamp(min=0).to(rewards) * ended
    return number, worth, length > 0
