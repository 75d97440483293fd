"""Advantages from rewards: statistics within a group of rollouts, and generalised advantage estimation.

Baselines, scales and components (`mmrl.algorithms`) are composed of the functions here. Shapes: B rollouts, K reward
components, T decisions, U units (a unit is a group, a bucket or the whole batch). `index` [B] holds the unit of each
rollout, 0 .. U - 1. A reward is NaN where it is unknown; such a rollout is left out of every mean and std.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl import kernels
from mmrl.kernels import gae as gae

EPS = 1e-6  # added to a standard deviation that divides


class Moments(NamedTuple):
    """Statistics of the scored values of every unit, each [U]; `equal` marks units without two different ones."""

    scored: Tensor
    mean: Tensor
    std: Tensor
    equal: Tensor


def moments(values: Tensor, index: Tensor, units: int) -> Moments:
    """Number of scored values, mean and unbiased std of `values` [B] in every unit of `index` [B] (ids 0 .. units - 1).

    NaN values are left out. Where all values of a unit are equal, its mean is that value and its std is 0, both
    exactly, so that rounding cannot turn "no signal" into a tiny signal that a division then magnifies. A unit without
    any scored value has mean 0 and std 0, and counts as equal.
    """
    fused = kernels.group_advantage(values, index, units, baseline="none", scale="none")
    return Moments(fused.scored, fused.mean, fused.std, fused.equal)


def group_index(ids: Tensor) -> tuple[Tensor, int]:
    """Arbitrary ids [B] -> ids 0 .. U - 1 [B], and U."""
    unique, index = torch.unique(ids, return_inverse=True)
    return index, len(unique)


def group_advantages(
    rewards: Tensor, group: Tensor, *, weights: Tensor | None = None, scale: str = "group_std"
) -> tuple[Tensor, Moments]:
    """Advantages [B] of `rewards` [B] or [B, K] with `weights` [K] (None: ones) less the mean of their `group` [B] (any
    int64 ids), and the statistics of the groups: GRPO's, arXiv 2402.03300, in one pass.

    scale: group_std or none, or another that the fused pass of `mmrl.kernels` knows. A group whose scored rewards are
    all equal, or that has fewer than two of them, gets exactly 0. The whole batch must be present: ranks gather rewards
    and group first.

    Raises ValueError for an unknown scale, and for shapes that do not fit.
    """
    table = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    index, groups = group_index(group)
    fused = kernels.group_advantage(
        table, index, groups, weights=None if weights is None else weights.to(table), scale=scale
    )
    return fused.advantages, Moments(fused.scored, fused.mean, fused.std, fused.equal)


# --- several rewards as one ---


def combined_reward(rewards: Tensor, weights: Tensor) -> Tensor:
    """[B, K], [K] -> [B]: the weighted sum of the components that weigh anything; NaN where one of those is.

    Raises ValueError where there are not as many weights as components.
    """
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"weights has shape {tuple(weights.shape)}, rewards have {rewards.shape[1]} components")
    return torch.where(weights.to(rewards) != 0, rewards * weights.to(rewards), 0).sum(1)


def gated_reward(rewards: Tensor, weights: Tensor, gates: Sequence[int]) -> Tensor:
    """[B, K], [K] -> [B]: the product of the components `gates`, whose weights are not used, times the weighted sum of
    the others. A closed gate (0) gives 0 whether or not the others could be scored.

    Raises ValueError where no component is a gate, or every one.
    """
    if not 0 < len(gates) < rewards.shape[1]:
        raise ValueError(f"there must be between 1 and {rewards.shape[1] - 1} gates, got {len(gates)}")
    gate, others = rewards[:, gates], [k for k in range(rewards.shape[1]) if k not in gates]
    total = gate.prod(1) * combined_reward(rewards[:, others], weights[others])
    return torch.where((gate == 0).any(1), 0, total)


# --- less a baseline ---


def less_mean(rewards: Tensor, index: Tensor, m: Moments) -> Tensor:
    """[B] -> [B]: rewards less the mean of their group, exactly 0 where those of the group are equal; NaN stays NaN. m:
    the moments of `rewards`. GRPO, arXiv 2402.03300."""
    return rewards - m.mean[index]


def less_mean_of_others(rewards: Tensor, index: Tensor, m: Moments) -> Tensor:
    """[B] -> [B]: rewards less the mean of the other rollouts of their group, arguments as in `less_mean`:
    r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean). RLOO, arXiv 2402.14740."""
    return less_mean(rewards, index, m) * (m.scored / (m.scored - 1).clamp(min=1))[index]


def less_length_weighted_mean(rewards: Tensor, index: Tensor, m: Moments, lengths: Tensor) -> Tensor:
    """[B] -> [B]: rewards less sum(l r) / sum(l) of their group, for `lengths` l [B]. OPO, arXiv 2505.23585."""
    centred = less_mean(rewards, index, m)  # weighted around the mean, so that equal rewards stay exactly 0
    long = lengths.to(centred).where(~rewards.isnan(), 0)
    none = centred.new_zeros(len(m.scored))
    weighted = none.index_add(0, index, (long * centred).where(long > 0, 0))
    return centred - (weighted / none.index_add(0, index, long).clamp(min=1e-12))[index]


def less_shrunken_mean(rewards: Tensor, index: Tensor, m: Moments) -> Tensor:
    """[B] -> [B]: rewards less a James-Stein baseline, the idea of arXiv 2511.03710 with the plug-in estimates below.

    For rollout i of group g, with n_h, m_h, s_h^2 the count, mean and unbiased variance of group h, and averages over
    the G' other groups h != g (of at least two scored rollouts):

        local  = mean of the other rollouts of g            others = average of m_h
        v      = average of s_h^2 / (n_g - 1)               tau^2  = max(0, var of m_h - average of s_h^2 / n_h)
        b_i    = (1 - q) local + q others                   q      = v / (v + tau^2)

    No term holds reward i, so the policy gradient stays unbiased. With G' < 2 the spread of the groups is unknown and
    q = 0. Groups of equal rewards get 0 here as under every baseline, which trades that guarantee for them.
    """
    usable = (m.scored > 1).to(rewards.dtype)
    groups = usable.sum()
    # Each "others" quantity is the sum over all usable groups minus the group's own share.
    peers = groups - usable
    count = peers.clamp(min=1)
    variance, noise = usable * m.std.square(), usable * m.std.square() / m.scored.clamp(min=1)
    variance = (variance.sum() - variance) / count
    noise = (noise.sum() - noise) / count
    grand = (usable * m.mean).sum() / groups.clamp(min=1)
    offset = usable * (m.mean - grand)  # sums to 0 over the groups
    others = grand - offset / count
    spread = (offset.square().sum() - offset.square() * (1 + 1 / count)).clamp(min=0) / (peers - 1).clamp(min=1)
    tau2 = (spread - noise).clamp(min=0)
    v = variance / (m.scored - 1).clamp(min=1)
    q = torch.where((v > 0) & (peers > 1), v / (v + tau2).clamp(min=1e-30), 0)[index]
    mixed = (1 - q) * less_mean_of_others(rewards, index, m) + q * (rewards - others[index])
    return torch.where(m.equal[index], 0, mixed)


# --- over a scale ---


def over_std(differences: Tensor, rewards: Tensor, index: Tensor, units: int, *, eps: float = EPS) -> Tensor:
    """[B] -> [B]: differences over the unbiased std + eps of the `rewards` [B] of their unit; 0 where that std is 0."""
    std = moments(rewards, index, units).std[index]
    return torch.where(std > 0, differences / (std + eps), 0)


def whitened(values: Tensor, *, eps: float = EPS) -> Tensor:
    """[B] -> [B]: (values - mean) / (std + eps) over the batch, where NaN stays NaN; 0 if all values are equal."""
    m = moments(values, torch.zeros(len(values), dtype=torch.int64, device=values.device), 1)
    return torch.where(m.std > 0, (values - m.mean) / (m.std + eps), 0)


# --- statistics ---


def reward_statistics(rewards: Tensor, varied: Tensor, index: Tensor, groups: int) -> dict[str, Tensor]:
    """Numbers about the combined `rewards` [B] of a step, 0-d each. varied: [B] bool, whether a rollout's group has
    different rewards.

    groups; zero_variance_groups and small_groups, the fractions of groups that do not vary though two are scored, and
    of those with fewer than two scored; reward_nan_rate, the share of the rollouts; reward_mean and reward_std; and
    reward_std_within, the std in a group on average over the groups that have one.
    """
    within, overall = moments(rewards, index, groups), moments(rewards, torch.zeros_like(index), 1)
    several = within.scored > 1
    varying = torch.zeros(groups, dtype=torch.bool, device=index.device).index_put((index,), varied)
    return {
        "groups": torch.tensor(float(groups)),
        "zero_variance_groups": (several & ~varying).float().mean(),
        "small_groups": (~several).float().mean(),
        "reward_nan_rate": rewards.isnan().float().mean(),
        "reward_mean": overall.mean[0],
        "reward_std": overall.std[0],
        "reward_std_within": within.std.where(several, 0).sum() / several.sum().clamp(min=1),
    }


def lone_groups(rewards: Tensor, index: Tensor) -> Tensor:
    """0-d bool: whether some group has a single rollout, and that one is scored."""
    alone = torch.bincount(index)[index] == 1
    return (alone & ~rewards.isnan()).any()


# --- advantages of decisions ---


def finite_gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    lam: float,
    mask: Tensor,
    bootstrap: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns = advantages + values, all [B, T], as `gae`, with the weights of a finite horizon.

        A_t = sum_n lam^n A_t^(n) / sum_n lam^n      A_t^(n) = sum_{k<=n} gamma^k r_{t+k} + gamma^{n+1} v'_{t+n} - v_t

    over the n for which step t + n was still of the same episode (arXiv 1506.02438, equation 16, whose weights
    (1 - lam) lam^n sum to 1 only over an infinite number of them; ManiSkill's PPO divides as here). v' as in `gae`.
    """
    followed = torch.zeros_like(mask)
    followed[:, :-1] = mask[:, 1:]
    runs_on = mask & followed & ~terminated & ~truncated
    after = torch.zeros_like(values)
    after[:, :-1] = values[:, 1:]
    after = bootstrap.where(mask & ~terminated & ~runs_on, after.where(runs_on, 0.0))
    weight = earned = valued = torch.zeros_like(rewards[:, 0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        on = runs_on[:, t]
        weight = 1 + lam * weight.where(on, 0.0)
        earned = weight * rewards[:, t] + gamma * lam * earned.where(on, 0.0)
        valued = gamma * after[:, t] + gamma * lam * valued.where(on, 0.0)
        columns.append((earned + valued) / weight - values[:, t])
    advantages = torch.stack(columns[::-1], 1).where(mask, 0.0)
    return advantages, (advantages + values).where(mask, 0.0)
