"""Several networks in one module, for policies that consist of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmrl.policies.models import NetworkCall


class Networks(nn.Module):
    """The module that the engine wraps for several networks; each is reached through it, by its name."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, part: str, *inputs: object, **options: object) -> Any:
        """Calls the network named `part` with the other arguments."""
        return self.parts[part](*inputs, **options)


@dataclass(frozen=True)
class Part:
    """One network inside `whole`, which is a `Networks` or the engine around it."""

    whole: NetworkCall
    name: str

    def __call__(self, *inputs: object, **options: object) -> Any:
        return self.whole(self.name, *inputs, **options)


def state_of(part: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of one network, out of those of all, without their prefix."""
    prefix = f"parts.{part}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
