"""Counts floating-point operations of networks: by torch's formulas in the first call with inputs of a shape, and from
that count in later calls."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mmrl.engine.compilation import records_gradients

aten = torch.ops.aten
STAGE_3_LINEAR = "deepspeed.runtime.zero.linear"
ADDING = (aten.addmm, aten.baddbmm)  # matrix products whose first argument is added to the product
BATCHED = (aten.bmm, aten.baddbmm)  # products of two activations, as in attention
MAX_BATCH_SIZES = 32  # batch sizes that are counted for one shape of inputs; others use the nearest one's cost per row


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a forward pass and of its backward pass. Like the model FLOPs of arXiv 2204.02311
    they count matrix products and convolutions only, and nothing that is recomputed to save memory."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Flops:
        return Flops(self.forward * factor, self.backward * factor)

    @property
    def total(self) -> float:
        return self.forward + self.backward


class FlopCounter(TorchDispatchMode):
    """A dispatch mode that counts the operations of the forward passes inside it, and of their backward passes: one
    more product for each factor of a product that requires a gradient.

    pairs: operations of products of two activations (attention). weights: of all other products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.pairs, self.with_gradient = Flops(), Flops(), records_gradients()

    @property
    def total(self) -> Flops:
        return self.weights + self.pairs

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Runs an operation of PyTorch, and adds its floating-point operations to `pairs` or `weights`. What runs in a
        backward pass is not counted."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        name = str(packet)
        if in_backward() or packet not in flop_registry and name not in ATTENTION:
            return out
        forward = ATTENTION[name](*args) if name in ATTENTION else flop_registry[packet](*args, **kwargs, out_val=out)
        fused = name in ATTENTION or "attention" in name
        # A backward pass repeats the product for each factor that needs a gradient. In ADDING a summand comes first.
        first = 1 if packet in ADDING else 0
        factors = [needs_gradient(t) for t in args[first : first + (3 if fused else 2)]]
        times = (2 if any(factors) else 0) if fused else sum(factors)  # of fused attention all gradients are computed
        flops = Flops(float(forward), float(forward * times) if self.with_gradient and has_backward() else 0.0)
        if fused or packet in BATCHED:
            self.pairs += flops
        else:
            self.weights += flops
        return out


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object) -> int:
    """Returns the operations of attention's two products. query, key, value: [..., head, token, width]."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def packed_attention_flops(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor | None, *_: object
) -> int:
    """Returns the operations of attention's two products for packed sequences, which attend to themselves only.

    query, key, value: [token, head, width]. starts: [sequence + 1], the first token of each sequence, and the end.
    key_starts: the same for keys; None: as for queries."""
    key_starts = starts if key_starts is None else key_starts
    pairs = int((starts.diff().long() * key_starts.diff().long()).sum())
    return 2 * query.shape[1] * pairs * (query.shape[-1] + value.shape[-1])


# torch 2.11 has no formula for some of these kernels, and counts heads that share keys and values wrongly. By name,
# because the import that registers the last one loads torch._dynamo, which takes seconds.
ATTENTION: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "aten._scaled_dot_product_fused_attention_overrideable": attention_flops,
    "aten._scaled_dot_product_efficient_attention": attention_flops,
    "aten._scaled_dot_product_flash_attention": attention_flops,
    "aten._scaled_dot_product_cudnn_attention": attention_flops,
    "torch_attn._varlen_attn": packed_attention_flops,
}


def needs_gradient(factor: Tensor) -> bool:
    """Returns whether a factor of a product, or the tensor that it is a view of, requires a gradient."""
    return factor.requires_grad or (factor._base is not None and factor._base.requires_grad)


def has_backward() -> bool:
    """Returns whether the current computation will have a backward pass. The linear layer that DeepSpeed installs for
    ZeRO-3 computes with gradients disabled and has a backward pass of its own."""
    if torch.is_grad_enabled():
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == STAGE_3_LINEAR:
            return True
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Returns whether this thread is inside a backward pass, which may compute activations again."""
    return torch._C._current_graph_task_id() != -1


def count(compute: Callable[[], object]) -> Flops:
    """Runs `compute` and returns its operations and the operations of a backward pass from its outputs."""
    with FlopCounter() as counter:
        compute()
    return counter.total


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [vars(value)[f.name] for f in fields(value)]
    return [tensor for one in value for tensor in tensors_of(one)] if isinstance(value, list | tuple) else []


class Tally:
    """A running total of operations, forward and backward."""

    def __init__(self) -> None:
        self.flops = 0.0

    def add(self, flops: Flops) -> None:
        """Adds a forward pass, and its backward pass where gradients are enabled."""
        self.flops += flops.total if records_gradients() else flops.forward


@dataclass(frozen=True)
class PolicyWork:
    """The work of a policy, for throughput metrics. tallies: totals of operations. units: returns the number of units
    in rollouts by name, such as tokens, images or episodes."""

    tallies: Sequence[Tally]
    units: Callable[[Any], dict[str, int]]

    @property
    def flops(self) -> float:
        """Returns the operations of this rank so far, forward and backward."""
        return sum(tally.flops for tally in self.tallies)


class Meter(ABC):
    """Counts operations during selected calls of a network. Of nested calls only the outermost is counted."""

    _threads: ClassVar[set[int]] = set()  # ids of threads that are inside a metered call

    def __init__(self, network: nn.Module | None) -> None:
        """network: the module whose forward calls are metered; None: only the blocks inside `with call(...)` are."""
        self._open: dict[int, tuple[FlopCounter, Callable[[FlopCounter], None]] | None] = {}  # by thread
        if network is not None:
            network.register_forward_pre_hook(lambda _, args, kwargs: self._begin(args, kwargs), with_kwargs=True)
            network.register_forward_hook(lambda *_: self._end(), always_call=True)

    @abstractmethod
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[FlopCounter], None] | None:
        """Called with the inputs of a call. Returns a function that receives the counter after the call; None: the call
        need not be counted."""

    @contextmanager
    def call(self, *args: object) -> Iterator[None]:
        """A context that counts as a call with these inputs."""
        self._begin(args, {})
        try:
            yield
        finally:
            self._end()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins a call with these inputs: enters a counter, unless `begin` returns None. Does nothing inside another
        metered call of this thread, and in a backward pass."""
        thread = threading.get_ident()
        if in_backward() or thread in self._threads:
            return
        self._threads.add(thread)
        done = self.begin(args, kwargs)
        self._open[thread] = None if done is None else (FlopCounter(), done)
        if (opened := self._open[thread]) is not None:
            opened[0].__enter__()

    def _end(self) -> None:
        """Ends the call of this thread that `_begin` began, and passes its counter on."""
        thread = threading.get_ident()
        if in_backward() or thread not in self._open:
            return
        self._threads.discard(thread)
        if (opened := self._open.pop(thread)) is not None:
            counter, done = opened
            counter.__exit__(None, None, None)
            done(counter)


class CallMeter(Meter):
    """Adds the operations of each call of a network to a tally. Calls with new input shapes are counted; for others the
    earlier count is used. All rows of a batch cost the same."""

    def __init__(self, network: nn.Module | None, tally: Tally) -> None:
        super().__init__(network)
        self.tally = tally
        self._of_row: dict[tuple[object, ...], dict[int, Flops]] = {}  # by shapes without rows, then by rows

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[FlopCounter], None] | None:
        """Adds the operations of a call whose input shapes were counted before, and returns None. For new shapes,
        returns the function that adds and stores the count. Once MAX_BATCH_SIZES numbers of rows are counted, another
        one counts in proportion to the nearest of them."""
        tensors = tensors_of((args, kwargs))
        rows = max(1, len(tensors[0]))
        shapes = (tuple(t.shape[1:] if t.shape[:1] == (rows,) else t.shape) for t in tensors)
        known = self._of_row.setdefault((records_gradients(), *shapes), {})
        if rows in known or len(known) >= MAX_BATCH_SIZES:
            self.tally.add(known[min(known, key=lambda counted: abs(counted - rows))] * rows)
            return None

        def done(counter: FlopCounter) -> None:
            """Stores the count as operations per row, and adds it to the tally."""
            known[rows] = counter.total * (1 / rows)
            self.tally.add(counter.total)

        return done


@dataclass(frozen=True)
class SequenceFlops:
    """Operations of a transformer. token: for each token. pair: of attention, for each pair of a query and a key."""

    token: Flops
    pair: Flops

    def for_sequence(self, length: int) -> Flops:
        """Returns the operations of a forward pass over `length` tokens. Every token counts as attending to all, also
        under a causal mask."""
        return self.for_extension(0, length)

    def for_extension(self, cached: int, length: int, *, one_by_one: bool = False) -> Flops:
        """Returns the operations of `length` further tokens after `cached` ones in the key-value cache. one_by_one:
        each token in a pass of its own, as in decoding; otherwise in one pass."""
        pairs = length * (cached + (length + 1) / 2) if one_by_one else length * (cached + length)
        return self.token * length + self.pair * pairs


class SequenceMeter(Meter):
    """Counts the first call of a transformer with gradients and the first without. From these the operations for any
    length follow."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self._known: dict[bool, SequenceFlops] = {}  # by whether gradients are recorded

    @property
    def known(self) -> SequenceFlops | None:
        """Returns the operations of a pass, with gradients where these are enabled now; None before the first call."""
        return self._known.get(records_gradients())

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[FlopCounter], None] | None:
        """Returns the function that stores the count of a call as operations per token and per pair of tokens; None if
        they are known."""
        if self.known is not None:
            return None
        with_gradient = records_gradients()
        rows, length = tensors_of((args, kwargs.get("inputs_embeds"), kwargs.get("input_ids")))[0].shape[:2]
        cache = kwargs.get("past_key_values")
        pairs = rows * length * (length + (0 if cache is None else cache.get_seq_length()))
        if (starts := kwargs.get("cu_seq_lens_q")) is not None:  # packed sequences
            pairs = int(starts.diff().long().square().sum())

        def done(counter: FlopCounter) -> None:
            """Stores the count of a call with or without gradients."""
            self._known[with_gradient] = SequenceFlops(
                counter.weights * (1 / (rows * length)), counter.pairs * (1 / pairs)
            )

        return done
