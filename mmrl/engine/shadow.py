"""A running average of the trained weights, beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Shadow:
    """An exponential moving average of the trained parameters of `module`, in fp32, of this rank's share of them.

    `decay(updates)` is the weight of the past in update number `updates` (from 0).
    """

    def __init__(self, module: nn.Module, decay: Callable[[int], float]) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._decay = decay
        self.updates = 0
        self.average = [share(p).detach().float().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        decay = self._decay(self.updates)
        for average, parameter in zip(self.average, self._parameters, strict=True):
            average.lerp_(share(parameter).float(), 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside it the module computes with the averages. Nothing may be trained inside."""
        kept = [share(p).detach().clone() for p in self._parameters]
        self._write(self.average)
        try:
            yield
        finally:
            self._write(kept)

    def state(self) -> dict[str, Tensor]:
        named = {str(i): average for i, average in enumerate(self.average)}
        return {**named, "updates": torch.tensor(self.updates)}

    def load(self, state: dict[str, Tensor]) -> None:
        self.updates = int(state["updates"])
        for i, average in enumerate(self.average):
            average.copy_(state[str(i)])

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            share(parameter).copy_(value)


def share(parameter: nn.Parameter) -> Tensor:
    """What of a parameter lies on this rank: under ZeRO-3 a slice, else all of it."""
    return vars(parameter).get("ds_tensor", parameter.data)


def warmed_up(decay: float) -> Callable[[int], float]:
    """min((1 + n) / (10 + n), decay): the average forgets the start faster than the plain one."""
    return lambda updates: min((1 + updates) / (10 + updates), decay)


def ramp(slope: float, most: float, start: int = 0) -> Callable[[int], float]:
    """min(slope (n - start), most), and 0 before `start` (DiffusionNFT's schedules of the sampling policy)."""
    return lambda updates: min(slope * max(0, updates - start), most)
