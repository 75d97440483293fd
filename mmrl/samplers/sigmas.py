"""Sigma grids: the noise levels that a sampler visits, from pure noise (1) down to data (0).

A grid is one array. A step is an integer index into it: a timestep is never looked up by its value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """The noise levels of a chain.

    sigmas: [steps + 1] fp32, strictly decreasing, usually to 0. times: [steps] fp32, the network's time input at each
    step: sigma times a constant for flow models, the training timestep for models that predict the noise. DDIM grids
    hold float64 sigmas, because near 1 an fp32 sigma loses the digits of the signal.
    """

    sigmas: Tensor
    times: Tensor

    def __len__(self) -> int:
        return len(self.times)


def linear(steps: int) -> Tensor:
    """Returns the sigmas 1, 1 - 1/steps, ..., 0, [steps + 1] fp32. Raises ValueError for fewer than one step."""
    if steps < 1:
        raise ValueError(f"a sigma grid needs at least 1 step, got {steps}")
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64).float()


def shifted(steps: int, shift: float) -> Tensor:
    """Returns linear sigmas [steps + 1], moved towards noise: s -> shift s / (1 + (shift - 1) s) (Stable Diffusion 3,
    arXiv 2403.03206). A shift of 1 changes nothing. Raises ValueError unless shift > 0."""
    return shift_towards_noise(linear(steps), shift)


def shift_towards_noise(sigma: Tensor, shift: float) -> Tensor:
    """Maps sigmas s, of any shape, to shift s / (1 + (shift - 1) s), computed in float64; 0 and 1 stay exact. Raises
    ValueError unless shift > 0."""
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    s = sigma.double()
    return (shift * s / (1 + (shift - 1) * s)).to(sigma.dtype)


def dynamic_shift(
    tokens: int, *, base_tokens: int = 256, max_tokens: int = 4096, base_shift: float = 0.5, max_shift: float = 1.15
) -> float:
    """Returns FLUX's shift for an image of `tokens` tokens: exp(mu), with mu linear in the number of tokens.

    base_shift, max_shift: mu at `base_tokens` and `max_tokens`, as in diffusers' `calculate_shift`.
    """
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return math.exp(base_shift + slope * (tokens - base_tokens))


def ddim_grid(alphas_cumprod: Tensor, timesteps: Tensor, final_alpha: float = 1.0) -> Grid:
    """Returns the grid of a model that predicts the noise: sigma = sqrt(1 - alpha_bar) at training timesteps [steps],
    and sqrt(1 - final_alpha) at the end.

    alphas_cumprod: alpha_bar of all training timesteps. final_alpha: diffusers' `final_alpha_cumprod`, below 1 for
    Stable Diffusion 1.5. Raises ValueError unless `timesteps` are strictly decreasing and inside the training
    schedule.
    """
    times = timesteps.long()
    if len(times) < 1 or bool((times.diff() >= 0).any()):
        raise ValueError(f"timesteps must be strictly decreasing and not empty, not {times.tolist()}")
    if int(times.min()) < 0 or int(times.max()) >= len(alphas_cumprod):
        raise ValueError(f"timesteps must be from 0 to {len(alphas_cumprod) - 1}, not {times.tolist()}")
    sigmas = (1 - alphas_cumprod.double()[times]).sqrt()
    return Grid(torch.cat([sigmas, sigmas.new_tensor([math.sqrt(1 - final_alpha)])]), times.float())
