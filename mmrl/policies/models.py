"""The networks that policies hold: what trains them, how they are called, and how transformers models are saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

# A scorer is the module of a policy, or the engine around it; a network call returns what another library returns.
Scorer = Callable[..., tuple[Tensor, ...]]
NetworkCall = Callable[..., Any]


class TrainingEngine(Protocol):
    """The engine that trains a policy's module, as far as ranks have to act together."""

    @property
    def zero_stage(self) -> int: ...

    def max(self, value: int) -> int:
        """Returns the largest of all ranks' values."""

    def gathered_weights(self) -> AbstractContextManager[None]:
        """Gathers all weights on every rank inside the context."""


def write_model(model: nn.Module, folder: Path, state: dict[str, Tensor]) -> None:
    """Saves a transformers model, or its adapter, in the library's own format. state: the weights of the module that
    holds it as `model`."""
    writer: Any = model
    weights = {n.removeprefix("model."): value for n, value in state.items() if n.startswith("model.")}
    writer.save_pretrained(folder, state_dict=weights)
