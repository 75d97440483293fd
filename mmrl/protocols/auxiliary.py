"""Networks that are trained beside the policy, each with its own optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class AuxiliaryModule:
    """A module that is trained by Adam on equal inputs on all ranks, so that it stays equal on them."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.module, self.optimizer = module, torch.optim.Adam(module.parameters(), lr=lr)
        self.updates = 0  # so far

    def predict(self, *inputs: Tensor) -> Tensor:
        """Returns the module's output without a gradient."""
        with torch.no_grad():
            output: Tensor = self.module(*inputs)
        return output

    def update(self, loss: Tensor) -> None:
        """Takes one optimizer step on a loss, 0-d."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1

    def state(self) -> dict[str, Any]:
        """Returns a copy of the tensors and numbers that `load` needs."""
        states = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**copy.deepcopy(states), "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


class AuxiliaryModules:
    """The auxiliary modules of a run by name. Checkpoints hold them."""

    def __init__(self) -> None:
        self._modules: dict[str, AuxiliaryModule] = {}
        self._unclaimed: dict[
            str, dict[str, Any]
        ] = {}  # states from a checkpoint whose modules `get` has not built yet

    def get(self, name: str, make: Callable[[], nn.Module], lr: float) -> AuxiliaryModule:
        """Returns the module of this name, built by `make` at the first call, on all ranks alike."""
        if name not in self._modules:
            self._modules[name] = AuxiliaryModule(make(), lr)
            if name in self._unclaimed:
                self._modules[name].load(self._unclaimed.pop(name))
        return self._modules[name]

    def state(self) -> dict[str, dict[str, Any]]:
        return self._unclaimed | {name: module.state() for name, module in self._modules.items()}

    def load(self, states: dict[str, dict[str, Any]]) -> None:
        self._modules, self._unclaimed = {}, dict(states)
