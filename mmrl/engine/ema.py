"""An exponential moving average (EMA) of the trained weights, sharded like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn


class EMA:
    """An exponential moving average of the trained parameters of `module`, in fp32; under ZeRO-3, of this rank's shard.

    decay: function from the number of the update (from 0) to the decay, the weight of the previous average.
    """

    def __init__(self, module: nn.Module, decay: Callable[[int], float]) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._decay = decay
        self.updates = 0
        self.average = [local_part(p).detach().float().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the current weights."""
        decay = self._decay(self.updates)
        for average, parameter in zip(self.average, self._parameters, strict=True):
            average.lerp_(local_part(parameter).float(), 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the module has the averaged weights. Nothing may be trained inside."""
        trained = [local_part(p).detach().clone() for p in self._parameters]
        write(self._parameters, self.average)
        try:
            yield
        finally:
            write(self._parameters, trained)

    def state(self) -> dict[str, Tensor]:
        named = {str(i): average for i, average in enumerate(self.average)}
        return {**named, "updates": torch.tensor(self.updates)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Loads a `state` of a run with the same number of ranks and ZeRO stage, or one that `reshard` converted."""
        self.updates = int(state["updates"])
        for i, average in enumerate(self.average):
            average.copy_(state[str(i)])


def reshard(states: list[dict[str, Tensor]], sharded: bool, parameters: list[nn.Parameter]) -> dict[str, Tensor]:
    """Returns the state of an average for this rank from the states of all ranks of an earlier run.

    sharded: whether each of these holds a shard (ZeRO-3); otherwise each holds everything. parameters: the trained
    parameters of this run, which decide this rank's shard.
    """
    parts = states if sharded else states[:1]
    averages = {}
    for i, parameter in enumerate(parameters):
        full = torch.cat([state[str(i)].flatten() for state in parts])
        averages[str(i)] = take_shard(parameter, full)
    return {**averages, "updates": states[0]["updates"]}


def local_part(parameter: nn.Parameter) -> Tensor:
    """Returns the part of a parameter that this rank holds, as a view of its memory. Under ZeRO-3 it is a slice of the
    flattened parameter, without padding; otherwise the whole parameter."""
    if not _is_sharded(parameter):
        return parameter.data
    local: Tensor = vars(parameter)["ds_tensor"]
    return local.narrow(0, 0, _local_slice(parameter)[1])  # [1]: the length without padding


def take_shard(parameter: nn.Parameter, full: Tensor) -> Tensor:
    """Returns this rank's part of a full flat tensor [element], in the shape of `local_part(parameter)`."""
    if not _is_sharded(parameter):
        return full.view_as(parameter)
    return full.narrow(0, *_local_slice(parameter))


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Returns whether ZeRO-3 shards the parameter; it then has attributes of DeepSpeed."""
    return "ds_tensor" in vars(parameter)


def _local_slice(parameter: nn.Parameter) -> tuple[int, int]:
    """Returns the first element of this rank's slice of the flat parameter, and the number of elements."""
    numel, size = vars(parameter)["ds_numel"], vars(parameter)["ds_tensor"].numel()
    start = min(numel, dist.get_rank() * size)
    return start, min(size, numel - start)


@torch.no_grad()
def write(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Overwrites this rank's part of every parameter. A collective under ZeRO-3."""
    for parameter, value in zip(parameters, values, strict=True):
        local_part(parameter).copy_(value)
    refresh_gathered(parameters)


@torch.no_grad()
def refresh_gathered(parameters: list[nn.Parameter]) -> None:
    """Updates the full copies of small parameters, which ZeRO-3 keeps on every rank between steps, after their shards
    have changed. A collective under ZeRO-3."""
    full: list[Any] = [p for p in parameters if _is_sharded(p) and vars(p)["ds_status"] is ZeroParamStatus.AVAILABLE]
    if full:
        full[0].partition(param_list=full)  # drops the copies
        full[0].all_gather(param_list=full)


def ema_warmup(decay: float) -> Callable[[int], float]:
    """Returns the decay schedule min((1 + n) / (10 + n), decay) of update n, which forgets the initial weights soon."""
    return lambda updates: min((1 + updates) / (10 + updates), decay)


def ramp(slope: float, limit: float, start: int = 0) -> Callable[[int], float]:
    """Returns the decay schedule min(slope max(0, n - start), limit) of update n, as DiffusionNFT has for its sampling
    policy."""
    return lambda updates: min(slope * max(0, updates - start), limit)


class OtherWeights(Protocol):
    """Weights that a module can have in the place of its own, such as an `EMA` or a `Snapshot`."""

    def applied(self) -> AbstractContextManager[None]:
        """Returns a context in which the module has these weights."""


def applied(weights: OtherWeights | None) -> AbstractContextManager[None]:
    """Returns a context in which the module has other weights; None: its own."""
    return nullcontext() if weights is None else weights.applied()
