"""Credit assignment: the share of a rollout's credit that each decision gets."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.turns import discounted


def branch_advantages(
    rewards: Tensor, group: Tensor, nodes: Tensor, *, scale: str = "group_std", eps: float = 1e-6
) -> Tensor:
    """[B, T]: advantages of the decisions of a tree of rollouts, step by step (BranchGRPO, arXiv 2509.06040).

    rewards [B] (NaN where unscored), group [B], nodes [B, T] int64: rollouts with the same id at t in one group made
    decision t together; -1 is nobody else's. A node is worth the mean reward of its leaves; its advantage at t is that
    worth minus the mean over the nodes of its group at t, divided by their unbiased std + eps ("group_std") or not
    ("none"). Where all nodes of a depth are worth the same, or there is one, it is exactly 0; so it is for nodes
    without a scored leaf. Without shared nodes every column is the group-normalised reward.

    Raises ValueError for an unknown scale.
    """
    if scale not in ("group_std", "none"):
        raise ValueError(f"scale of branch advantages must be group_std or none; got {scale!r}")
    result = torch.zeros(nodes.shape, dtype=rewards.dtype, device=rewards.device)
    for g in group.unique():
        rows = (group == g).nonzero().flatten()
        for t in range(nodes.shape[1]):
            _, node = alone_where_missing(nodes[rows, t]).unique(return_inverse=True)
            worth = torch.stack([rewards[rows][node == n].nanmean() for n in range(int(node.max()) + 1)])
            scored = worth[~worth.isnan()]
            if len(scored) < 2 or bool((scored == scored[0]).all()):
                continue
            advantage = worth - scored.mean()
            if scale == "group_std":
                advantage = advantage / (scored.std() + eps)
            result[rows, t] = advantage.nan_to_num(0.0)[node]
    return result


def alone_where_missing(ids: Tensor) -> Tensor:
    """[B] or [B, T]: ids of nodes, in which each -1 is a node that no other row has: what ended earlier shares
    nothing."""
    row = torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
    return ids.where(ids >= 0, -1 - row)


def subtree_advantages(rewards: Tensor, group: Tensor, nodes: Tensor, *, weights: str = "alike") -> Tensor:
    """[B]: rewards less the means of the subtrees that a rollout is in, averaged over these. TreePO, arXiv 2508.17445.

        A_i = sum_S w_S (R_i - mean_{j in S} R_j) / sum_S w_S

    over the sets S of at least two scored rollouts: the whole group of i, and those that share a decision with it. w is
    1 ("alike") or the size of the set ("size"). rewards [B] (NaN where unscored, which gets 0), group [B], nodes [B, T]
    as in `branch_advantages`. A set of equal rewards adds exactly 0.
    """
    result = torch.zeros_like(rewards)
    for g in group.unique():
        rows = ((group == g) & ~rewards.isnan()).nonzero().flatten()
        ids, own = alone_where_missing(nodes[rows]), rewards[rows]
        for member, row in enumerate(rows.tolist()):
            sharing = torch.cat([torch.ones(len(rows), 1, dtype=torch.bool), ids == ids[member]], 1).unique(dim=1)
            sets = [own[subtree] for subtree in sharing.unbind(1) if int(subtree.sum()) > 1]
            gaps = [own[member] - s.mean() if bool((s != s[0]).any()) else own.new_zeros(()) for s in sets]
            sizes = torch.tensor([len(s) if weights == "size" else 1 for s in sets], dtype=own.dtype)
            if gaps:
                result[row] = (sizes * torch.stack(gaps)).sum() / sizes.sum()
    return result


def shared_means(values: Tensor, group: Tensor, nodes: Tensor) -> Tensor:
    """[B, T]: for each decision the mean of `values` [B] over the rollouts of its group that share it, as ARPO (arXiv
    2507.19849) has the advantages of shared tokens. NaN is left out of the means; where nothing is known it is 0."""
    result = torch.zeros(nodes.shape, dtype=values.dtype)
    for g in group.unique():
        rows = (group == g).nonzero().flatten()
        ids, own = alone_where_missing(nodes[rows]), values[rows]
        for member, row in enumerate(rows.tolist()):
            sharing = (ids == ids[member]) & ~own.isnan()[:, None]
            total = own.nan_to_num(0.0)[:, None].where(sharing, 0.0).sum(0)
            result[row] = total / sharing.sum(0).clamp(min=1)
    return result


def gains(worth: Tensor) -> Tensor:
    """[rollout, step] what each step added: differences of `worth` [rollout, 1 + step], that of the beginning and
    of the end of each step."""
    return worth.diff(dim=1)


def turned(worth: Tensor) -> Tensor:
    """`gains`, but of a step at which a chain turns towards its outcome all that comes after its beginning. TP-GRPO,
    arXiv 2602.06422.

    With d_k the gain of step k, R_K the last worth and s_k the sign of d_k (R_K - R_0), it turns where s_(k-1) < 0 <
    s_k and R_K - R_k has the sign of d_k; the first step where the latter holds.
    """
    added, last = gains(worth), worth[:, -1:]
    sign = (added * (last - worth[:, :1])).sign()
    onwards = added * (last - worth[:, 1:]) > 0
    after_a_step_away = torch.ones_like(onwards)
    after_a_step_away[:, 1:] = (sign[:, :-1] < 0) & (sign[:, 1:] > 0)
    return (last - worth[:, :-1]).where(onwards & after_a_step_away, added)


def segment_gains(worth: Tensor, outcome: Tensor, mask: Tensor, *, every: int) -> Tensor:
    """[rollout, decision]: what the segment that a decision belongs to added, its end's worth less its beginning's.
    VinePPO, arXiv 2410.01679, with segments in place of steps of reasoning.

    worth [rollout, segment]: what is expected at the beginning of each segment of `every` decisions; outcome [rollout]:
    what came of it, which is the worth of the end of the last one; mask [rollout, decision], where segments are counted
    by what counts. It is 0 where a worth is unknown (NaN), and outside the mask.
    """
    lengths, segment = mask.sum(1, keepdim=True), (mask.cumsum(1) - 1).clamp(min=0) // every
    after = torch.cat([worth[:, 1:], outcome[:, None]], 1).gather(1, segment)
    last = (segment + 1) * every >= lengths
    gains = outcome[:, None].where(last, after) - worth.gather(1, segment)
    return gains.nan_to_num(0.0).where(mask, 0.0)


def dense_moments(moment: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The moments [rollout, decision] of decisions that count, numbered from 0 on without gaps, int64; and which there
    are, [rollout, moment] bool. Moments in which nothing that counts was decided are passed over. What does not count
    gets number 0."""
    number = torch.zeros_like(moment)
    for row in range(len(moment)):
        _, number[row, mask[row]] = moment[row, mask[row]].unique(return_inverse=True)
    count = int(number.max()) + 1 if number.numel() else 0
    counted = mask.any(1) * (number.where(mask, 0).amax(1) + 1)
    return number, torch.arange(count) < counted[:, None]


def mean_by_moment(values: Tensor, number: Tensor, mask: Tensor, count: int) -> Tensor:
    """[rollout, moment] means of `values` [rollout, decision] over the decisions that count and have that number; 0 for
    moments that a rollout does not have. TraceRL, arXiv 2509.06949. count: of moments."""
    blank = torch.zeros(len(values), count, dtype=values.dtype)
    added = blank.scatter_add(1, number, values.where(mask, 0.0))
    return added / blank.scatter_add(1, number, mask.to(values)).clamp(min=1)


def leave_one_out_returns(rewards: Tensor, mask: Tensor, group: Tensor, gamma: float) -> Tensor:
    """Computes returns of the rewards of decisions, less what decisions of the other rollouts of the group earn: each
    of these rollouts counts by its mean (PRIME, arXiv 2502.01456, equation of section 3).

    rewards, mask: [rollout, decision]; group: [rollout]. Returns [rollout, decision]: sum_{u >= t} gamma^(u - t) (r_u -
    b); 0 where no decision counts and for a rollout that is alone. A group lies on one rank.
    """
    counted = rewards.where(mask, 0)
    means = counted.sum(1) / mask.sum(1).clamp(min=1)
    differences = torch.zeros_like(counted)
    for g in group.unique():
        rows = ((group == g) & mask.any(1)).nonzero().flatten()
        if len(rows) > 1:
            baseline = (means[rows].sum() - means[rows]) / (len(rows) - 1)
            differences[rows] = counted[rows] - baseline[:, None]
    return discounted(differences.where(mask, 0), gamma).where(mask, 0)
