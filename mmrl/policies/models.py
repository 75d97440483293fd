"""Types of networks and engines for policies, and how transformers models are saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

# A policy's module, or the DeepSpeed engine that wraps it. A Scorer returns tensors; a NetworkCall may return the
# output class of another library.
Scorer = Callable[..., tuple[Tensor, ...]]
NetworkCall = Callable[..., Any]


class TrainingEngine(Protocol):
    """The engine that trains a policy's module; its methods are collective: all ranks call them together."""

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage, 0 to 3."""

    def max(self, value: int) -> int:
        """Returns the maximum of `value` over ranks."""

    def gathered_weights(self) -> AbstractContextManager[None]:
        """Gathers all weights on every rank inside the context, as ZeRO-3 needs."""


def write_model(model: nn.Module, folder: Path, state: dict[str, Tensor]) -> None:
    """Saves a transformers model, or only the adapter of a peft model, in the library's own format. state: the state
    dict of a module whose attribute `model` is this model, so that the names of its weights begin with "model."."""
    pretrained: Any = model
    weights = {n.removeprefix("model."): value for n, value in state.items() if n.startswith("model.")}
    pretrained.save_pretrained(folder, state_dict=weights)
