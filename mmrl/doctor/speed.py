"""A small benchmark of the fused operators against eager PyTorch and torch.compile, for the report."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl import kernels

ROUNDS = 5
Arm = Callable[[Tensor], Tensor]


def table(device: str) -> list[str]:
    """Returns a Markdown table of milliseconds for forward and backward, the best of ROUNDS interleaved rounds."""
    lines = ["| operator | ours ms | eager ms | torch.compile ms |", "| --- | --- | --- | --- |"]
    kernels.use("auto")
    for name, (ours, eager, leaf) in cases(device).items():
        arms: dict[str, Arm] = {"ours": ours, "eager": eager, "compiled": torch.compile(eager)}
        best = dict.fromkeys(arms, float("inf"))
        failed: dict[str, str] = {}
        for _ in range(ROUNDS + 1):  # the first one compiles, and counts for nothing
            for arm, call in arms.items():
                if arm not in failed:
                    took = timed(call, leaf, device, failed, arm)
                    best[arm] = min(best[arm], took) if _ else best[arm]
        cells = [failed.get(arm) or f"{1000 * best[arm]:.2f}" for arm in arms]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    return [*lines, "", f"{where}, torch {torch.__version__}, fp32"]


def timed(call: Arm, leaf: Tensor, device: str, failed: dict[str, str], arm: str) -> float:
    """Returns the seconds of a forward and backward pass. failed: gets the error's name by arm."""
    begun = time.perf_counter()
    try:
        torch.autograd.grad(call(leaf), leaf)
    except Exception as error:  # a compiler that is missing, or does not know the GPU
        failed[arm] = type(error).__name__
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def cases(device: str) -> dict[str, tuple[Arm, Arm, Tensor]]:
    """Returns by name: the fused operator, its eager form, and the tensor to differentiate."""
    rows, width = (4096, 131072) if device == "cuda" else (64, 8192)
    logits = torch.randn(rows, width, device=device, requires_grad=True)
    targets = torch.randint(width, (rows,), device=device)
    x, v, after = (torch.randn(rows, width // 4, device=device) for _ in range(3))
    one = torch.ones(rows, device=device)
    ratio = (torch.randn(rows, 512, device=device) / 5).requires_grad_()
    gains, mask = torch.randn(rows, device=device), torch.rand(rows, 512, device=device) < 0.8

    def gather(leaf: Tensor) -> Tensor:
        return F.log_softmax(leaf, -1).gather(1, targets[:, None]).sum()

    def step(leaf: Tensor) -> Tensor:
        return (-((after - x - leaf) ** 2) / 2).mean(1).sum()

    def clipped(leaf: Tensor) -> Tensor:
        r = leaf.exp()
        objective = torch.minimum(r * gains[:, None], r.clamp(0.8, 1.28) * gains[:, None])
        total: Tensor = -(objective * mask).sum() / mask.sum()
        return total

    return {
        f"token_logprob {rows} x {width}": (
            lambda leaf: kernels.token_logprob(leaf, targets).logp.sum(),
            gather,
            logits,
        ),
        f"denoise_logprob {rows} x {width // 4}": (
            lambda leaf: kernels.denoise_logprob(x, leaf, after, one, one, one).logp.sum(),
            step,
            v.requires_grad_(),
        ),
        f"clipped_surrogate {rows} x 512": (
            lambda leaf: kernels.clipped_surrogate(leaf, gains, mask)[0],
            clipped,
            ratio,
        ),
    }
