"""Auxiliary networks, such as value heads or discriminators, that are trained beside the policy, each by its own
optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


class AuxiliaryModule(Generic[Network]):
    """A module that is trained by Adam and whose weights are equal on all ranks: ranks have the same inputs (`update`),
    or sum their gradients (`descend`). Weights in bfloat16 have fp32 copies, since small updates would round to 0."""

    def __init__(self, module: Network, lr: float) -> None:
        """lr: learning rate of Adam. The optimizer updates `weights`, fp32 copies of bfloat16 parameters, or the
        parameters themselves."""
        self.module = module
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.has_master_weights = any(p.dtype == torch.bfloat16 for p in self.trained)
        self.weights = [p.detach().float().requires_grad_() if self.has_master_weights else p for p in self.trained]
        self.optimizer = torch.optim.Adam(self.weights, lr=lr)
        self.updates = 0  # optimizer steps so far

    def predict(self, *inputs: Tensor) -> Tensor:
        """Returns the module's output without a gradient."""
        with torch.no_grad():
            output: Tensor = self.module(*inputs)
        return output

    def update(self, loss: Tensor) -> None:
        """Takes one optimizer step on a 0-d loss that is the same on all ranks."""
        self.descend([loss], lambda gradient: gradient)

    def descend(self, losses: Iterable[Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """Takes one optimizer step on the sum of 0-d losses over all ranks.

        losses: those of this rank's inputs; they are computed one after another, so that only one at a time
        holds its activations. total: returns the sum of a tensor over the ranks."""
        self.module.zero_grad()
        for loss in losses:
            loss.backward()
        for weight, parameter in zip(self.weights, self.trained, strict=True):
            local = parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad
            parameter.grad, weight.grad = None, total(local.to(weight)).to(weight.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, parameter in zip(self.weights, self.trained, strict=True):
                parameter.copy_(weight)
        self.updates += 1

    def state(self) -> dict[str, Any]:
        """Returns a copy of the tensors and numbers that `load` needs."""
        states = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.has_master_weights:
            states["weights"] = {str(i): weight.detach() for i, weight in enumerate(self.weights)}
        return {**copy.deepcopy(states), "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.has_master_weights:
            with torch.no_grad():
                for i, weight in enumerate(self.weights):
                    weight.copy_(state["weights"][str(i)])
        self.updates = state["updates"]


class AuxiliaryModules:
    """The auxiliary modules of a run by name. Checkpoints hold them."""

    def __init__(self) -> None:
        self._modules: dict[str, AuxiliaryModule[Any]] = {}
        # States from a checkpoint, of modules that `get` has not built yet
        self._unclaimed: dict[str, dict[str, Any]] = {}

    def get(self, name: str, make: Callable[[], Network], lr: float) -> AuxiliaryModule[Network]:
        """Returns the module of this name. The first call builds it by `make`, which must give the same weights on all
        ranks, and restores its state if a checkpoint has been loaded. lr: learning rate of Adam."""
        if name not in self._modules:
            self._modules[name] = AuxiliaryModule(make(), lr)
            if name in self._unclaimed:
                self._modules[name].load(self._unclaimed.pop(name))
        return self._modules[name]

    def has(self, name: str) -> bool:
        """Returns whether `get` has built this module, or a checkpoint holds its state."""
        return name in self._modules or name in self._unclaimed

    def weights(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors of a module by name; {} where `has` is False."""
        if name in self._unclaimed:
            tensors: dict[str, Tensor] = self._unclaimed[name]["module"]
            return tensors
        return self._modules[name].module.state_dict() if name in self._modules else {}

    def state(self) -> dict[str, dict[str, Any]]:
        return self._unclaimed | {name: module.state() for name, module in self._modules.items()}

    def load(self, states: dict[str, dict[str, Any]]) -> None:
        self._modules, self._unclaimed = {}, dict(states)
