"""Reference implementations of all operators in plain torch. Arguments are those of `operators`, flattened to [N, D].

They are used where no kernels are compiled, and for float64; the compiled kernels are tested against them. Computation
is in fp32, or in the inputs' dtype if it is wider. Values are checked on the CPU only: a check on a GPU would make the
host wait.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)  # constant of the Gaussian log-density; tau is 2 pi


def denoise_step(
    x: Tensor, v: Tensor, noise: Tensor, a_x: Tensor, a_v: Tensor, std: Tensor, total: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples Gaussian denoising steps a_x x + a_v v + std noise. Returns the next latents [N, element], their
    log-probability [N], and the means [N, element]. total: sum over elements instead of mean."""
    mean = _wide(x) * a_x[:, None] + _wide(v) * a_v[:, None]
    x_next = mean + std[:, None] * _wide(noise)
    return x_next, _likelihood(mean, x_next, std, total)[0], mean


def denoise_logprob(
    x: Tensor,
    v: Tensor,
    x_next: Tensor,
    a_x: Tensor,
    a_v: Tensor,
    std: Tensor,
    mean_old: Tensor | None,
    v_old: Tensor | None,
    v_ref: Tensor | None,
    total: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log-probability, log-ratio to the old step and KL to the reference of Gaussian denoising steps, [N]
    each. x, v, x_next: [N, element]; a_x, a_v, std: [N]; total: sum over elements instead of mean."""
    x, v = _wide(x), _wide(v)
    mean = a_x[:, None] * x + a_v[:, None] * v
    difference = None if mean_old is None else mean - _wide(mean_old)
    if v_old is not None:
        difference = a_v[:, None] * (v - _wide(v_old))
    ref_difference = None if v_ref is None else a_v[:, None] * (v - _wide(v_ref))
    return _likelihood(mean, _wide(x_next), std, total, difference, ref_difference)


def token_logprob(logits: Tensor, targets: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log-probability, entropy and sum of squared probabilities of targets [...] under softmax(logits [...,
    vocabulary] x inverse temperature)."""
    _assert((targets >= 0) & (targets < logits.shape[-1]), f"targets must be in [0, {logits.shape[-1]})")
    logp = (_wide(logits) * inverse_temperature).log_softmax(-1)
    p = logp.exp()
    # For tokens of probability 0, logp is -inf. It is replaced by 0, since 0 * -inf would make the entropy NaN.
    entropy = -(p * logp.masked_fill(logp.isneginf(), 0.0)).sum(-1)
    return logp.gather(-1, targets[..., None]).squeeze(-1), entropy, p.square().sum(-1)


def hidden_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, excluded: Tensor | None, inverse_temperature: float, chunk: int
) -> tuple[Tensor, ...]:
    """Computes log-probability, entropy and sum of squared probabilities of targets [N] from hidden states [N, width]
    and the head's weight [vocabulary, width], `chunk` rows at a time; logits are recomputed in backward. excluded: ids
    of probability 0."""

    def of_chunk(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the statistics of some rows. h: [row, width]; t: their targets [row]."""
        logits = h @ weight.t()
        if excluded is not None:
            logits = logits.index_fill(1, excluded, -torch.inf)
        return token_logprob(logits, t, inverse_temperature)

    pieces = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    parts = [checkpoint(of_chunk, h, t, use_reentrant=False) for h, t in pieces]  # logits are recomputed in backward
    return tuple(torch.cat(rows) for rows in zip(*parts, strict=True))


def group_advantage(
    rewards: Tensor, weights: Tensor, group: Tensor, groups: int, baseline: int, scale: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes advantages, counts, means and standard deviations of groups. rewards, weights: [N, component]; group:
    [N]; baseline: 0 mean, 1 leave-one-out, 2 none; scale: 0 group, 1 batch, 2 none."""
    _assert((group >= 0) & (group < groups), f"group must be in [0, {groups})")
    reward = torch.where(weights != 0, _wide(rewards) * weights, 0).sum(1)
    count, mean, std, equal = _moments(reward, group, groups)
    centred = reward if baseline == 2 else (reward - mean[group]).where(~equal[group], 0)
    if baseline == 1:
        centred = centred * (count / (count - 1).clamp(min=1))[group]
    if scale != 2:
        divisor = std[group] if scale == 0 else _moments(reward, torch.zeros_like(group), 1)[2]  # [2]: the std
        centred = torch.where(divisor > 0, centred / (divisor + eps), 0)
    return centred.where(~reward.isnan(), 0), count, mean, std


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    bootstrap: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Computes GAE advantages and returns (advantages + values), both [B, T]. mask: [B, T], real steps; bootstrap: [B,
    T], the value after a step where an episode is cut off."""
    has_next = torch.zeros_like(mask)
    has_next[:, :-1] = mask[:, 1:]
    continues = mask & has_next & ~terminated & ~truncated
    cut = mask & ~terminated & ~continues
    if bootstrap is None:
        _assert(~cut, "gae: an episode is cut off without termination; give bootstrap [B, T] there")
        bootstrap = torch.full_like(values, torch.nan)
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    next_values = bootstrap.where(cut, next_values.where(continues, 0))
    delta = (rewards + gamma * next_values - values).where(mask, 0)
    advantage = torch.zeros_like(delta[:, 0])
    advantages = []
    for t in reversed(range(delta.shape[1])):
        advantage = delta[:, t] + gamma * lam * advantage.where(continues[:, t], 0)
        advantages.append(advantage)
    result = torch.stack(advantages[::-1], 1)
    return result, (result + values).where(mask, 0)


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    reduction: int,
    total: Tensor | None,
    divisor: float,
) -> tuple[Tensor, Tensor]:
    """Computes PPO's clipped loss of log-ratios and advantages [B, T], and (mean ratio, clipped below, clipped above).
    reduction: 0 token mean, 1 sequence mean, 2 sequence sum. low, high: the clip range is 1 - low .. 1 + high. total:
    the number of decisions or rollouts to divide by, None: those here; divisor: a further one."""
    ratio = log_ratio.where(mask, 0).exp()
    a = advantages.where(mask, 0)
    rows = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a).where(mask, 0).sum(1)
    if reduction == 1:
        rows = rows / mask.sum(1).clamp(min=1)
    count = mask.sum() if reduction == 0 else mask.any(1).sum()
    loss = rows.sum() / ((count if total is None else total).clamp(min=1) * divisor)
    stats = torch.stack([ratio.where(mask, 0), (a < 0) & (ratio < 1 - low), (a > 0) & (ratio > 1 + high)])
    return loss.to(ratio.dtype), stats.detach().sum((1, 2)) / mask.sum().clamp(min=1)


def _likelihood(
    mean: Tensor,
    x_next: Tensor,
    std: Tensor,
    total: bool,
    difference: Tensor | None = None,
    ref_difference: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probability, log-ratio and KL of Gaussian steps, [N] each; 0 where std is 0.

    mean, x_next: [N, element]. difference: mean minus the old policy's mean; ref_difference: mean minus the reference
    policy's mean, both [N, element]. Without them log-ratio and KL are 0. total: sum over elements instead of mean.
    """
    _assert(std >= 0, "std must not be negative")
    is_random, size = std != 0, mean.shape[1]
    std = std.where(is_random, 1)
    variance = std.square()
    factor = 1 if total else 1 / size
    deviation = x_next - mean
    logp = -deviation.square().sum(1) * factor / (2 * variance)
    logp = logp - (std.log() + HALF_LOG_TAU) * (size if total else 1)
    ratio = kl = torch.zeros_like(logp)
    if difference is not None:  # exactly 0 for equal means, unlike a difference of two log-probabilities
        ratio = (difference * (2 * deviation + difference)).sum(1) * factor / (2 * variance)
    if ref_difference is not None:
        kl = ref_difference.square().sum(1) * factor / (2 * variance)
    return logp.where(is_random, 0), ratio.where(is_random, 0), kl.where(is_random, 0)


def _moments(reward: Tensor, index: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns for each unit (group) the number of scored rewards, their mean and unbiased std, and whether they are all
    equal; [unit] each.

    reward: [N], NaN where it is not scored. index: [N], the unit of each reward. units: number of units.
    """
    scored = ~reward.isnan()
    zeros = reward.new_zeros(units)
    count = zeros.index_add(0, index, scored.to(reward.dtype))
    low = (zeros + torch.inf).scatter_reduce(0, index, reward.where(scored, torch.inf), "amin")
    high = (zeros - torch.inf).scatter_reduce(0, index, reward.where(scored, -torch.inf), "amax")
    equal = high <= low
    mean = zeros.index_add(0, index, reward.where(scored, 0)) / count.clamp(min=1)
    mean = torch.where(equal, torch.where(count > 0, low, 0), mean)
    squares = zeros.index_add(0, index, (reward - mean[index]).where(scored, 0).square())
    return count, mean, (squares / (count - 1).clamp(min=1)).sqrt(), equal


def _wide(x: Tensor) -> Tensor:
    """Returns the tensor in fp32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _assert(condition: Tensor, message: str) -> None:
    """Raises RuntimeError unless `condition` is True everywhere; on the CPU only, see the module."""
    if condition.device.type == "cpu":
        torch._assert_async(condition.all(), message)
