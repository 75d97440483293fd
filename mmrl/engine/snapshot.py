"""The trained weights as they once were, beside them: a copy, or for adapters none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.engine.ema import local_part, write


class Snapshot:
    """This rank's share of the trained parameters of `module`, as they were when it was last taken: the reference
    policy, for any kind of model, with or without LoRA, under any ZeRO stage."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self.copies: list[Tensor] = []
        self.take()

    def take(self) -> None:
        self.copies = [local_part(p).detach().clone() for p in self._parameters]

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """Moves towards the current weights: copy <- decay copy + (1 - decay) current."""
        for copy, parameter in zip(self.copies, self._parameters, strict=True):
            copy.lerp_(local_part(parameter).to(copy), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the module computes with the copy. Nothing may be trained inside."""
        now = [local_part(p).detach().clone() for p in self._parameters]
        write(self._parameters, self.copies)
        try:
            yield
        finally:
            write(self._parameters, now)

    def state(self) -> dict[str, Tensor]:
        """The copies in the layout of an `EMA`'s state, so that they can be reshaped for other ranks like one."""
        return {**{str(i): copy for i, copy in enumerate(self.copies)}, "updates": torch.tensor(0)}

    def load(self, state: dict[str, Tensor]) -> None:
        for i, copy in enumerate(self.copies):
            copy.copy_(state[str(i)])


class AdaptersOff:
    """The model without its low-rank adapters: the policy that a LoRA starts from, for which nothing is kept, and whose
    passes do not compute the adapters."""

    def __init__(self, layers: list[Any]) -> None:
        """layers: peft's."""
        self._layers = layers

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the module computes without adapters. Nothing may be trained inside."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def _switch(self, off: bool) -> None:
        for layer in self._layers:
            layer._disable_adapters = off  # peft's own switch also changes which parameters are trained


def make_reference(module: nn.Module, *, stays: bool, zero_stage: int) -> Snapshot | AdaptersOff:
    """The policy that training starts from, as a reference: without adapters where these are all that is trained and
    begin as no change, else a copy. stays: whether it will never move. Under ZeRO-3 it is a copy: there adapters are
    gathered in the order of the passes before."""
    layers = [] if not stays or zero_stage == 3 or "peft" not in sys.modules else idle_adapters(module)
    return AdaptersOff(layers) if layers else Snapshot(module)


def idle_adapters(module: nn.Module) -> list[Any]:
    """The layers with adapters, if no parameter but those of adapters is trained and all of these add exactly 0."""
    from peft.tuners.lora import LoraLayer  # it is loaded already

    layers: list[Any] = [part for part in module.modules() if isinstance(part, LoraLayer)]
    second = [part.weight for layer in layers for part in layer.lora_B.values()]  # y + scale B A x
    adapters = {id(p) for layer in layers for part in layer.lora_A.values() for p in part.parameters()}
    adapters |= {id(p) for layer in layers for part in layer.lora_B.values() for p in part.parameters()}
    others = [p for p in module.parameters() if p.requires_grad and id(p) not in adapters]
    plain = all(not layer.merged and len(layer.lora_B) == 1 for layer in layers)
    if others or not plain or any(bool(weight.any()) for weight in second):
        return []
    return layers
