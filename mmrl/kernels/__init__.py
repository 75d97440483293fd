"""Fused operators for likelihoods, advantages and surrogates: one function each, computed by CUDA, C++ or plain
torch."""

from mmrl.kernels.compiled import use
from mmrl.kernels.operators import (
    clipped_surrogate,
    denoise_logprob,
    denoise_step,
    gae,
    group_advantage,
    hidden_logprob,
    token_logprob,
)
from mmrl.kernels.status import health, status
from mmrl.kernels.toolchain import KernelError, build

__all__ = [
    "KernelError",
    "build",
    "clipped_surrogate",
    "denoise_logprob",
    "denoise_step",
    "gae",
    "group_advantage",
    "health",
    "hidden_logprob",
    "status",
    "token_logprob",
    "use",
]
