"""Classifier-free guidance around a velocity, the same in sampling and in replay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def scale_at(sigma: Tensor, scale: float, interval: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Returns the guidance scale [row]: `scale` where low <= sigma <= high, else 1, which is no guidance (arXiv
    2404.07724)."""
    low, high = interval
    return torch.where((sigma >= low) & (sigma <= high), scale, 1.0).float()


def guided(
    conditional: Tensor, unconditional: Callable[[], Tensor], scale: Tensor, norm_patch: int | None = None
) -> Tensor:
    """Returns the guided prediction u + scale (c - u), [row, ...], with c the conditional and u the unconditional
    prediction (arXiv 2207.12598).

    scale: [row]. norm_patch: if given, the result is rescaled by `with_norm`. `unconditional` is called only if some
    scale is not 1. Its output gets no gradient: that would double the backward pass and train only what does not depend
    on the prompt.
    """
    if bool((scale == 1).all()):
        return conditional
    with torch.no_grad():
        u = unconditional()
    rows = scale.to(u.device).view(-1, *[1] * (u.dim() - 1))
    # u + (c - u) is not c to the last bit, and a row must not depend on whether its neighbours are guided.
    combined = u + rows * (conditional - u)
    if norm_patch is not None:
        combined = with_norm(combined, conditional, norm_patch)
    return torch.where(rows == 1, conditional, combined)


def with_norm(combined: Tensor, conditional: Tensor, patch: int) -> Tensor:
    """Rescales `combined` [row, channel, height, width] so that each square of `patch` x `patch` latents has the norm
    of `conditional`, as diffusers' pipelines of Qwen-Image do."""

    def squares(v: Tensor) -> Tensor:
        """Returns [row, channel, rows of squares, patch, columns of squares, patch]."""
        return v.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))

    def norms(v: Tensor) -> Tensor:
        """Returns the norm of each square over its channels and latents, in the shape of `squares` with 1 for these."""
        return squares(v).square().sum((1, 3, 5), keepdim=True).sqrt()

    tiny = torch.finfo(combined.dtype).tiny
    scaled = squares(combined) * (norms(conditional) / norms(combined).clamp_min(tiny))
    return scaled.view_as(combined)


def with_grad(value: Tensor, conditional: Tensor, scale: Tensor) -> Tensor:
    """Returns `value` [row, ...], a saved result of `guided` for the same weights, with the gradient of `guided`
    attached: scale [row] times that of `conditional`. The unconditional prediction is not needed."""
    rows = scale.to(value.device).view(-1, *[1] * (value.dim() - 1))
    return value + rows * (conditional - conditional.detach())
