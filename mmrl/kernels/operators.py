"""The public operators: they check shapes and dtypes, and call the compiled kernel or the torch reference.

Every argument that does not fit raises ValueError, naming it. Conditions on values (a negative std, a group id out of
range) raise RuntimeError on the CPU; on a GPU, where the host does not wait for the check, the rows concerned become
NaN. Results are fp32 (float64 for float64 inputs, which the reference computes).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.kernels import ops as _registered  # noqa: F401  (registers torch.ops.mmrl)
from mmrl.kernels import reference
from mmrl.kernels.compiled import uses_compiled

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = {"mean": False, "sum": True}
BASELINES = ("mean", "leave_one_out", "none")
SCALES = ("group_std", "batch_std", "none")
MODES = ("token_mean", "sequence_mean", "sequence_sum", "constant")
# rows of logits that are computed from hidden states at once: more rows need more memory, fewer rows more time
ROWS_AT_ONCE = {"cpu": 256, "cuda": 2048}


class DenoisingStep(NamedTuple):
    """The next sample x' [N, ...], its log-probability [N] and, on request, the mean of the transition [N, ...]."""

    x_next: Tensor
    logp: Tensor
    mean: Tensor | None


class StepLikelihood(NamedTuple):
    """Each [N]: logp of x', log-ratio to the old policy, exact KL to the reference; None where not requested."""

    logp: Tensor
    log_ratio: Tensor | None
    kl: Tensor | None


class TokenStatistics(NamedTuple):
    """Each of the targets' shape: log-probability, entropy and the sum of squared probabilities."""

    logp: Tensor
    entropy: Tensor
    square_sum: Tensor


class GroupAdvantage(NamedTuple):
    """Advantages [B]; of every group [groups]: scored rollouts, mean, unbiased std, and whether std is exactly 0."""

    advantages: Tensor
    scored: Tensor
    mean: Tensor
    std: Tensor
    equal: Tensor


@torch.no_grad()
def denoise_step(
    x: Tensor,
    v: Tensor,
    noise: Tensor,
    a_x: Tensor,
    a_v: Tensor,
    std: Tensor,
    *,
    reduction: str = "mean",
    keep_mean: bool = False,
) -> DenoisingStep:
    """Computes a stochastic step of a sampler that is linear in (x, v), and its log-probability. Without gradients.

        mean = a_x x + a_v v        x' = mean + std noise        logp = mean (or sum) of log Normal(x'; mean, std)

    x, v, noise: [N, ...]; a_x, a_v, std: [N]. x' and the mean are fp32. logp is what `denoise_logprob` returns for the
    same (x, v, x'), bit for bit. Where std is 0, x' is the mean, and logp is 0:
    a deterministic step is not a decision.
    """
    shape = _denoise_shapes(x, v, noise, "noise", a_x, a_v, std, reduction)
    args: tuple[Any, ...] = (
        _rows(x, wide=True),
        _rows(v),
        _rows(noise, wide=True),
        a_x,
        a_v,
        std,
        REDUCTIONS[reduction],
    )
    if uses_compiled(x, v, noise):
        x_next, logp, mean = torch.ops.mmrl.denoise_step(*args, keep_mean)
    else:
        x_next, logp, mean = reference.denoise_step(*args)
    return DenoisingStep(x_next.view(shape), logp, mean.view(shape) if keep_mean else None)


def denoise_logprob(
    x: Tensor,
    v: Tensor,
    x_next: Tensor,
    a_x: Tensor,
    a_v: Tensor,
    std: Tensor,
    *,
    mean_old: Tensor | None = None,
    v_old: Tensor | None = None,
    v_ref: Tensor | None = None,
    reduction: str = "mean",
) -> StepLikelihood:
    """Computes log-probabilities of x' under Normal(mean, std), mean = a_x x + a_v v, and compares them with those of
    an old policy and a reference policy.

        logp      = mean (or sum) over elements of log Normal(x'; mean, std)
        log_ratio = mean (or sum) of d (2 (x' - mean) + d) / (2 std^2), d = mean - mean_old
        kl        = mean (or sum) of (mean - mean_ref)^2 / (2 std^2), mean_ref from `v_ref`

    log_ratio is logp - logp_old without subtracting two large numbers: exactly 0 where the means agree. Give the old
    policy by `mean_old`, or by `v_old`, from which d = a_v (v - v_old) keeps all digits (means close to each other are
    rounded: up to 1e-8 in log_ratio). x, v, x_next and all of these: [N, ...]; a_x, a_v, std: [N]. v_old and v_ref
    have v's dtype. Gradients flow to `v` alone. Rows whose std is 0 give 0 and have no
    gradient.
    """
    _denoise_shapes(x, v, x_next, "x_next", a_x, a_v, std, reduction)
    for name, other in (("mean_old", mean_old), ("v_old", v_old), ("v_ref", v_ref)):
        if other is not None:
            _fits(name, other, v.shape, v, FLOATS if name == "mean_old" else (v.dtype,))
    if mean_old is not None and v_old is not None:
        raise ValueError("give mean_old or v_old, not both")
    args: tuple[Any, ...] = (
        _rows(x, wide=True).detach(),
        _rows(v),
        _rows(x_next, wide=True).detach(),
        *(t.detach() for t in (a_x, a_v, std)),
        None if mean_old is None else _rows(mean_old, wide=True).detach(),
        None if v_old is None else _rows(v_old).detach(),
        None if v_ref is None else _rows(v_ref).detach(),
        REDUCTIONS[reduction],
    )
    logp, ratio, kl = (
        torch.ops.mmrl.denoise_logprob(*args) if uses_compiled(x, v, x_next) else reference.denoise_logprob(*args)
    )
    has_old = mean_old is not None or v_old is not None
    return StepLikelihood(logp, ratio if has_old else None, None if v_ref is None else kl)


def token_logprob(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, columns: tuple[int, int] | None = None
) -> TokenStatistics:
    """Computes log-probabilities of targets, entropy and sum of squared probabilities of softmax(logits / temperature).

    logits: [..., V], a slice or a view is fine; targets: [...] int64 ids in the whole vocabulary. `columns` (start,
    stop) restricts the distribution to those columns, and only they are read. Impossible tokens (-inf) add nothing.
    Gradients flow to `logits` from all three results; only the logits are saved for them at full size.
    """
    if logits.dim() == 0 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets have shape {list(targets.shape)}, but logits have {list(logits.shape)}, which must be the same "
            "without the last dimension"
        )
    _fits("logits", logits, logits.shape, logits)  # not empty, and of a supported dtype
    _fits("targets", targets, targets.shape, logits, (torch.int64,))
    scale = _inverse(temperature)
    logits, targets = _columns(logits, -1, targets, columns)
    if not uses_compiled(logits):
        return TokenStatistics(*reference.token_logprob(logits, targets, scale))
    # the kernel reads slices of 2 or 3 dimensions without a copy, if their columns are adjacent
    flat = logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    rows = torch.ops.mmrl.token_logprob(flat, targets.reshape(-1).contiguous(), scale)
    return TokenStatistics(*(r.view(targets.shape) for r in rows[:3]))  # the others are for the backward pass


def hidden_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    columns: tuple[int, int] | None = None,
    excluded: Tensor | None = None,
    chunk: int | None = None,
) -> TokenStatistics:
    """Computes `token_logprob` of logits = hidden @ weight.T, `chunk` rows at a time, without storing all logits.

    hidden: [..., H]; weight: [V, H], the output matrix, in the dtype of `hidden`, which logits have too; targets: [...]
    int64. `columns` (start, stop) restricts the vocabulary to these rows of the matrix, or `excluded`, [n] int64, lists
    tokens of probability 0. Logits are recomputed in backward. Gradients flow to `hidden` and `weight`.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets have shape {list(targets.shape)}, but hidden has {list(hidden.shape)}, which must be the same "
            "without the last dimension"
        )
    _fits("hidden", hidden, hidden.shape, hidden)  # not empty, and of a supported dtype
    if weight.dim() != 2:
        raise ValueError(f"weight must be [V, H], got {list(weight.shape)}")
    _fits("weight", weight, (weight.shape[0], hidden.shape[-1]), hidden, (hidden.dtype,))
    _fits("targets", targets, targets.shape, hidden, (torch.int64,))
    if excluded is not None and columns is not None:
        raise ValueError("give columns or excluded, not both")
    scale = _inverse(temperature)
    weight, shifted_targets = _columns(weight, 0, targets, columns)
    size = chunk or ROWS_AT_ONCE.get(hidden.device.type, 1024)
    flat, ids = hidden.reshape(-1, hidden.shape[-1]), shifted_targets.reshape(-1).contiguous()
    if uses_compiled(hidden):
        # the outputs after the third are for the backward pass
        rows = torch.ops.mmrl.hidden_logprob(flat, weight, ids, excluded, scale, size)[:3]
    else:
        rows = reference.hidden_logprob(flat, weight, ids, excluded, scale, size)
    return TokenStatistics(*(r.view(targets.shape) for r in rows))


@torch.no_grad()
def group_advantage(
    rewards: Tensor,
    group: Tensor,
    groups: int,
    *,
    weights: Tensor | None = None,
    baseline: str = "mean",
    scale: str = "group_std",
    eps: float = 1e-6,
) -> GroupAdvantage:
    """Computes the advantage of each rollout relative to its group, on the tensors' device.

    rewards: [B] or [B, K] (then sum_k w_k r_k, `weights` [K], ones if None; a component of weight 0 is ignored);
    group: [B] int64 ids in [0, groups), in any order; a group may be empty.

    baseline  mean (arXiv 2402.03300), leave_one_out (arXiv 2402.14740) or none
    scale     group_std or batch_std, the unbiased std + eps, or none (arXiv 2503.20783)

    A rollout with a NaN gets 0 and is left out of every mean and std. A group whose scored rewards are all equal gets
    exactly 0 under a baseline, and `equal` marks it.
    """
    if baseline not in BASELINES or scale not in SCALES:
        raise ValueError(f"baseline must be one of {BASELINES}, scale one of {SCALES}; got {baseline!r} and {scale!r}")
    if rewards.dim() not in (1, 2):
        raise ValueError(f"rewards must be [B] or [B, K], got {list(rewards.shape)}")
    table = rewards.view(-1, 1) if rewards.dim() == 1 else rewards
    _fits("rewards", table, table.shape, table, (torch.float32, torch.float64))  # not empty, and of these dtypes
    _fits("group", group, table.shape[:1], table, (torch.int64,))
    if groups < 1:
        raise ValueError(f"groups must be positive, got {groups}")
    if weights is None:
        weights = table.new_ones(table.shape[1])
    _fits("weights", weights, table.shape[1:], table, (table.dtype,))
    args: tuple[Any, ...] = (
        *(t.contiguous() for t in (table, weights, group)),
        *(groups, BASELINES.index(baseline), SCALES.index(scale), float(eps)),
    )
    advantages, scored, mean, std = (
        torch.ops.mmrl.group_advantage(*args) if uses_compiled(table) else reference.group_advantage(*args)
    )
    return GroupAdvantage(advantages, scored, mean, std, std == 0)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    lam: float,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes generalised advantage estimates (arXiv 1506.02438), and returns = advantages + values, all [B, T].

        delta_t = r_t + gamma v'_t - v_t        A_t = delta_t + gamma lam A_{t+1} within one episode

    v'_t is 0 where `terminated`, `bootstrap`[t] (the value of the final observation) where the episode is cut off, and
    values[t + 1] elsewhere. An episode is cut off where `truncated`, in the last column, and before a masked step.
    Termination wins where both flags are set. Steps outside `mask` give 0 and do not influence other steps.

    Without `bootstrap`, an episode that is cut off raises RuntimeError on the CPU and gives NaN on a GPU: a value of 0
    would treat the time limit as a termination.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [B, T], got {list(rewards.shape)}")
    counted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    # rewards must not be empty; without `bootstrap` they stand in for it in the check of shapes
    _fits("rewards", rewards, rewards.shape, rewards, (torch.float32, torch.float64))
    for name, t in (("values", values), ("bootstrap", rewards if bootstrap is None else bootstrap)):
        _fits(name, t, rewards.shape, rewards, (rewards.dtype,))
    flags = (("terminated", terminated), ("truncated", truncated), ("mask", counted))
    for name, t in flags:
        _fits(name, t, rewards.shape, rewards, None)
    args: tuple[Any, ...] = (
        *(t.contiguous() for t in (rewards, values, *(t.bool() for _, t in flags))),
        *(None if bootstrap is None else bootstrap.contiguous(), float(gamma), float(lam)),
    )
    return torch.ops.mmrl.gae(*args) if uses_compiled(rewards) else reference.gae(*args)


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    mode: str = "token_mean",
    total: Tensor | float | None = None,
    length: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes PPO's clipped surrogate loss, a scalar to minimise, and statistics.

        values = -min(r A, clamp(r, 1 - low, 1 + high) A), r = exp(log_ratio)        PPO, arXiv 1707.06347

    log_ratio: [B, T]; advantages: [B] or [B, T], detached; mask: [B, T]. `mode`: token_mean, sequence_mean,
    sequence_sum or constant, how a masked mean combines the decisions; `total`: the number of counted decisions or
    rollouts of the whole batch, 0-d or a number; `length`: the divisor of constant. Statistics are means over the
    counted decisions: ratio, clip_low, clip_high. Gradients flow to `log_ratio`.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if mode == "constant" and (length is None or length <= 0):
        raise ValueError(f"mode 'constant' needs a positive length, got {length}")
    if log_ratio.dim() != 2:
        raise ValueError(f"log_ratio must be [B, T], got {list(log_ratio.shape)}")
    # compared with itself: only checks that it is not empty, and of these dtypes
    _fits("log_ratio", log_ratio, log_ratio.shape, log_ratio, (torch.float32, torch.float64))
    _fits("mask", mask, log_ratio.shape, log_ratio, None)
    a = advantages.detach()
    a = a[:, None] if a.dim() == 1 else a
    if a.dim() != 2 or a.shape[0] != log_ratio.shape[0] or a.shape[1] not in (1, log_ratio.shape[1]):
        raise ValueError(f"advantages must be [B] or [B, T], got {list(advantages.shape)}")
    _fits("advantages", a, a.shape, log_ratio, (log_ratio.dtype,))
    divisor = float(length) if mode == "constant" and length is not None else 1.0
    whole = total.detach().to(log_ratio.device, torch.float64).reshape(()) if isinstance(total, Tensor) else None
    if total is not None and whole is None:  # filled on the device, without a copy from the host
        whole = torch.full((), float(total), dtype=torch.float64, device=log_ratio.device)
    # reductions of the kernel: 0 token_mean, 1 sequence_mean, 2 the sums of sequence_sum and constant, which differ in
    # their divisor
    args: tuple[Any, ...] = (
        log_ratio.contiguous(),
        (a if a.stride(1) == 1 or a.shape[1] == 1 else a.contiguous()).expand_as(log_ratio),
        mask.bool().contiguous(),
        *(float(clip_low), float(clip_high), min(MODES.index(mode), 2), whole, divisor),
    )
    if uses_compiled(log_ratio):
        loss, stats, _ = torch.ops.mmrl.clipped_surrogate(*args)
    else:
        loss, stats = reference.clipped_surrogate(*args)
    return loss, dict(zip(("ratio", "clip_low", "clip_high"), stats.unbind(), strict=True))


def _denoise_shapes(
    x: Tensor, v: Tensor, other: Tensor, name: str, a_x: Tensor, a_v: Tensor, std: Tensor, reduction: str
) -> torch.Size:
    """Checks the arguments of a denoising kernel: x, v and `other` [N, ...], the coefficients a_x, a_v and std [N], and
    the reduction. name: the name of the parameter `other`, for messages. Returns the shape of x. Raises ValueError if
    they do not fit."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    if x.dim() < 2:
        raise ValueError(f"x must be [N, ...], got {list(x.shape)}")
    _fits("x", x, x.shape, x)  # not empty, and of a supported dtype
    _fits("v", v, x.shape, x)
    _fits(name, other, x.shape, x)
    # coefficients are float32, or float64 for a float64 network
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    for label, t in (("a_x", a_x), ("a_v", a_v), ("std", std)):
        _fits(label, t, x.shape[:1], x, (wide,))
    return x.shape


def _fits(
    name: str,
    t: Tensor,
    shape: torch.Size | tuple[int, ...],
    like: Tensor,
    dtypes: tuple[torch.dtype, ...] | None = FLOATS,
) -> None:
    """Raises ValueError if `t` is empty or has another shape than `shape`, another device than `like`, or none of
    `dtypes` (None: any). name: the argument, for the message."""
    if t.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(t.shape)}")
    if t.numel() == 0:
        raise ValueError(f"{name} is empty: shape {list(t.shape)}")
    if t.device != like.device:
        raise ValueError(f"{name} is on {t.device}, the other tensors on {like.device}")
    if dtypes is not None and t.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}, got {t.dtype}")


def _rows(t: Tensor, wide: bool = False) -> Tensor:
    """Returns a tensor [N, ...] as [N, D] with adjacent elements; in at least fp32 if `wide`."""
    flat = t.reshape(t.shape[0], -1)
    flat = flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
    return flat.float() if wide and t.dtype in (torch.bfloat16, torch.float16) else flat


def _columns(t: Tensor, axis: int, targets: Tensor, columns: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Cuts columns (start, stop) out of logits or the head's weight along `axis`, and shifts the targets accordingly.
    Raises ValueError."""
    if columns is None:
        return t, targets
    start, stop = columns
    if not 0 <= start < stop <= t.shape[axis]:
        raise ValueError(f"columns {start}..{stop} must lie within the {t.shape[axis]} columns")
    return t.narrow(axis, start, stop - start), targets - start


def _inverse(temperature: float) -> float:
    """Returns 1 / temperature. Raises ValueError unless it is positive and finite."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    return 1.0 / temperature
