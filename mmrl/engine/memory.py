"""The memory that a rank's GPU needs, estimated without one: by counting, and by running on the meta device."""

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
    """A job's network as the meta device has it, without weights, and what is computed with it.

    module: with adapters, and with what is not trained frozen. train: the outputs of a micro-batch of so many rollouts,
    of which `peak` takes a loss. sample: what is computed at once when rollouts are made. logits: bytes of a chunk's
    logits and their gradient. cache: bytes of keys and values while rollouts are made. sampling_parts: bytes of
    parts that lie on the GPU only while rollouts are made, by name; training_parts: the same while it trains. notes:
    lines for the user.
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
    """Bytes that a rank holds all the time, by part: weights, gradients and optimizer, which keeps so many moments.

    ZeRO 1 shards the optimizer, 2 the gradients too, 3 the weights too (arXiv 1910.02054).
    """
    parameters = [(p.numel(), p.requires_grad) for p in module.parameters()]
    every, trained = sum(n for n, _ in parameters), sum(n for n, grad in parameters if grad)
    width = 2 if dtype == "bfloat16" else 4
    share = {stage: world if zero_stage >= stage else 1 for stage in (1, 2, 3)}
    return {
        "weights": every * width / share[3],
        "gradients": trained * (4 if accumulates_in_fp32(zero_stage, dtype) else width) / share[2],
        "optimizer": trained * (4 * moments + (4 if width == 2 else 0)) / share[1],  # in fp32, and copies of bf16
    }


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make inside it, for as long as somebody holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs | self._storages:
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._storages.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, address, size)

    def _let_go(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self.now -= size


class _Fused(torch.autograd.Function):
    """Attention whose backward pass keeps what the fused kernels keep: query, key, value, output and a sum a row
    (arXiv 2205.14135). Nothing is computed."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: BackwardCFunction, *gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


@contextmanager
def fused_attention() -> Iterator[None]:
    """Context in which scaled_dot_product_attention takes the memory that it takes on a GPU, also where a backward pass
    computes it again; on the meta device it would otherwise take the plainest path, which keeps its matrices."""
    usual = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention  # a mode would not reach into a backward pass
    try:
        yield
    finally:
        F.scaled_dot_product_attention = usual


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return _Fused.apply(query, key, value)


def peak_activations(module: nn.Module, compute: Callable[[], Any], *, trains: bool = True) -> int:
    """The most bytes that `compute` holds at once, on the meta device where nothing is computed: activations and
    whatever comes and goes; where it trains, of a backward pass from its outputs too, each gradient of a weight once it
    is complete left out. Weights are not activations.
    """

    def drop(parameter: Tensor) -> None:
        parameter.grad = None  # counted among the gradients

    trained = [p for p in module.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(drop) for p in trained]
    try:
        with torch.set_grad_enabled(trains), fused_attention(), Live() as live:
            outputs = [t for t in tree_leaves(compute()) if isinstance(t, Tensor)]
            if trains:
                torch.autograd.backward([t for t in outputs if t.requires_grad], _ones(outputs))
    finally:
        for hook in hooks:
            hook.remove()
    return live.peak


def _ones(outputs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in outputs if t.requires_grad]


def full_attention_mask(rows: int, length: int) -> Tensor:
    """An attention mask [row, 1, token, token] that hides nothing; on the meta device its values are not read."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device="meta").expand(rows, -1, -1, -1)


@contextmanager
def on_meta(dtype: str) -> Iterator[None]:
    """Context in which modules are built without weights, in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def memory_estimate(module: nn.Module, zero_stage: int, world: int, dtype: str, moments: int = 2) -> list[str]:
    """Lines that say what a rank holds for weights, gradients and optimizer; activations come on top."""
    parameters = [(p.numel(), p.requires_grad) for p in module.parameters()]
    every, trained = sum(n for n, _ in parameters), sum(n for n, grad in parameters if grad)
    parts = static_memory(module, zero_stage, world, dtype, moments)
    named = ", ".join(f"{name} {size / MIB:.1f}" for name, size in parts.items())
    return [
        f"{every / 1e6:.2f}M parameters, {trained / 1e6:.2f}M trained",
        f"a rank holds {sum(parts.values()) / MIB:.1f} MiB ({named}), and activations besides",
    ]
