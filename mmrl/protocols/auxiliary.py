"""Networks that learn beside the policy, each by an optimizer of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class AuxiliaryModule:
    """A module that is trained from the same numbers on all ranks, so that it stays equal on them, by Adam."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.module, self.optimizer = module, torch.optim.Adam(module.parameters(), lr=lr)
        self.updates = 0  # so far

    def ask(self, *inputs: Tensor) -> Tensor:
        """What the module says, without a gradient."""
        with torch.no_grad():
            found: Tensor = self.module(*inputs)
        return found

    def update(self, loss: Tensor) -> None:
        """One optimizer step down the gradient of a loss, 0-d."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1

    def state(self) -> dict[str, Any]:
        """Tensors and numbers that `load` needs; later updates do not change them."""
        states = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**copy.deepcopy(states), "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


class AuxiliaryModules:
    """The auxiliary modules of a run, by the names that their owners give them; checkpoints hold them."""

    def __init__(self) -> None:
        self._made: dict[str, AuxiliaryModule] = {}
        self._waiting: dict[str, dict[str, Any]] = {}  # states of a checkpoint whose modules were not asked for yet

    def get(self, name: str, make: Callable[[], nn.Module], lr: float) -> AuxiliaryModule:
        """The module of this name, which is made where it is first asked for, on all ranks alike."""
        if name not in self._made:
            self._made[name] = AuxiliaryModule(make(), lr)
            if name in self._waiting:
                self._made[name].load(self._waiting.pop(name))
        return self._made[name]

    def state(self) -> dict[str, dict[str, Any]]:
        return self._waiting | {name: module.state() for name, module in self._made.items()}

    def load(self, states: dict[str, dict[str, Any]]) -> None:
        self._made, self._waiting = {}, dict(states)
