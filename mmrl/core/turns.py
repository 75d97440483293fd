"""Credit of the turns of conversations, and of spans of responses. Lists hold a tensor a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def discounted(rewards: Tensor, gamma: float) -> Tensor:
    """[rollout, turn] R_t = sum_{k >= t} gamma^(k - t) r_k of rewards [rollout, turn], 0 where there was no turn."""
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
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


def character_shares(pieces: Sequence[str], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns (decision, span, share), [3, entry] float64, for every decision with characters in a span: of its
    characters that are in spans, the share in this one. pieces: the text that each decision adds; one that adds none is
    a beginning of the next character. spans: begin and end in characters, in order and apart."""
    entries, end, first = [], 0, 0
    for decision, piece in enumerate(pieces):
        begin, end = end, end + len(piece)
        last = max(end, begin + 1)
        while first < len(spans) and spans[first][1] <= begin:
            first += 1
        inside = [(s, _overlap(spans[s], begin, last)) for s in _reached(spans, first, last)]
        whole = sum(letters for _, letters in inside)
        entries += [(decision, span, letters / whole) for span, letters in inside]
    return torch.tensor(entries, dtype=torch.float64).view(-1, 3).T


def _reached(spans: Sequence[tuple[int, int]], first: int, last: int) -> range:
    """Returns the indices of spans from `first` on that begin before `last`."""
    after = first
    while after < len(spans) and spans[after][0] < last:
        after += 1
    return range(first, after)


def _overlap(span: tuple[int, int], begin: int, end: int) -> int:
    return min(span[1], end) - max(span[0], begin)


def unit_shares(number: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Returns (decision, span, share) as `character_shares`, of spans of whole units. number: the unit of each
    decision, [decision] int64; -1: of none."""
    span_of = {unit: span for span, (begin, end) in enumerate(bounds) for unit in range(begin, end)}
    entries = [(decision, span_of[unit], 1.0) for decision, unit in enumerate(number.tolist()) if unit in span_of]
    return torch.tensor(entries, dtype=torch.float64).view(-1, 3).T


def spread(credits: Sequence[Tensor], shares: Sequence[Tensor], decisions: int) -> Tensor:
    """Returns the credit of each decision, [rollout, decision]: the mean of those of its spans, by shares; 0 in none.
    credits: by rollout [span]; shares: by rollout [3, entry] as `character_shares` makes them."""
    result = torch.zeros(len(credits), decisions, dtype=torch.float64)
    for row, (credit, (decision, span, share)) in enumerate(zip(credits, shares, strict=True)):
        result[row].index_add_(0, decision.long(), credit.double()[span.long()] * share)
    return result


def minimum_weighted(values: Tensor, temperature: float) -> Tensor:
    """Returns w_s r_s, w = softmax(-r / T), of values [span], whose sum is near their minimum; with T = 0 the minimum
    stays, the first where there are several, and all else is 0."""
    if not len(values):
        return values
    if temperature > 0:
        return (-values / temperature).softmax(0) * values
    return torch.zeros_like(values).index_copy_(0, values.argmin()[None], values.min()[None])


def split_evenly_beyond(parts: Tensor, total: float) -> Tensor:
    """Returns parts [span] with what they lack of the total added to all alike, so that their sum is the total."""
    return parts + (total - parts.sum()) / max(1, len(parts))


def compared(credits: Sequence[Tensor], group: Tensor, against: str, scale: str, eps: float = 1e-6) -> list[Tensor]:
    """Returns credits [span] of each rollout as they differ from others of its group: from the mean of the same span
    ("span"), of the same span of the others ("others"), of all spans of the group ("group"), or as they are ("none").
    The difference is divided by the unbiased std + eps ("group_std") or not ("none"). A span that is alone, or equal to
    all others, gets 0. group: [rollout]; a group lies on one rank."""
    if against == "none":
        return list(credits)
    if against == "group":
        return _in_groups(credits, group, scale, eps)
    counts = [len(credit) for credit in credits]
    padded = torch.nn.utils.rnn.pad_sequence([*credits], batch_first=True)
    present = torch.arange(padded.shape[1]) < torch.tensor(counts)[:, None]
    baseline = "leave_one_out" if against == "others" else "mean"
    shaped = turn_advantages(padded, present, group, baseline=baseline, scale=scale, eps=eps)
    return [row[:count] for row, count in zip(shaped, counts, strict=True)]


def _in_groups(credits: Sequence[Tensor], group: Tensor, scale: str, eps: float) -> list[Tensor]:
    """Centres the credits [turn] of each rollout by their group's mean, and divides by the group's standard deviation
    where `scale` is group_std. Groups without variance get 0. group: [rollout]."""
    result = [torch.zeros_like(credit) for credit in credits]
    for g in group.unique():
        rows = (group == g).nonzero().flatten().tolist()
        pooled = torch.cat([credits[row] for row in rows])
        if len(pooled) < 2 or bool((pooled == pooled[0]).all()):
            continue
        width = pooled.std() + eps if scale == "group_std" else 1.0
        for row in rows:
            result[row] = (credits[row] - pooled.mean()) / width
    return result
