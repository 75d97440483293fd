"""Credit assignment: how the reward of a rollout becomes advantages of its decisions.

A decision is a part of a rollout with one log-probability: a token, a denoising step, an action. Shapes: B rollouts, T
decisions.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.turns import discounted_returns


def branch_advantages(
    rewards: Tensor, group: Tensor, nodes: Tensor, *, scale: str = "group_std", eps: float = 1e-6
) -> Tensor:
    """Computes advantages [B, T] of the decisions of a tree of rollouts (BranchGRPO, arXiv 2509.06040).

    rewards: [B], NaN where unknown; group: [B]; nodes: [B, T] int64. Rollouts of a group that have the same node id at
    t share decision t; -1 marks a decision that no other rollout shares. The value of a node is the mean reward of the
    rollouts through it. Its advantage is its value minus the mean value of the group's nodes at t, divided by their
    unbiased std + eps (scale "group_std") or not ("none"). It is exactly 0 if these nodes have equal values, if there
    is only one, or if no reward of the node is known. Without shared nodes, this is the group-normalized reward.

    Raises ValueError if the scale is unknown.
    """
    if scale not in ("group_std", "none"):
        raise ValueError(f"scale of branch advantages must be group_std or none; got {scale!r}")
    result = torch.zeros(nodes.shape, dtype=rewards.dtype, device=rewards.device)
    for g in group.unique():
        rows = (group == g).nonzero().flatten()
        for t in range(nodes.shape[1]):
            _, node = give_missing_nodes_unique_ids(nodes[rows, t]).unique(return_inverse=True)
            node_values = torch.stack([rewards[rows][node == n].nanmean() for n in range(int(node.max()) + 1)])
            known = node_values[~node_values.isnan()]
            if len(known) < 2 or bool((known == known[0]).all()):
                continue
            advantage = node_values - known.mean()
            if scale == "group_std":
                advantage = advantage / (known.std() + eps)
            result[rows, t] = advantage.nan_to_num(0.0)[node]
    return result


def give_missing_nodes_unique_ids(ids: Tensor) -> Tensor:
    """Replaces each -1 in node ids [B] or [B, T] by a negative id that no other row has.

    So decisions that are missing, since a rollout ended earlier, are not taken for shared ones.
    """
    row = torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
    return ids.where(ids >= 0, -1 - row)


def subtree_advantages(rewards: Tensor, group: Tensor, nodes: Tensor, *, weights: str = "alike") -> Tensor:
    """Computes TreePO's advantages [B] (arXiv 2508.17445): rewards minus subtree means, averaged over subtrees.

        A_i = sum_S w_S (R_i - mean_{j in S} R_j) / sum_S w_S

    The sets S are the whole group of rollout i, and for each of its decisions the rollouts that share it; only sets of
    at least two known rewards are used. w_S is 1 (weights "alike") or the size of S ("size"). rewards: [B], NaN where
    unknown, which gets 0; group: [B] and nodes: [B, T], as in `branch_advantages`. A set of equal rewards adds exactly
    0.
    """
    result = torch.zeros_like(rewards)
    for g in group.unique():
        rows = ((group == g) & ~rewards.isnan()).nonzero().flatten()
        ids, group_rewards = give_missing_nodes_unique_ids(nodes[rows]), rewards[rows]
        for i, row in enumerate(rows.tolist()):
            whole_group = torch.ones(len(rows), 1, dtype=torch.bool)
            memberships = torch.cat([whole_group, ids == ids[i]], 1).unique(dim=1)  # [rollout of the group, set]
            subtrees = [group_rewards[member] for member in memberships.unbind(1) if int(member.sum()) > 1]
            differences = [
                group_rewards[i] - s.mean() if bool((s != s[0]).any()) else group_rewards.new_zeros(())
                for s in subtrees
            ]
            sizes = [len(s) if weights == "size" else 1 for s in subtrees]
            set_weights = torch.tensor(sizes, dtype=group_rewards.dtype)
            if differences:
                result[row] = (set_weights * torch.stack(differences)).sum() / set_weights.sum()
    return result


def shared_means(values: Tensor, group: Tensor, nodes: Tensor) -> Tensor:
    """Averages `values` [B] over the rollouts that share a decision, for each decision. Returns [B, T].

    ARPO (arXiv 2507.19849) does so with the advantages of shared tokens. group: [B]; nodes: [B, T], as in
    `branch_advantages`. NaN is left out of the means; a mean of nothing is 0.
    """
    result = torch.zeros(nodes.shape, dtype=values.dtype)
    for g in group.unique():
        rows = (group == g).nonzero().flatten()
        ids, group_values = give_missing_nodes_unique_ids(nodes[rows]), values[rows]
        for i, row in enumerate(rows.tolist()):
            shared = (ids == ids[i]) & ~group_values.isnan()[:, None]
            total = group_values.nan_to_num(0.0)[:, None].where(shared, 0.0).sum(0)
            result[row] = total / shared.sum(0).clamp(min=1)
    return result


def node_gains(rewards: Tensor, group: Tensor, nodes: Tensor, *, whole: float = 0.0, by_leaves: bool = False) -> Tensor:
    """Computes advantages [B, T]: the value of a decision's node minus that of the node before it.

        A_t = V(n) - V(parent of n) + whole (V(n) - V(group))

    The value of a node is the mean reward of the rollouts through it, of the root the mean of the group. With
    `by_leaves`, A_t is divided by the root of the number of rollouts through the node (TreeRL, arXiv 2506.11902).
    rewards: [B], NaN where unknown; group: [B]; nodes: [B, T], as in `branch_advantages`. It is 0 for a node without a
    known reward.
    """
    result = torch.zeros(nodes.shape, dtype=rewards.dtype)
    times = torch.arange(nodes.shape[1])
    for g in group.unique():
        rows = (group == g).nonzero().flatten()
        ids, known = give_missing_nodes_unique_ids(nodes[rows]), ~rewards[rows].isnan()
        group_rewards = rewards[rows].double().nan_to_num(0.0)
        root = group_rewards.sum() / known.sum().clamp(min=1)
        for i, row in enumerate(rows.tolist()):
            shared = ids == ids[i]  # [rollout of the group, decision]
            through = shared & known[:, None]
            leaves = through.sum(0)
            value = group_rewards[:, None].where(through, 0.0).sum(0) / leaves.clamp(min=1)
            begins = F.pad((shared[:, 1:] != shared[:, :-1]).any(0), (1, 0), value=True)
            first = times.where(begins, 0).cummax(0).values  # the node's first decision
            gain = value - torch.cat([root[None], value])[first] + whole * (value - root)
            gain = gain.where(leaves > 0, 0.0)  # equal rewards gain exactly 0: their sums are exact in float64
            result[row] = gain / leaves.clamp(min=1).sqrt() if by_leaves else gain
    return result


def step_gains(values: Tensor) -> Tensor:
    """Returns the gain in value of each step, [rollout, step].

    values: [rollout, 1 + step], before the first step and after each step.
    """
    return values.diff(dim=1)


def turning_point_gains(values: Tensor) -> Tensor:
    """Returns the gain of each step, with the total remaining gain at turning points (TP-GRPO, arXiv 2602.06422).

    values: R_0 .. R_K, [rollout, 1 + step], before the first step and after each step. Returns [rollout, step]. With
    d_k = R_k - R_(k-1) and s_k the sign of d_k (R_K - R_0), step k is a turning point if s_(k-1) < 0 < s_k (no such
    condition for the first step) and R_K - R_k has the sign of d_k. A turning point gets R_K - R_(k-1), any other step
    d_k.
    """
    gain, last = step_gains(values), values[:, -1:]
    sign = (gain * (last - values[:, :1])).sign()
    same_direction_after = gain * (last - values[:, 1:]) > 0
    sign_turns = torch.ones_like(same_direction_after)
    sign_turns[:, 1:] = (sign[:, :-1] < 0) & (sign[:, 1:] > 0)
    return (last - values[:, :-1]).where(same_direction_after & sign_turns, gain)


def segment_gains(values: Tensor, outcome: Tensor, mask: Tensor, *, segment_length: int) -> Tensor:
    """Returns for each decision the gain in value over its segment, [rollout, decision] (VinePPO, arXiv 2410.01679).

    VinePPO cuts responses at reasoning steps; here a segment has `segment_length` decisions. values: [rollout,
    segment], the expected reward at the beginning of each segment; outcome: [rollout], the reward, which is the value
    at the end of the last segment; mask: [rollout, decision] bool, the decisions that segments consist of. The gain is
    0 if a value is unknown (NaN), and outside the mask.
    """
    lengths, segment = mask.sum(1, keepdim=True), (mask.cumsum(1) - 1).clamp(min=0) // segment_length
    next_values = torch.cat([values[:, 1:], outcome[:, None]], 1).gather(1, segment)
    is_last = (segment + 1) * segment_length >= lengths
    gains = outcome[:, None].where(is_last, next_values) - values.gather(1, segment)
    return gains.nan_to_num(0.0).where(mask, 0.0)


def renumber_moments(moment: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Renumbers the moments of the masked-in decisions of each rollout from 0 on without gaps.

    A moment is the denoising step at which a token of a masked response was filled in. moment, mask: [rollout,
    decision]. Returns the new numbers [rollout, decision] int64, 0 outside the mask, and which numbers a rollout has,
    [rollout, moment] bool.
    """
    number = torch.zeros_like(moment)
    for row in range(len(moment)):
        _, number[row, mask[row]] = moment[row, mask[row]].unique(return_inverse=True)
    max_moments = int(number.max()) + 1 if number.numel() else 0
    num_moments = mask.any(1) * (number.where(mask, 0).amax(1) + 1)
    return number, torch.arange(max_moments) < num_moments[:, None]


def mean_per_moment(values: Tensor, number: Tensor, mask: Tensor, num_moments: int) -> Tensor:
    """Averages values over the masked-in decisions of each moment (TraceRL, arXiv 2509.06949).

    values, mask: [rollout, decision]; number: [rollout, decision], as `renumber_moments` returns it. Returns [rollout,
    moment], 0 for moments that a rollout does not have.
    """
    zeros = torch.zeros(len(values), num_moments, dtype=values.dtype)
    total = zeros.scatter_add(1, number, values.where(mask, 0.0))
    return total / zeros.scatter_add(1, number, mask.to(values)).clamp(min=1)


def leave_one_out_returns(
    rewards: Tensor, mask: Tensor, group: Tensor, gamma: float, *, baseline: Literal["others", "released"] = "others"
) -> Tensor:
    """Computes discounted returns of per-decision rewards, minus a leave-one-out baseline (PRIME, arXiv 2502.01456,
    section 3).

    rewards, mask: [rollout, decision]; group: [rollout]; all rollouts of a group must be on one rank. Returns [rollout,
    decision]: sum_{u >= t} gamma^(u - t) (r_u - b), where b is the mean over the group's n - 1 other rollouts of their
    mean reward per decision. It is 0 outside the mask, and for a rollout without others. baseline="released":
    n / (n - 1) (r_u - the mean of the group's n means) in place of r_u - b, as in PRIME's code; both are equal where
    all decisions of a rollout have the same reward.
    """
    masked_rewards = rewards.where(mask, 0)
    means = masked_rewards.sum(1) / mask.sum(1).clamp(min=1)
    differences = torch.zeros_like(masked_rewards)
    for g in group.unique():
        rows = ((group == g) & mask.any(1)).nonzero().flatten()
        if len(rows) > 1:
            num_others = len(rows) - 1
            if baseline == "released":
                differences[rows] = (masked_rewards[rows] - means[rows].mean()) * len(rows) / num_others
            else:
                others = (means[rows].sum() - means[rows]) / num_others
                differences[rows] = masked_rewards[rows] - others[:, None]
    return discounted_returns(differences.where(mask, 0), gamma).where(mask, 0)


def divergence_in_group(logp: Tensor, mask: Tensor, group: Tensor, vocabulary: int) -> Tensor:
    """Computes how far the distributions of a group's rollouts at decision t are apart, [B, T].

        sum_v mean_i (exp(d) - d - 1), d = mean_j log p_j(v) - log p_i(v), clamped to -11..11

    It is the same for all rollouts of a group (D_t of TW-GRPO, arXiv 2505.24718). logp: [B, T, V'] of all tokens of the
    vocabulary, or of some, since the values of disjoint sets of tokens add up. mask: [B, T]; distributions of other
    decisions count as uniform over `vocabulary` tokens. group: [B].
    """
    result = torch.zeros(mask.shape, dtype=logp.dtype, device=logp.device)
    for g in group.unique():
        rows = group == g
        filled = logp[rows].where(mask[rows][..., None], -math.log(vocabulary))
        difference = (filled.mean(0) - filled).clamp(-11, 11)
        result[rows] = (difference.exp() - difference - 1).sum(-1).mean(0)
    return result


def scale_within_group(values: Tensor, mask: Tensor, group: Tensor, eps: float = 1e-8) -> Tensor:
    """Scales values [B, T] to 0..1 over the decisions under the mask [B, T] of all rollouts of a group [B]. Values
    outside the mask are undefined."""
    result = torch.zeros_like(values)
    for g in group.unique():
        rows = group == g
        known = values[rows][mask[rows]]
        if len(known):
            result[rows] = (values[rows] - known.min()) / (known.max() - known.min() + eps)
    return result
