"""A copy of the trained weights as they once were, beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mmrl.engine.shadow import gather_again, share


class Snapshot:
    """This rank's share of the trained parameters of `module`, as they were when it was last taken: the reference
    policy, for any kind of model, with or without LoRA, under any ZeRO stage."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self.kept: list[Tensor] = []
        self.take()

    def take(self) -> None:
        self.kept = [share(p).detach().clone() for p in self._parameters]

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """Moves towards the weights of now: kept <- decay kept + (1 - decay) now."""
        for kept, parameter in zip(self.kept, self._parameters, strict=True):
            kept.lerp_(share(parameter).to(kept), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside it the module computes with the copy. Nothing may be trained inside."""
        now = [share(p).detach().clone() for p in self._parameters]
        self._write(self.kept)
        try:
            yield
        finally:
            self._write(now)

    def state(self) -> dict[str, Tensor]:
        """Laid out as a `Shadow`'s, so that it can be reshaped for other ranks like one."""
        return {**{str(i): kept for i, kept in enumerate(self.kept)}, "updates": torch.tensor(0)}

    def load(self, state: dict[str, Tensor]) -> None:
        for i, kept in enumerate(self.kept):
            kept.copy_(state[str(i)])

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            share(parameter).copy_(value)
        gather_again(self._parameters)
