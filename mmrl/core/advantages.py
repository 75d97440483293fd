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
    """Statistics of the values of each unit that are not NaN; each field has shape [U]."""

    scored: Tensor  # number of values that are not NaN
    mean: Tensor
    std: Tensor  # unbiased
    equal: Tensor  # bool: the unit has no two different values


def moments(values: Tensor, index: Tensor, units: int) -> Moments:
    """Computes the number, mean and unbiased std of `values` [B] in each unit, ignoring NaN.

    index: [B] int64, the unit of each value, 0 .. units - 1. If all values of a unit are equal, its mean is that value
    and its std is 0, both exactly: a rounding error would be magnified by a later division. A unit without values has
    mean 0 and std 0, and counts as equal.
    """
    fused = kernels.group_advantage(values, index, units, baseline="none", scale="none")
    return Moments(fused.scored, fused.mean, fused.std, fused.equal)


def group_index(ids: Tensor) -> tuple[Tensor, int]:
    """Renumbers arbitrary ids [B] to 0 .. U - 1. Returns the new ids [B] and U, the number of different ids."""
    unique, index = torch.unique(ids, return_inverse=True)
    return index, len(unique)


def group_advantages(
    rewards: Tensor, group: Tensor, *, weights: Tensor | None = None, scale: str = "group_std"
) -> tuple[Tensor, Moments]:
    """Computes GRPO's advantages [B] (arXiv 2402.03300) and the statistics of the groups, in one fused pass.

    rewards: [B] or [B, K]; group: [B], any int64 ids; weights: [K], of the reward components (None: ones). scale:
    group_std or none, or another one that the fused pass of `mmrl.kernels` knows. A group gets exactly 0 if its rewards
    are all equal or fewer than two are known. The whole batch must be present: gather rewards and groups of all ranks
    first.

    Raises ValueError if the scale is unknown or shapes do not match.
    """
    table = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    index, groups = group_index(group)
    fused = kernels.group_advantage(
        table, index, groups, weights=None if weights is None else weights.to(table), scale=scale
    )
    return fused.advantages, Moments(fused.scored, fused.mean, fused.std, fused.equal)


# --- several rewards as one ---


def combined_reward(rewards: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted sum [B] of reward components [B, K] with weights [K].

    Components of weight 0 are ignored, so a NaN among them does no harm; any other NaN makes the sum NaN.

    Raises ValueError if the number of weights differs from the number of components.
    """
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"weights have shape {tuple(weights.shape)}, but rewards have {rewards.shape[1]} components")
    return torch.where(weights.to(rewards) != 0, rewards * weights.to(rewards), 0).sum(1)


def gated_reward(rewards: Tensor, weights: Tensor, gates: Sequence[int]) -> Tensor:
    """Multiplies the weighted sum of reward components by the product of the gate components. Returns [B].

    rewards: [B, K]; weights: [K], those of gates are ignored; gates: the column indices of the gates. If a gate is 0,
    the result is 0, even if another component is NaN.

    Raises ValueError if no component is a gate, or if all are.
    """
    if not 0 < len(gates) < rewards.shape[1]:
        raise ValueError(
            f"{len(gates)} of the {rewards.shape[1]} rewards are gates (algorithm.components.gates); at least one must "
            "be a gate, and at least one must not"
        )
    gate_values = rewards[:, gates]
    ungated = [k for k in range(rewards.shape[1]) if k not in gates]
    total = gate_values.prod(1) * combined_reward(rewards[:, ungated], weights[ungated])
    return torch.where((gate_values == 0).any(1), 0, total)


# --- subtract a baseline ---


def subtract_mean(rewards: Tensor, index: Tensor, m: Moments) -> Tensor:
    """Subtracts from rewards [B] the mean of their group (GRPO, arXiv 2402.03300). Returns [B].

    index: [B], the group of each reward; m: the moments of `rewards`. NaN stays NaN. The result is exactly 0 if all
    rewards of the group are equal.
    """
    return rewards - m.mean[index]


def subtract_leave_one_out_mean(rewards: Tensor, index: Tensor, m: Moments) -> Tensor:
    """Subtracts from rewards [B] the mean of the other rewards of their group (RLOO, arXiv 2402.14740). Returns [B].

    It is r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean). Arguments as in `subtract_mean`.
    """
    return subtract_mean(rewards, index, m) * (m.scored / (m.scored - 1).clamp(min=1))[index]


def subtract_length_weighted_mean(rewards: Tensor, index: Tensor, m: Moments, lengths: Tensor) -> Tensor:
    """Subtracts from rewards [B] the length-weighted mean of their group, sum(l r) / sum(l). Returns [B].

    lengths: [B], the l of the equation (OPO, arXiv 2505.23585). Other arguments as in `subtract_mean`.
    """
    centered = subtract_mean(rewards, index, m)  # center first, so that equal rewards stay exactly 0
    lengths = lengths.to(centered).where(~rewards.isnan(), 0)
    zeros = centered.new_zeros(len(m.scored))
    weighted_sum = zeros.index_add(0, index, (lengths * centered).where(lengths > 0, 0))
    length_sum = zeros.index_add(0, index, lengths)
    return centered - (weighted_sum / length_sum.clamp(min=1e-12))[index]


def subtract_james_stein_baseline(rewards: Tensor, index: Tensor, m: Moments) -> Tensor:
    """Subtracts a James-Stein baseline from rewards [B]: the group mean shrunk toward the mean of other groups.

    Arguments as in `subtract_mean`. It follows the idea of arXiv 2511.03710 with these plug-in estimates. For rollout i
    of group g, n_h, m_h, s_h^2 are the count, mean and unbiased variance of group h; averages are over the G' other
    groups h != g that have at least two rewards:

        local  = mean of the other rollouts of g            others = average of m_h
        v      = average of s_h^2 / (n_g - 1)               tau^2  = max(0, var of m_h - average of s_h^2 / n_h)
        b_i    = (1 - q) local + q others                   q      = v / (v + tau^2)

    No term depends on reward i, so the policy gradient stays unbiased. With G' < 2 the variance between groups is
    unknown and q = 0. Groups of equal rewards get 0, as under every baseline; for them that guarantee does not hold.
    """
    usable = (m.scored > 1).to(rewards.dtype)
    num_groups = usable.sum()
    # an average over the other groups is the sum over all usable groups minus the group's own value
    num_others = num_groups - usable
    divisor = num_others.clamp(min=1)
    variance, mean_variance = usable * m.std.square(), usable * m.std.square() / m.scored.clamp(min=1)
    variance = (variance.sum() - variance) / divisor
    mean_variance = (mean_variance.sum() - mean_variance) / divisor
    grand_mean = (usable * m.mean).sum() / num_groups.clamp(min=1)
    offset = usable * (m.mean - grand_mean)  # sums to 0 over the groups
    others_mean = grand_mean - offset / divisor
    squares = (offset.square().sum() - offset.square() * (1 + 1 / divisor)).clamp(min=0)
    between_variance = squares / (num_others - 1).clamp(min=1)
    tau2 = (between_variance - mean_variance).clamp(min=0)
    v = variance / (m.scored - 1).clamp(min=1)
    q = torch.where((v > 0) & (num_others > 1), v / (v + tau2).clamp(min=1e-30), 0)[index]
    shrunk = (1 - q) * subtract_leave_one_out_mean(rewards, index, m) + q * (rewards - others_mean[index])
    return torch.where(m.equal[index], 0, shrunk)


# --- divide by a scale ---


def divide_by_std(differences: Tensor, rewards: Tensor, index: Tensor, units: int, *, eps: float = EPS) -> Tensor:
    """Divides differences [B] by the unbiased std + eps of the `rewards` [B] of their unit; 0 where that std is 0.

    index: [B], the unit of each reward, 0 .. units - 1. Returns [B].
    """
    std = moments(rewards, index, units).std[index]
    return torch.where(std > 0, differences / (std + eps), 0)


def whiten(values: Tensor, *, eps: float = EPS) -> Tensor:
    """Returns (values - mean) / (std + eps) of values [B] over the batch; NaN stays NaN; 0 if all values are equal."""
    m = moments(values, torch.zeros(len(values), dtype=torch.int64, device=values.device), 1)
    return torch.where(m.std > 0, (values - m.mean) / (m.std + eps), 0)


# --- statistics ---


def reward_statistics(rewards: Tensor, varied: Tensor, index: Tensor, groups: int) -> dict[str, Tensor]:
    """Computes metrics of the combined `rewards` [B] of a step; each value is a 0-d tensor.

    varied: [B] bool, whether the rollout's group has different rewards; index: [B], the group of each rollout, 0 ..
    groups - 1. Returns

        groups                  the number of groups
        zero_variance_groups    fraction of groups with at least two known rewards that are all equal
        small_groups            fraction of groups with fewer than two known rewards
        reward_nan_rate         fraction of rollouts whose reward is NaN
        reward_mean, reward_std over the batch
        reward_std_within       std within a group, averaged over the groups with at least two known rewards
    """
    within, overall = moments(rewards, index, groups), moments(rewards, torch.zeros_like(index), 1)
    has_several = within.scored > 1
    group_varies = torch.zeros(groups, dtype=torch.bool, device=index.device).index_put((index,), varied)
    return {
        "groups": torch.tensor(float(groups)),
        "zero_variance_groups": (has_several & ~group_varies).float().mean(),
        "small_groups": (~has_several).float().mean(),
        "reward_nan_rate": rewards.isnan().float().mean(),
        "reward_mean": overall.mean[0],
        "reward_std": overall.std[0],
        "reward_std_within": within.std.where(has_several, 0).sum() / has_several.sum().clamp(min=1),
    }


def has_singleton_group(rewards: Tensor, index: Tensor) -> Tensor:
    """Returns whether some group has exactly one rollout and its reward is known, 0-d bool.

    rewards: [B], NaN where unknown; index: [B], the group of each rollout.
    """
    is_single = torch.bincount(index)[index] == 1
    return (is_single & ~rewards.isnan()).any()


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
    """Computes finite-horizon GAE. Returns advantages and returns = advantages + values, both [B, T].

        A_t = sum_n lam^n A_t^(n) / sum_n lam^n      A_t^(n) = sum_{k<=n} gamma^k r_{t+k} + gamma^{n+1} v'_{t+n} - v_t

    The sums run over the n for which step t + n belongs to the same episode. The weights (1 - lam) lam^n of arXiv
    1506.02438, equation 16, sum to 1 only over an infinite horizon; ManiSkill's PPO normalizes as here. v' is 0 where
    `terminated`, `bootstrap` (the value of the final observation) where the episode is cut off, and the next of
    `values` elsewhere. An episode is cut off where `truncated`, in the last column, and before a step outside `mask`.
    All tensors: [B, T].
    """
    has_next = torch.zeros_like(mask)
    has_next[:, :-1] = mask[:, 1:]
    continues = mask & has_next & ~terminated & ~truncated
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    next_values = bootstrap.where(mask & ~terminated & ~continues, next_values.where(continues, 0.0))
    weight = reward_sum = value_sum = torch.zeros_like(rewards[:, 0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        alive = continues[:, t]
        weight = 1 + lam * weight.where(alive, 0.0)
        reward_sum = weight * rewards[:, t] + gamma * lam * reward_sum.where(alive, 0.0)
        value_sum = gamma * next_values[:, t] + gamma * lam * value_sum.where(alive, 0.0)
        columns.append((reward_sum + value_sum) / weight - values[:, t])
    advantages = torch.stack(columns[::-1], 1).where(mask, 0.0)
    return advantages, (advantages + values).where(mask, 0.0)
