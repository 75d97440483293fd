"""A running average of the trained weights, beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn


class EMA:
    """An exponential moving average of the trained parameters of `module`, in fp32, of this rank's share of them.

    `decay(updates)` is the weight of the past in update number `updates` (from 0).
    """

    def __init__(self, module: nn.Module, decay: Callable[[int], float]) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._decay = decay
        self.updates = 0
        self.average = [local_part(p).detach().float().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        decay = self._decay(self.updates)
        for average, parameter in zip(self.average, self._parameters, strict=True):
            average.lerp_(local_part(parameter).float(), 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the module computes with the averages. Nothing may be trained inside."""
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
        """Loads the `state` of a run with as many ranks and the same ZeRO stage, or one that `reshaped` has made so."""
        self.updates = int(state["updates"])
        for i, average in enumerate(self.average):
            average.copy_(state[str(i)])


def reshaped(states: list[dict[str, Tensor]], sliced: bool, parameters: list[nn.Parameter]) -> dict[str, Tensor]:
    """The state of this rank's average from those of all ranks of an earlier run, which held slices or the whole.
    parameters: the trained ones, as they lie now."""
    parts = states if sliced else states[:1]
    averages = {}
    for i, parameter in enumerate(parameters):
        whole = torch.cat([state[str(i)].flatten() for state in parts])
        averages[str(i)] = take(parameter, whole)
    return {**averages, "updates": states[0]["updates"]}


def local_part(parameter: nn.Parameter) -> Tensor:
    """Returns the memory of this rank's part of a parameter: under ZeRO-3 a slice of its elements in order, without the
    padding of the last one, else all of it."""
    if not _sliced(parameter):
        return parameter.data
    local: Tensor = vars(parameter)["ds_tensor"]
    return local.narrow(0, 0, _local_slice(parameter)[1])


def take(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Cuts this rank's part out of the whole parameter, [element]. The part has the shape of `local_part`."""
    if not _sliced(parameter):
        return whole.view_as(parameter)
    return whole.narrow(0, *_local_slice(parameter))


def _sliced(parameter: nn.Parameter) -> bool:
    """Returns whether ZeRO-3 has cut the parameter, which the fields that it adds show."""
    return "ds_tensor" in vars(parameter)


def _local_slice(parameter: nn.Parameter) -> tuple[int, int]:
    """The first element of this rank's slice, and its number of elements."""
    numel, size = vars(parameter)["ds_numel"], vars(parameter)["ds_tensor"].numel()
    start = min(numel, dist.get_rank() * size)
    return start, min(size, numel - start)


@torch.no_grad()
def write(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Overwrites this rank's share of every parameter. A collective under ZeRO-3."""
    for parameter, value in zip(parameters, values, strict=True):
        local_part(parameter).copy_(value)
    gather_again(parameters)


@torch.no_grad()
def gather_again(parameters: list[nn.Parameter]) -> None:
    """Refreshes small parameters after slices have changed: ZeRO-3 keeps these whole between steps, as copies of what
    the slices were. A collective under ZeRO-3."""
    whole: list[Any] = [p for p in parameters if _sliced(p) and vars(p)["ds_status"] is ZeroParamStatus.AVAILABLE]
    if whole:
        whole[0].partition(param_list=whole)  # drops the copies
        whole[0].all_gather(param_list=whole)


def ema_warmup(decay: float) -> Callable[[int], float]:
    """min((1 + n) / (10 + n), decay): the average forgets the start faster than the plain one."""
    return lambda updates: min((1 + updates) / (10 + updates), decay)


def ramp(slope: float, most: float, start: int = 0) -> Callable[[int], float]:
    """min(slope (n - start), most), and 0 before `start` (DiffusionNFT's schedules of the sampling policy)."""
    return lambda updates: min(slope * max(0, updates - start), most)


class OtherWeights(Protocol):
    """Weights that a module can compute with for a while."""

    def applied(self) -> AbstractContextManager[None]: ...


def applied(weights: OtherWeights | None) -> AbstractContextManager[None]:
    """Context in which the policy computes with other weights, where there are any."""
    return nullcontext() if weights is None else weights.applied()
