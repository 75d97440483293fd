"""A small benchmark of the fused operators in `mmrl.kernels` against eager PyTorch and torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl import kernels

ROUNDS = 5  # repetitions of each measurement
Function = Callable[[Tensor], Tensor]


def benchmark_table(device: str) -> list[str]:
    """Returns a Markdown table of the milliseconds of a forward and a backward pass, the best of ROUNDS rounds.

    A round calls all implementations once. device: "cuda" or "cpu".
    """
    lines = ["| operator | ours ms | eager ms | torch.compile ms |", "| --- | --- | --- | --- |"]
    kernels.use("auto")
    for name, (fused, eager, leaf) in benchmark_cases(device).items():
        implementations: dict[str, Function] = {"ours": fused, "eager": eager, "compiled": torch.compile(eager)}
        fastest = dict.fromkeys(implementations, float("inf"))
        failed: dict[str, str] = {}
        for round_index in range(ROUNDS + 1):
            for implementation, call in implementations.items():
                if implementation in failed:
                    continue
                seconds = time_call(call, leaf, device, failed, implementation)
                if round_index > 0:  # the first round compiles
                    fastest[implementation] = min(fastest[implementation], seconds)
        cells = [
            failed.get(implementation) or f"{1000 * fastest[implementation]:.2f}" for implementation in implementations
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    return [*lines, "", f"{machine}, torch {torch.__version__}, fp32"]


def time_call(call: Function, leaf: Tensor, device: str, failed: dict[str, str], implementation: str) -> float:
    """Returns the seconds of a forward and a backward pass of `call` on the tensor `leaf`.

    failed: if the call raises, the type of the error is stored here under the name `implementation`.
    """
    started = time.perf_counter()
    try:
        torch.autograd.grad(call(leaf), leaf)
    except Exception as error:  # a compiler that is missing, or does not know the GPU
        failed[implementation] = type(error).__name__
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def benchmark_cases(device: str) -> dict[str, tuple[Function, Function, Tensor]]:
    """Returns the benchmarks by name: the fused operator, the same in eager PyTorch, and the input tensor of both, with
    respect to which they are differentiated."""
    rows, width = (4096, 131072) if device == "cuda" else (64, 8192)
    logits = torch.randn(rows, width, device=device, requires_grad=True)
    targets = torch.randint(width, (rows,), device=device)
    x, v, next_latent = (torch.randn(rows, width // 4, device=device) for _ in range(3))
    ones = torch.ones(rows, device=device)
    log_ratio = (torch.randn(rows, 512, device=device) / 5).requires_grad_()
    advantages, mask = torch.randn(rows, device=device), torch.rand(rows, 512, device=device) < 0.8

    def eager_token_logprob(leaf: Tensor) -> Tensor:
        return F.log_softmax(leaf, -1).gather(1, targets[:, None]).sum()

    def eager_denoise_logprob(leaf: Tensor) -> Tensor:
        return (-((next_latent - x - leaf) ** 2) / 2).mean(1).sum()

    def eager_clipped_surrogate(leaf: Tensor) -> Tensor:
        ratios = leaf.exp()
        objective = torch.minimum(ratios * advantages[:, None], ratios.clamp(0.8, 1.28) * advantages[:, None])
        total: Tensor = -(objective * mask).sum() / mask.sum()
        return total

    return {
        f"token_logprob {rows} x {width}": (
            lambda leaf: kernels.token_logprob(leaf, targets).logp.sum(),
            eager_token_logprob,
            logits,
        ),
        f"denoise_logprob {rows} x {width // 4}": (
            lambda leaf: kernels.denoise_logprob(x, leaf, next_latent, ones, ones, ones).logp.sum(),
            eager_denoise_logprob,
            v.requires_grad_(),
        ),
        f"clipped_surrogate {rows} x 512": (
            lambda leaf: kernels.clipped_surrogate(leaf, advantages, mask)[0],
            eager_clipped_surrogate,
            log_ratio,
        ),
    }
