"""The reference policy: a copy of earlier weights, or, for LoRA, the model without its adapters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.engine.ema import local_part, write


class Snapshot:
    """A copy of the trained parameters of `module` at the last call of `take`; under ZeRO-3, of this rank's shard. It
    serves as reference policy for any model, with or without LoRA."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self.copies: list[Tensor] = []
        self.take()

    def take(self) -> None:
        """Copies the current weights."""
        self.copies = [local_part(p).detach().clone() for p in self._parameters]

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """Moves the copy towards the current weights: copy <- decay copy + (1 - decay) current."""
        for copy, parameter in zip(self.copies, self._parameters, strict=True):
            copy.lerp_(local_part(parameter).to(copy), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the module has the copied weights. Nothing may be trained inside."""
        present = [local_part(p).detach().clone() for p in self._parameters]
        write(self._parameters, self.copies)
        try:
            yield
        finally:
            write(self._parameters, present)

    def state(self) -> dict[str, Tensor]:
        """Returns the copies in the layout of an `EMA`'s state, so that `ema.reshard` can convert them too."""
        return {**{str(i): copy for i, copy in enumerate(self.copies)}, "updates": torch.tensor(0)}

    def load(self, state: dict[str, Tensor]) -> None:
        for i, copy in enumerate(self.copies):
            copy.copy_(state[str(i)])


class AdaptersOff:
    """The model with its LoRA adapters disabled: the policy that LoRA training starts from. It needs no copy of the
    weights, and its forward passes do not compute the adapters."""

    def __init__(self, layers: list[Any]) -> None:
        """layers: peft's `LoraLayer`s of the model."""
        self._layers = layers

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the adapters are disabled. Nothing may be trained inside."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def _switch(self, off: bool) -> None:
        for layer in self._layers:
            layer._disable_adapters = off  # peft's own switch also changes which parameters are trained


def make_reference(module: nn.Module, *, fixed: bool, zero_stage: int) -> Snapshot | AdaptersOff:
    """Returns the current policy as reference policy: the model without adapters if only LoRA adapters are trained and
    they have no effect yet, else a copy of the weights.

    fixed: whether the reference never moves. Under ZeRO-3 it is a copy, since DeepSpeed gathers parameters in the order
    of earlier forward passes, which all computed the adapters.
    """
    layers = [] if not fixed or zero_stage == 3 or "peft" not in sys.modules else zero_adapters(module)
    return AdaptersOff(layers) if layers else Snapshot(module)


def zero_adapters(module: nn.Module) -> list[Any]:
    """Returns the layers with LoRA adapters, if only adapters are trained and all of them add exactly 0 to their layer;
    otherwise an empty list."""
    from peft.tuners.lora import LoraLayer  # imported late: peft has been imported already by whoever made adapters

    layers: list[Any] = [part for part in module.modules() if isinstance(part, LoraLayer)]
    b_weights = [part.weight for layer in layers for part in layer.lora_B.values()]  # a layer computes y + scale B A x
    adapters = {id(p) for layer in layers for part in layer.lora_A.values() for p in part.parameters()}
    adapters |= {id(p) for layer in layers for part in layer.lora_B.values() for p in part.parameters()}
    others = [p for p in module.parameters() if p.requires_grad and id(p) not in adapters]
    single = all(not layer.merged and len(layer.lora_B) == 1 for layer in layers)
    if others or not single or any(bool(weight.any()) for weight in b_weights):
        return []
    return layers
