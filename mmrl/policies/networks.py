"""Several networks in one module, for policies that consist of several models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmrl.policies.models import NetworkCall


class Networks(nn.Module):
    """Holds several networks by name in one module, which the engine wraps. A network is called through it, so that the
    engine's hooks run."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, part: str, *inputs: object, **options: object) -> Any:
        """Calls the network named `part` with `inputs` and `options`."""
        return self.parts[part](*inputs, **options)


@dataclass(frozen=True)
class NamedNetwork:
    """A callable for one network inside `networks`, which is a `Networks` or the DeepSpeed engine that wraps it."""

    networks: NetworkCall
    name: str

    def __call__(self, *inputs: object, **options: object) -> Any:
        """Calls the network and returns its output."""
        return self.networks(self.name, *inputs, **options)


def select_state(part: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of the network named `part`. state: the state dict of a `Networks`."""
    prefix = f"parts.{part}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
