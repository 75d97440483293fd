"""Credit of the turns of conversations, and of spans of responses (such as the steps of a chain of thought).

Lists hold one tensor per rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Computes discounted returns R_t = sum_{k >= t} gamma^(k - t) r_k, [rollout, turn].

    rewards: [rollout, turn], 0 where a rollout has no such turn.
    """
    returns = torch.zeros_like(rewards)
    next_return = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        next_return = rewards[:, t] + gamma * next_return
        returns[:, t] = next_return
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
    """Normalizes returns [rollout, turn] among the same turn of the rollouts of a group. Returns [rollout, turn].

    mask: [rollout, turn], True where the turn exists; group: [rollout]; all rollouts of a group must be on one rank.
    baseline: "mean" of the group, or of its other rollouts ("leave_one_out"). scale: the difference is divided by the
    group's unbiased std + eps ("group_std") or not ("none"). The result is exactly 0 if the returns of the group are
    equal, if there is only one, and where the turn does not exist.

    Raises ValueError if the baseline or the scale is unknown.
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
    """Splits conversations into segments that end at milestones, which are turns with a positive reward (BEACON).

    It is reconstructed from the phrase "milestone-partitioned trajectories". rewards, mask: [rollout, turn]. Returns
    the segment of each turn, [rollout, turn] int64; the return of each segment, [rollout, segment]: gamma^(number of
    its turns - 1) if it ends at a milestone, else 0; and whether the segment exists, [rollout, segment] bool.
    """
    is_milestone = rewards > 0
    segment = is_milestone.cumsum(1) - is_milestone.long()
    max_segments = rewards.shape[1]
    member = torch.nn.functional.one_hot(segment, max_segments) * mask[..., None]  # [rollout, turn, segment]
    num_turns, ends_at_milestone = member.sum(1), (member * is_milestone[..., None]).sum(1)
    returns = gamma ** (num_turns - 1).clamp(min=0).to(rewards) * ends_at_milestone
    return segment, returns, num_turns > 0


def character_shares(pieces: Sequence[str], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Assigns decisions (tokens) to spans of the text by their overlap in characters.

    pieces: the text that each decision adds; a decision that adds none (part of a multi-byte character) belongs to the
    next character. spans: (begin, end) in characters, sorted and disjoint. Returns entries (decision, span, share) as
    [3, entry] float64, one for each span that a decision overlaps; its shares sum to 1.
    """
    entries, end, first_span = [], 0, 0
    for decision, piece in enumerate(pieces):
        begin, end = end, end + len(piece)
        nonempty_end = max(end, begin + 1)
        while first_span < len(spans) and spans[first_span][1] <= begin:
            first_span += 1
        candidates = _spans_before(spans, first_span, nonempty_end)
        overlaps = [(s, _overlap(spans[s], begin, nonempty_end)) for s in candidates]
        total = sum(characters for _, characters in overlaps)
        entries += [(decision, span, characters / total) for span, characters in overlaps]
    return torch.tensor(entries, dtype=torch.float64).view(-1, 3).T


def _spans_before(spans: Sequence[tuple[int, int]], first: int, end: int) -> range:
    """Returns the indices of spans from `first` on that begin before the character `end`."""
    stop = first
    while stop < len(spans) and spans[stop][0] < end:
        stop += 1
    return range(first, stop)


def _overlap(span: tuple[int, int], begin: int, end: int) -> int:
    """Returns the number of characters that `span` and [begin, end) share."""
    return min(span[1], end) - max(span[0], begin)


def unit_shares(units: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Assigns decisions to spans of whole units (such as turns). Returns [3, entry] as `character_shares` does.

    units: [decision] int64, the unit of each decision, or -1 for none; bounds: (first, last + 1) unit of each span.
    """
    unit_spans = {unit: span for span, (begin, end) in enumerate(bounds) for unit in range(begin, end)}
    entries = [(decision, unit_spans[unit], 1.0) for decision, unit in enumerate(units.tolist()) if unit in unit_spans]
    return torch.tensor(entries, dtype=torch.float64).view(-1, 3).T


def distribute_credit(credits: Sequence[Tensor], shares: Sequence[Tensor], decisions: int) -> Tensor:
    """Gives each decision the share-weighted mean of the credits of its spans. Returns [rollout, decision] fp64.

    credits: per rollout, [span]; shares: per rollout, [3, entry] as `character_shares` returns them. A decision outside
    all spans gets 0.
    """
    result = torch.zeros(len(credits), decisions, dtype=torch.float64)
    for row, (credit, (decision, span, share)) in enumerate(zip(credits, shares, strict=True)):
        result[row].index_add_(0, decision.long(), credit.double()[span.long()] * share)
    return result


def softmin_weighted(values: Tensor, temperature: float) -> Tensor:
    """Weights values [span] by softmax(-values / temperature), so that their sum is a soft minimum. Returns [span].

    With temperature 0, the (first) minimum stays and all other values become 0.
    """
    if not len(values):
        return values
    if temperature > 0:
        return (-values / temperature).softmax(0) * values
    return torch.zeros_like(values).index_copy_(0, values.argmin()[None], values.min()[None])


def add_remainder_evenly(values: Tensor, total: float) -> Tensor:
    """Adds the same amount to all values [span] so that their sum is `total`."""
    return values + (total - values.sum()) / max(1, len(values))


def subtract_group_baseline(
    credits: Sequence[Tensor], group: Tensor, against: str, scale: str, eps: float = 1e-6
) -> list[Tensor]:
    """Subtracts a group baseline from the credits [span] of each rollout. Returns one tensor [span] per rollout.

    against: the baseline is the mean over the group of the same span ("span"), of the same span of the other rollouts
    ("others"), or of all spans ("group"); "none" returns the credits unchanged. scale: the difference is divided by the
    unbiased std + eps ("group_std") or not ("none"). A span that no other rollout has, or whose credit equals that of
    all others, gets 0. group: [rollout]; all rollouts of a group must be on one rank.
    """
    if against == "none":
        return list(credits)
    if against == "group":
        return _normalize_over_group(credits, group, scale, eps)
    num_spans = [len(credit) for credit in credits]
    padded = torch.nn.utils.rnn.pad_sequence([*credits], batch_first=True)
    exists = torch.arange(padded.shape[1]) < torch.tensor(num_spans)[:, None]
    baseline = "leave_one_out" if against == "others" else "mean"
    advantages = turn_advantages(padded, exists, group, baseline=baseline, scale=scale, eps=eps)
    return [row[:length] for row, length in zip(advantages, num_spans, strict=True)]


def _normalize_over_group(credits: Sequence[Tensor], group: Tensor, scale: str, eps: float) -> list[Tensor]:
    """Subtracts from the credits [span] of each rollout the mean over all spans of its group, and divides by their
    unbiased std + eps if `scale` is group_std. Groups without variance get 0. group: [rollout]."""
    result = [torch.zeros_like(credit) for credit in credits]
    for g in group.unique():
        rows = (group == g).nonzero().flatten().tolist()
        pooled = torch.cat([credits[row] for row in rows])
        if len(pooled) < 2 or bool((pooled == pooled[0]).all()):
            continue
        divisor = pooled.std() + eps if scale == "group_std" else 1.0
        for row in rows:
            result[row] = (credits[row] - pooled.mean()) / divisor
    return result
