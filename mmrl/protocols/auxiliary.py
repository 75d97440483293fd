"""Networks that are trained beside the policy, each with its own optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


class AuxiliaryModule(Generic[Network]):
    """A module that is trained by Adam on equal inputs on all ranks, or with gradients that are summed over them, so
    that it stays equal on them. Weights in bfloat16 have copies in fp32, for small updates round to nothing in it."""

    def __init__(self, module: Network, lr: float) -> None:
        self.module = module
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.rounded = any(p.dtype == torch.bfloat16 for p in self.trained)
        self.weights = [p.detach().float().requires_grad_() if self.rounded else p for p in self.trained]
        self.optimizer = torch.optim.Adam(self.weights, lr=lr)
        self.updates = 0  # so far

    def predict(self, *inputs: Tensor) -> Tensor:
        """Returns the module's output without a gradient."""
        with torch.no_grad():
            output: Tensor = self.module(*inputs)
        return output

    def update(self, loss: Tensor) -> None:
        """Takes one optimizer step on a loss, 0-d, of inputs that are equal on all ranks."""
        self.descend([loss], lambda gradient: gradient)

    def descend(self, losses: Iterable[Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """Takes one optimizer step on the sum of losses, 0-d each, of which one at a time holds its activations. Unlike
        in `update` the losses are of this rank's own inputs. total: the sum of a tensor over the ranks."""
        self.module.zero_grad()
        for loss in losses:
            loss.backward()
        for weight, parameter in zip(self.weights, self.trained, strict=True):
            own = parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad
            parameter.grad, weight.grad = None, total(own.to(weight)).to(weight.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, parameter in zip(self.weights, self.trained, strict=True):
                parameter.copy_(weight)
        self.updates += 1

    def state(self) -> dict[str, Any]:
        """Returns a copy of the tensors and numbers that `load` needs."""
        states = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.rounded:
            states["weights"] = {str(i): weight.detach() for i, weight in enumerate(self.weights)}
        return {**copy.deepcopy(states), "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.rounded:
            with torch.no_grad():
                for i, weight in enumerate(self.weights):
                    weight.copy_(state["weights"][str(i)])
        self.updates = state["updates"]


class AuxiliaryModules:
    """The auxiliary modules of a run by name. Checkpoints hold them."""

    def __init__(self) -> None:
        self._modules: dict[str, AuxiliaryModule[Any]] = {}
        self._unclaimed: dict[
            str, dict[str, Any]
        ] = {}  # states from a checkpoint whose modules `get` has not built yet

    def get(self, name: str, make: Callable[[], Network], lr: float) -> AuxiliaryModule[Network]:
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
