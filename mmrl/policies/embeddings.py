"""Sinusoidal embeddings of noise levels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoids(time: Tensor, width: int) -> Tensor:
    """Embeds noise levels `time` [n] in [0, 1] as [n, width]: sines and cosines at frequencies from 1 to 1000."""
    frequency = torch.exp(torch.linspace(0, math.log(1000), width // 2, device=time.device))
    angle = time[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)
