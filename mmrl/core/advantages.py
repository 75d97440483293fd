"""From rewards to advantages: statistics within a group of rollouts, and generalised advantage estimation.

Shapes: B rollouts, K reward components, T decisions, U units (a unit is a group, a bucket or the whole batch).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl import kernels
from mmrl.kernels import gae as gae
from mmrl.kernels import operators

BASELINES = ("mean", "leave_one_out", "length_weighted", "shrinkage", "none")
SCALES = ("group_std", "batch_std", "none", "bucket_std")
COMPONENTS = ("sum", "normalise_each", "gated")


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
    found = kernels.group_advantage(values, index, units, baseline="none", scale="none")
    return Moments(found.scored, found.mean, found.std, found.equal)


def group_advantages(
    rewards: Tensor,
    group: Tensor,
    *,
    baseline: str = "mean",
    scale: str = "group_std",
    components: str = "sum",
    weights: Sequence[float] | Tensor | None = None,
    eps: float = 1e-6,
    lengths: Tensor | None = None,
    buckets: Tensor | None = None,
    gates: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Advantages [B] of `rewards` [B] or [B, K] against the other rollouts of the same `group` [B] (any int64 ids).

    baseline
      mean             mean of the group (GRPO, arXiv 2402.03300)
      leave_one_out    mean of the others in the group (RLOO, arXiv 2402.14740)
      length_weighted  sum(l r) / sum(l) with `lengths` l [B] (OPO, arXiv 2505.23585)
      shrinkage        leave-one-out mean shrunk towards the mean of the other groups; see `_shrunk`
      none             0
    scale
      group_std        divide by the unbiased std of the group + eps
      batch_std        the same over the batch
      bucket_std       the same over all rollouts of one bucket of `buckets` [B], for example groups of like difficulty
                       (arXiv 2602.21743)
      none             1 (Dr.GRPO, arXiv 2503.20783)
    components
      sum              r = sum_k w_k r_k
      normalise_each   baseline and scale for every component, weighted sum, then (S - mean S) / (std S + eps) over the
                       batch (GDPO, arXiv 2601.05242)
      gated            r = prod_{k < gates} r_k * sum_{k >= gates} w_k r_k: the first `gates` columns gate the others
                       and need no weight (theirs is not used). A closed gate (0) gives 0 whether or not the others
                       could be scored.
    weights            [K], ones if None. A component of weight 0 is not looked at.

    A rollout with a NaN in a component that counts is left out of every mean and std and gets 0. A group whose scored
    rewards are all equal, or that has fewer than two of them, gets exactly 0; a group of one rollout also warns. Only
    baseline "none" is an exception: there equal rewards keep their value, unless the std that would divide them is 0.

    The whole batch must be present: ranks gather rewards, group and the other [B] arrays first.

    Statistics (0-d): groups, zero_variance_groups and small_groups (shares of the groups with all rewards equal, and
    with fewer than two scored), reward_nan_rate (share of the rollouts), reward_mean and reward_std of the combined
    reward, and reward_std_within, its std in a group, on average over the groups that have one.

    Raises ValueError for an unknown option, a missing `lengths` or `buckets`, and shapes that do not fit.
    """
    _one_of("baseline", baseline, BASELINES)
    _one_of("scale", scale, SCALES)
    _one_of("components", components, COMPONENTS)
    if baseline == "length_weighted" and lengths is None:
        raise ValueError("baseline 'length_weighted' needs lengths [B]")
    if scale == "bucket_std" and buckets is None:
        raise ValueError("scale 'bucket_std' needs buckets [B]")
    table = _table(rewards, group)
    w = torch.ones(table.shape[1]) if weights is None else torch.as_tensor(weights)
    w = w.to(table)
    if w.shape != table.shape[1:]:
        raise ValueError(f"weights has shape {tuple(w.shape)}, rewards have {table.shape[1]} components")
    index, groups = group_index(group)
    total = gated_reward(table, w, gates) if components == "gated" else _weighted(table, w)
    scored = ~total.isnan()
    within, overall = moments(total, index, groups), moments(total, torch.zeros_like(index), 1)
    flat = within.equal  # groups without signal

    def advantage(reward: Tensor) -> Tensor:
        """[B] -> [B]; baseline and scale of one reward, 0 where unscored."""
        if baseline in operators.BASELINES and scale in operators.SCALES:
            return kernels.group_advantage(reward, index, groups, baseline=baseline, scale=scale, eps=eps).advantages
        m = moments(reward, index, groups)
        centred = _centred(reward, index, m, baseline, lengths)
        if scale != "none":
            unit, units = _scale_units(scale, index, groups, buckets)
            std = moments(reward, unit, units).std[unit]
            centred = torch.where(std > 0, centred / (std + eps), 0)
        return centred.where(scored, 0)

    if components == "normalise_each":
        columns = [k for k in range(table.shape[1]) if w[k] != 0]
        parts = [table[:, k].where(scored, torch.nan) for k in columns]
        mixed = torch.zeros_like(total)
        flat = torch.ones_like(flat)
        for k, part in zip(columns, parts, strict=True):
            mixed = mixed + w[k] * advantage(part)
            flat = flat & moments(part, index, groups).equal
        batch = moments(mixed.where(scored, torch.nan), torch.zeros_like(index), 1)
        mixed = torch.where(batch.std > 0, (mixed - batch.mean) / (batch.std + eps), 0)
        # Subtracting the batch mean must not move the groups without signal.
        result = mixed.where(scored & ~(flat[index] & (baseline != "none")), 0)
    else:
        result = advantage(total)

    if baseline != "none" and bool((torch.bincount(index)[within.scored > 0] == 1).any()):
        warnings.warn("a group of one rollout has no baseline: its advantage is 0", stacklevel=2)
    stats = {
        "groups": torch.tensor(float(groups)),
        "zero_variance_groups": (flat & (within.scored > 1)).float().mean(),
        "small_groups": (within.scored < 2).float().mean(),
        "reward_nan_rate": (~scored).float().mean(),
        "reward_mean": overall.mean[0],
        "reward_std": overall.std[0],
        "reward_std_within": _mean_where(within.std, within.scored > 1),
    }
    return result, stats


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
    found = []
    for t in reversed(range(rewards.shape[1])):
        on = runs_on[:, t]
        weight = 1 + lam * weight.where(on, 0.0)
        earned = weight * rewards[:, t] + gamma * lam * earned.where(on, 0.0)
        valued = gamma * after[:, t] + gamma * lam * valued.where(on, 0.0)
        found.append((earned + valued) / weight - values[:, t])
    advantages = torch.stack(found[::-1], 1).where(mask, 0.0)
    return advantages, (advantages + values).where(mask, 0.0)


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """0-d; 0 where none is chosen."""
    return values.where(chosen, 0).sum() / chosen.sum().clamp(min=1)


def combined_reward(rewards: Tensor, weights: Tensor) -> Tensor:
    """[rollout, component], [component] -> [rollout]: the weighted sum of the components that weigh anything; NaN where
    one of those is."""
    return _weighted(rewards, weights.to(rewards))


def _table(rewards: Tensor, group: Tensor) -> Tensor:
    """Rewards as [B, K] in at least fp32."""
    table = rewards.detach()[:, None] if rewards.dim() == 1 else rewards.detach()
    if table.dim() != 2 or group.shape != table.shape[:1]:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group {tuple(group.shape)} must be [B] or [B, K] and [B]")
    return table.to(torch.promote_types(table.dtype, torch.float32))


def _weighted(table: Tensor, w: Tensor) -> Tensor:
    """[B, K], [K] -> [B]; NaN where a component with a weight is NaN."""
    return torch.where(w != 0, table * w, 0).sum(1)


def gated_reward(table: Tensor, w: Tensor, gates: int) -> Tensor:
    """[B, K], [K] -> [B]; the product of the first `gates` columns times the weighted sum of the others."""
    if not 0 < gates < table.shape[1]:
        raise ValueError(f"gates must be between 1 and {table.shape[1] - 1}, got {gates}")
    gate = table[:, :gates]
    closed = (gate == 0).any(1)
    return torch.where(closed, 0, gate.prod(1) * _weighted(table[:, gates:], w[gates:]))


def _centred(reward: Tensor, index: Tensor, m: Moments, baseline: str, lengths: Tensor | None) -> Tensor:
    """[B] -> [B]; reward minus baseline, exactly 0 in groups without signal. NaN stays NaN."""
    if baseline == "none":
        return reward
    centred = reward - m.mean[index]
    if baseline == "leave_one_out":  # r_i - mean of the others = n / (n - 1) (r_i - mean)
        return centred * (m.scored / (m.scored - 1).clamp(min=1))[index]
    if baseline == "length_weighted" and lengths is not None:
        long = lengths.to(centred).where(~reward.isnan(), 0)
        units = len(m.scored)
        none = centred.new_zeros(units)
        weighted = none.index_add(0, index, (long * centred).where(long > 0, 0))
        shift = weighted / none.index_add(0, index, long).clamp(min=1e-12)
        return centred - shift[index]
    if baseline == "shrinkage":
        return _shrunk(reward, centred, index, m)
    return centred


def _shrunk(reward: Tensor, centred: Tensor, index: Tensor, m: Moments) -> Tensor:
    """Reward minus a James-Stein baseline: the idea of arXiv 2511.03710 with the plug-in estimates below.

    For rollout i of group g, with n_h, m_h, s_h^2 the count, mean and unbiased variance of group h, and averages over
    the G' other groups h != g (of at least two scored rollouts):

        own    = mean of the other rollouts of g            others = average of m_h
        v      = average of s_h^2 / (n_g - 1)               tau^2  = max(0, var of m_h - average of s_h^2 / n_h)
        b_i    = (1 - q) own + q others                     q      = v / (v + tau^2)

    No term holds reward i, so the policy gradient stays unbiased. With G' < 2 the spread of the groups is unknown and
    q = 0. Groups of equal rewards get 0 here as under every baseline, which trades that guarantee for them.
    """
    usable = (m.scored > 1).to(reward.dtype)
    groups = usable.sum()
    # Each "others" quantity is the sum over all usable groups minus the group's own share.
    peers = groups - usable
    known = peers.clamp(min=1)
    variance, noise = usable * m.std.square(), usable * m.std.square() / m.scored.clamp(min=1)
    variance = (variance.sum() - variance) / known
    noise = (noise.sum() - noise) / known
    grand = (usable * m.mean).sum() / groups.clamp(min=1)
    offset = usable * (m.mean - grand)  # sums to 0 over the groups
    others = grand - offset / known
    spread = (offset.square().sum() - offset.square() * (1 + 1 / known)).clamp(min=0) / (peers - 1).clamp(min=1)
    tau2 = (spread - noise).clamp(min=0)
    v = variance / (m.scored - 1).clamp(min=1)
    q = torch.where((v > 0) & (peers > 1), v / (v + tau2).clamp(min=1e-30), 0)[index]
    own = centred * (m.scored / (m.scored - 1).clamp(min=1))[index]
    mixed = (1 - q) * own + q * (reward - others[index])
    return torch.where(m.equal[index], 0, mixed)


def _scale_units(scale: str, index: Tensor, groups: int, buckets: Tensor | None) -> tuple[Tensor, int]:
    """The units [B] whose std divides, and their number."""
    if scale == "group_std":
        return index, groups
    return group_index(buckets) if scale == "bucket_std" and buckets is not None else (torch.zeros_like(index), 1)


def group_index(ids: Tensor) -> tuple[Tensor, int]:
    """Arbitrary ids [B] -> ids 0 .. U - 1 [B], and U."""
    unique, index = torch.unique(ids, return_inverse=True)
    return index, len(unique)


def _one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}; got {value!r}")
