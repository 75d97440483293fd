"""The compiled operators as torch sees them: schemas, shapes (fake kernels) and gradients.

The kernels themselves are registered by the libraries that `compiled` loads. All tensors are [N, D] or [N] here. The
functions that users call are in `operators`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("mmrl", "DEF")
_DENOISE = "Tensor x, Tensor v, Tensor {}, Tensor a_x, Tensor a_v, Tensor std"
_TOKEN = "Tensor logits, Tensor targets"
_HIDDEN = "Tensor hidden, Tensor weight, Tensor targets, Tensor? excluded"
_ROWS = "Tensor entropy, Tensor square, Tensor peak, Tensor log_sum"
_RATIO = "Tensor log_ratio, Tensor advantages, Tensor mask"
_THREE = "(Tensor, Tensor, Tensor)"
_FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = (
    f"denoise_step({_DENOISE.format('noise')}, bool total, bool keep_mean) -> {_THREE}",
    f"denoise_logprob({_DENOISE.format('x_next')}, Tensor? mean_old, Tensor? v_old, Tensor? v_ref, bool total)"
    f" -> {_THREE}",
    f"denoise_logprob_backward(Tensor g_logp, Tensor g_ratio, Tensor g_kl, {_DENOISE.format('x_next')}, Tensor? v_ref,"
    " bool total) -> Tensor",
    f"token_logprob({_TOKEN}, float inverse_temperature) -> {_FIVE}",
    f"token_logprob_backward(Tensor g_logp, Tensor g_entropy, Tensor g_square, {_TOKEN}, {_ROWS},"
    " float inverse_temperature) -> Tensor",
    f"token_logprob_backward_(Tensor g_logp, Tensor g_entropy, Tensor g_square, Tensor(a!) logits, Tensor targets,"
    f" {_ROWS}, float inverse_temperature) -> ()",
    f"hidden_logprob({_HIDDEN}, float inverse_temperature, int chunk) -> {_FIVE}",
    f"hidden_logprob_backward(Tensor g_logp, Tensor g_entropy, Tensor g_square, {_HIDDEN}, {_ROWS},"
    " float inverse_temperature, int chunk, bool for_weight) -> (Tensor, Tensor)",
    "group_advantage(Tensor rewards, Tensor weights, Tensor group, int groups, int baseline, int scale, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "gae(Tensor rewards, Tensor values, Tensor terminated, Tensor truncated, Tensor mask, Tensor? bootstrap,"
    " float gamma, float lam) -> (Tensor, Tensor)",
    f"clipped_surrogate({_RATIO}, float low, float high, int reduction, Tensor? total, float divisor) -> {_THREE}",
    f"clipped_surrogate_backward(Tensor g, {_RATIO}, Tensor factor, float low, float high) -> Tensor",
)
for _schema in SCHEMAS:
    # Inductor must not change strides: the kernels require contiguous columns.
    _library.define(_schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))

Grads = tuple[Any, ...]


def _wide(like: Tensor, *size: int) -> Tensor:
    """Returns an empty fp32 tensor of this size on the device of `like`."""
    return like.new_empty(size, dtype=torch.float32)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("mmrl::denoise_step")
def _(
    x: Tensor, v: Tensor, noise: Tensor, a_x: Tensor, a_v: Tensor, std: Tensor, total: bool, keep_mean: bool
) -> Grads:
    return _wide(x, *x.shape), _wide(x, x.shape[0]), _wide(x, x.shape[0] if keep_mean else 0, x.shape[1])


@torch.library.register_fake("mmrl::denoise_logprob")
def _(x: Tensor, *_: object) -> Grads:
    return tuple(_wide(x, x.shape[0]) for _ in range(3))


@torch.library.register_fake("mmrl::denoise_logprob_backward")
def _(g_logp: Tensor, g_ratio: Tensor, g_kl: Tensor, x: Tensor, v: Tensor, *_: object) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.register_fake("mmrl::token_logprob")
def _(logits: Tensor, targets: Tensor, inverse_temperature: float) -> Grads:
    return tuple(_wide(logits, targets.shape[0]) for _ in range(5))


@torch.library.register_fake("mmrl::token_logprob_backward")
def _(g_logp: Tensor, g_entropy: Tensor, g_square: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("mmrl::token_logprob_backward_")
def _(*_: object) -> None:
    return None


@torch.library.register_fake("mmrl::hidden_logprob")
def _(hidden: Tensor, *_: object) -> Grads:
    return tuple(_wide(hidden, hidden.shape[0]) for _ in range(5))


@torch.library.register_fake("mmrl::hidden_logprob_backward")
def _(
    g_logp: Tensor, g_entropy: Tensor, g_square: Tensor, hidden: Tensor, weight: Tensor, *others: object
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape if others[-1] else (0,))  # last: for_weight


@torch.library.register_fake("mmrl::group_advantage")
def _(rewards: Tensor, weights: Tensor, group: Tensor, groups: int, *_: object) -> Grads:
    return _wide(rewards, rewards.shape[0]), *(_wide(rewards, groups) for _ in range(3))


@torch.library.register_fake("mmrl::gae")
def _(rewards: Tensor, *_: object) -> Grads:
    return _wide(rewards, *rewards.shape), _wide(rewards, *rewards.shape)


@torch.library.register_fake("mmrl::clipped_surrogate")
def _(log_ratio: Tensor, *_: object) -> Grads:
    return _wide(log_ratio), _wide(log_ratio, 3), _wide(log_ratio, log_ratio.shape[0])


@torch.library.register_fake("mmrl::clipped_surrogate_backward")
def _(g: Tensor, log_ratio: Tensor, *_: object) -> Tensor:
    return _wide(log_ratio, *log_ratio.shape)


# ---- hidden states times the output matrix, a chunk of rows at a time ------------------------------------------------


def _chunks(hidden: Tensor, weight: Tensor, excluded: Tensor | None, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of rows with their logits [row, vocabulary]. All chunks reuse the same memory."""
    memory = hidden.new_empty(min(chunk, len(hidden)), len(weight))
    for start in range(0, len(hidden), chunk):
        part = slice(start, min(start + chunk, len(hidden)))
        logits = torch.mm(hidden[part], weight.t(), out=memory[: part.stop - start])
        yield part, logits if excluded is None else logits.index_fill_(1, excluded, -torch.inf)  # their gradient is 0


@torch.library.impl("mmrl::hidden_logprob", "CompositeExplicitAutograd")
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, excluded: Tensor | None, inverse_temperature: float, chunk: int
) -> Grads:
    """Computes `token_logprob` of hidden @ weight.T, a chunk of rows at a time. excluded: ids of probability 0."""
    parts = [
        torch.ops.mmrl.token_logprob(logits, targets[part], inverse_temperature)
        for part, logits in _chunks(hidden, weight, excluded, chunk)
    ]
    return tuple(torch.cat(rows) for rows in zip(*parts, strict=True))


@torch.library.impl("mmrl::hidden_logprob_backward", "CompositeExplicitAutograd")
def _(
    g_logp: Tensor,
    g_entropy: Tensor,
    g_square: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    excluded: Tensor | None,
    entropy: Tensor,
    square: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    inverse_temperature: float,
    chunk: int,
    for_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of hidden states and, if `for_weight`, of the output matrix. The logits of a chunk of rows
    are computed again, and overwritten by their gradient."""
    d_hidden = torch.empty_like(hidden)
    # Chunks add up in fp32: a sum of many bf16 parts would lose the small ones.
    d_weight = weight.new_zeros(weight.shape if for_weight else (0,), dtype=torch.float32)
    for part, d_logits in _chunks(hidden, weight, excluded, chunk):
        rows = [t[part] for t in (targets, entropy, square, peak, log_sum)]
        torch.ops.mmrl.token_logprob_backward_(
            g_logp[part], g_entropy[part], g_square[part], d_logits, *rows, inverse_temperature
        )
        torch.mm(d_logits, weight, out=d_hidden[part])
        if for_weight and weight.dtype == torch.float32:
            d_weight.addmm_(d_logits.t(), hidden[part])
        elif for_weight:
            d_weight += d_logits.t() @ hidden[part]
    return d_hidden, d_weight.to(weight.dtype)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _save_denoise(ctx: Any, inputs: Grads, output: Grads) -> None:
    """Saves the inputs of denoise_logprob that its backward pass needs."""
    x, v, x_next, a_x, a_v, std, _, _, v_ref, ctx.total = inputs
    ctx.save_for_backward(x, v, x_next, a_x, a_v, std, v_ref)


def _denoise_backward(ctx: Any, g_logp: Tensor, g_ratio: Tensor, g_kl: Tensor) -> Grads:
    """Returns the gradients of the ten inputs of denoise_logprob: only the second one, v, has one."""
    grads = (g.contiguous() for g in (g_logp, g_ratio, g_kl))
    return None, torch.ops.mmrl.denoise_logprob_backward(*grads, *ctx.saved_tensors, ctx.total), *[None] * 8


def _save_token(ctx: Any, inputs: Grads, output: Grads) -> None:
    """Saves what the backward pass of token_logprob needs: its inputs, and all outputs but the first (entropy, square
    sum, peak, log of the softmax's sum). The last two outputs have no gradient."""
    logits, targets, ctx.inverse_temperature = inputs
    ctx.save_for_backward(logits, targets, *output[1:])
    ctx.mark_non_differentiable(*output[3:])


def _token_backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, g_square: Tensor, *_: object) -> Grads:
    """Returns the gradients of logits, targets and inverse temperature: only the logits have one."""
    grads = (g.contiguous() for g in (g_logp, g_entropy, g_square))
    d_logits = torch.ops.mmrl.token_logprob_backward(*grads, *ctx.saved_tensors, ctx.inverse_temperature)
    return d_logits, None, None


def _save_hidden(ctx: Any, inputs: Grads, output: Grads) -> None:
    """Saves what the backward pass of hidden_logprob needs: its inputs, and all outputs but the first (entropy, square
    sum, peak, log of the softmax's sum). The last two outputs have no gradient."""
    hidden, weight, targets, excluded, ctx.inverse_temperature, ctx.chunk = inputs
    ctx.save_for_backward(hidden, weight, targets, excluded, *output[1:])
    ctx.mark_non_differentiable(*output[3:])


def _hidden_backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, g_square: Tensor, *_: object) -> Grads:
    """Computes gradients for hidden states and, where it is trained, the head's weight."""
    grads = (g.contiguous() for g in (g_logp, g_entropy, g_square))
    for_weight = ctx.needs_input_grad[1]
    d_hidden, d_weight = torch.ops.mmrl.hidden_logprob_backward(
        *grads, *ctx.saved_tensors, ctx.inverse_temperature, ctx.chunk, for_weight
    )
    return d_hidden, d_weight if for_weight else None, *[None] * 4


def _save_surrogate(ctx: Any, inputs: Grads, output: Grads) -> None:
    """Saves what the backward pass of clipped_surrogate needs, among it the third output, the factor of each row. The
    statistics, the second output, and that factor have no gradient."""
    log_ratio, advantages, mask, ctx.low, ctx.high, _, _, _ = inputs
    ctx.save_for_backward(log_ratio, advantages, mask, output[2])
    ctx.mark_non_differentiable(*output[1:])


def _surrogate_backward(ctx: Any, g: Tensor, *_: object) -> Grads:
    """Returns the gradients of the eight inputs of clipped_surrogate: only the first one, log_ratio, has one."""
    d_log_ratio = torch.ops.mmrl.clipped_surrogate_backward(g.contiguous(), *ctx.saved_tensors, ctx.low, ctx.high)
    return d_log_ratio, *[None] * 7


torch.library.register_autograd("mmrl::denoise_logprob", _denoise_backward, setup_context=_save_denoise)
torch.library.register_autograd("mmrl::token_logprob", _token_backward, setup_context=_save_token)
torch.library.register_autograd("mmrl::hidden_logprob", _hidden_backward, setup_context=_save_hidden)
torch.library.register_autograd("mmrl::clipped_surrogate", _surrogate_backward, setup_context=_save_surrogate)
