"""The networks that policies hold: who trains them, how they are called, and how those of transformers are written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

# The module of a policy, or the engine around it; and a network of another library, whose answers are that one's.
Scorer = Callable[..., tuple[Tensor, ...]]
NetworkCall = Callable[..., Any]


class TrainingEngine(Protocol):
    """What trains the module of a policy, for what ranks have to do together."""

    @property
    def zero_stage(self) -> int: ...

    def max(self, value: int) -> int:
        """The largest of all ranks' values."""

    def whole(self) -> AbstractContextManager[None]:
        """Inside it every rank has all weights."""


def write_model(model: nn.Module, folder: Path, state: dict[str, Tensor]) -> None:
    """A model of transformers, or its adapter, in the library's own format. state: of the module that holds it as
    `model`."""
    writer: Any = model
    weights = {n.removeprefix("model."): value for n, value in state.items() if n.startswith("model.")}
    writer.save_pretrained(folder, state_dict=weights)
