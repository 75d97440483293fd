"""Estimates the GPU memory that a rank needs, without a GPU: by counting parameters, and by running on torch's meta
device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB, GIB = 2**20, 2**30


@dataclass
class MemoryModel:
    """A job's network on the meta device, without weights, and the computations whose memory is estimated.

    - module: the network, with adapters; parameters that are not trained are frozen
    - train(n): computes the outputs of a micro-batch of n rollouts; `peak_activations` adds a backward pass
    - sample(): computes one forward pass of sampling
    - logits: bytes of the logits of a chunk of tokens, and of their gradient
    - cache: bytes of the key-value cache while rollouts are sampled
    - sampling_parts: bytes of modules that are on the GPU only while rollouts are sampled, by name
    - training_parts: the same during updates
    - notes: lines for the user
    """

    module: nn.Module
    train: Callable[[int], Any]
    sample: Callable[[], Any] | None = None
    logits: float = 0.0
    cache: float = 0.0
    sampling_parts: dict[str, float] = field(default_factory=dict)
    training_parts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def accumulates_in_fp32(zero_stage: int, dtype: str) -> bool:
    """Returns whether gradients of bf16 weights are summed over micro-batches in fp32."""
    return dtype == "bfloat16" and zero_stage == 2


def static_memory(module: nn.Module, zero_stage: int, world: int, dtype: str, moments: int = 2) -> dict[str, float]:
    """Returns the bytes that a rank holds throughout training: "weights", "gradients" and "optimizer".

    ZeRO 1 shards the optimizer, 2 the gradients too, 3 the weights too (arXiv 1910.02054). world: number of ranks.
    moments: number of the optimizer's moments.
    """
    parameters = [(p.numel(), p.requires_grad) for p in module.parameters()]
    num_all, num_trained = sum(n for n, _ in parameters), sum(n for n, grad in parameters if grad)
    width = 2 if dtype == "bfloat16" else 4
    shards = {stage: world if zero_stage >= stage else 1 for stage in (1, 2, 3)}
    return {
        "weights": num_all * width / shards[3],
        "gradients": num_trained * (4 if accumulates_in_fp32(zero_stage, dtype) else width) / shards[2],
        # Moments are fp32; beside bf16 weights the optimizer keeps fp32 copies.
        "optimizer": num_trained * (4 * moments + (4 if width == 2 else 0)) / shards[1],
    }


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that tracks the bytes of all tensors that operators create inside it, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0  # bytes
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Runs an operator of PyTorch, and counts the memory of its new results until it is freed."""
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs | self._storages:
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Counts the bytes of a storage until it is freed."""
        address, size = storage._cdata, storage.nbytes()
        self._storages.add(address)
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self.current -= size


class _Fused(torch.autograd.Function):
    """A stand-in for fused attention (arXiv 2205.14135) that computes nothing. For the backward pass it keeps what the
    fused kernels keep: query, key, value, output, and one number a row."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns an output of the right shape, [..., query, width of values], without computing it."""
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)  # the log of the softmax's sum, for each row
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: BackwardCFunction, *gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


@contextmanager
def fused_attention() -> Iterator[None]:
    """A context in which scaled_dot_product_attention on the meta device needs the memory that fused kernels need on a
    GPU. Without it the meta device uses the plain implementation, which keeps the attention matrices."""
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention  # a dispatch mode would not apply to a recomputation in backward
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return _Fused.apply(query, key, value)


def peak_activations(module: nn.Module, compute: Callable[[], Any], *, trains: bool = True) -> int:
    """Returns the peak of the bytes that `compute` allocates on the meta device, without weights and their gradients.

    trains: whether a backward pass from all outputs of `compute` follows, whose memory counts too.
    """

    def drop(parameter: Tensor) -> None:
        """Removes a gradient as soon as it is complete."""
        parameter.grad = None  # `static_memory` counts it

    trained = [p for p in module.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(drop) for p in trained]
    try:
        with torch.set_grad_enabled(trains), fused_attention(), LiveBytes() as live:
            outputs = [t for t in tree_leaves(compute()) if isinstance(t, Tensor)]
            if trains:
                torch.autograd.backward([t for t in outputs if t.requires_grad], _meta_gradients(outputs))
    finally:
        for hook in hooks:
            hook.remove()
    return live.peak


def _meta_gradients(outputs: list[Tensor]) -> list[Tensor]:
    """Returns a gradient for each output that requires one; on the meta device it needs no values."""
    return [torch.empty_like(t) for t in outputs if t.requires_grad]


def full_attention_mask(rows: int, length: int) -> Tensor:
    """Returns an attention mask [row, 1, token, token] on the meta device that lets all tokens attend to all."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device="meta").expand(rows, -1, -1, -1)


@contextmanager
def on_meta(dtype: str) -> Iterator[None]:
    """A context in which modules are built on the meta device, without memory for weights, in this dtype."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(previous)


def memory_estimate(module: nn.Module, zero_stage: int, world: int, dtype: str, moments: int = 2) -> list[str]:
    """Returns two lines for the user: the numbers of parameters, and the memory of weights, gradients and optimizer on
    a rank, without activations."""
    parameters = [(p.numel(), p.requires_grad) for p in module.parameters()]
    num_all, num_trained = sum(n for n, _ in parameters), sum(n for n, grad in parameters if grad)
    parts = static_memory(module, zero_stage, world, dtype, moments)
    named = ", ".join(f"{name} {size / MIB:.1f}" for name, size in parts.items())
    return [
        f"{num_all / 1e6:.2f}M parameters, {num_trained / 1e6:.2f}M trained",
        f"a rank holds {sum(parts.values()) / MIB:.1f} MiB ({named}), not counting activations",
    ]
