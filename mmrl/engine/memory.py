"""What a rank's GPU has to hold, told without one: by counting, and by a forward pass on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

MIB = 2**20


def standing(module: nn.Module, zero_stage: int, world: int, dtype: str) -> dict[str, float]:
    """Bytes that a rank holds all the time, by part: weights, gradients and optimizer.

    ZeRO 1 shards the optimizer, 2 the gradients too, 3 the weights too (arXiv 1910.02054).
    """
    parameters = [(p.numel(), p.requires_grad) for p in module.parameters()]
    every, trained = sum(n for n, _ in parameters), sum(n for n, grad in parameters if grad)
    width = 2 if dtype == "bfloat16" else 4
    share = {stage: world if zero_stage >= stage else 1 for stage in (1, 2, 3)}
    return {
        "weights": every * width / share[3],
        "gradients": trained * width / share[2],
        "optimizer": trained * (8 + (4 if width == 2 else 0)) / share[1],  # two fp32 moments, fp32 copies of bf16
    }


def kept_for_backward(module: nn.Module, compute: Callable[[], Any]) -> int:
    """Bytes of activations that `compute` leaves for the backward pass; parameters of `module` are no activations.

    Modules and inputs may be on the meta device: then nothing is computed. There attention takes its plainest path,
    which keeps its matrices too, so that this is more than a fused one keeps.
    """
    parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage  # alive, so that no address comes twice
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        held = compute()  # until it is counted
        found = sum(storage.nbytes() for storage in kept.values())
    del held
    return found


def memory_estimate(module: nn.Module, zero_stage: int, world: int, dtype: str) -> list[str]:
    """Lines that say what a rank holds for weights, gradients and optimizer; activations come on top."""
    parameters = [(p.numel(), p.requires_grad) for p in module.parameters()]
    every, trained = sum(n for n, _ in parameters), sum(n for n, grad in parameters if grad)
    parts = standing(module, zero_stage, world, dtype)
    named = ", ".join(f"{name} {size / MIB:.1f}" for name, size in parts.items())
    return [
        f"{every / 1e6:.2f}M parameters, {trained / 1e6:.2f}M trained",
        f"a rank holds {sum(parts.values()) / MIB:.1f} MiB ({named}), and activations besides",
    ]
