"""A small network that learns what a state is worth, and goes on learning from step to step."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam


def tilted_loss(value: Tensor, outcome: Tensor, eta: float) -> Tensor:
    """[...] e^z - z - 1 with z = eta (outcome - value), over eta^2; its limit where eta is 0. Its least mean is at the
    value (1 / eta) log E exp(eta outcome), which for eta 0 is the mean. Beyond z = 5 the loss is linear."""
    apart = outcome - value
    if eta == 0:
        return apart.square() / 2
    z = eta * apart
    most = z.clamp(max=5.0)
    rest = (math.exp(5.0) - 1) * (z - most)
    return (most.exp() - 1 - most + rest) / eta**2


class Values:
    """A perceptron with two hidden layers from [row, number] to [row], in fp64 on the CPU, trained by Adam.

    All that it is lies in `state`, plain lists and numbers, so that a checkpoint can hold it.
    """

    def __init__(self, inputs: int, width: int, seed: int, state: dict[str, Any] | None = None) -> None:
        """state: that of an earlier one of the same sizes; without it weights are drawn from the seed."""
        chance = torch.Generator().manual_seed(seed)
        sizes = [(inputs, width), (width, width), (width, 1)]
        made = [torch.randn(a, b, generator=chance, dtype=torch.float64) / math.sqrt(a) for a, b in sizes]
        made[-1] = made[-1] * 0
        biases = [torch.zeros(b, dtype=torch.float64) for _, b in sizes]
        self.weights = [*made, *biases]
        self.first, self.second = ([torch.zeros_like(w) for w in self.weights] for _ in range(2))
        self.steps = 0
        if state is not None:
            self.steps = int(state["steps"])
            for name in ("weights", "first", "second"):
                kept = [torch.tensor(v, dtype=torch.float64) for v in state[name]]
                setattr(self, name, [new.view_as(old) for new, old in zip(kept, self.weights, strict=True)])

    @property
    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            **{name: [w.flatten().tolist() for w in vars(self)[name]] for name in ("weights", "first", "second")},
        }

    def __call__(self, x: Tensor) -> Tensor:
        a, b, c, *biases = self.weights
        h = F.silu(x.double() @ a + biases[0])
        return (F.silu(h @ b + biases[1]) @ c + biases[2])[:, 0]

    def learn(self, x: Tensor, outcome: Tensor, *, eta: float, lr: float, passes: int, size: int, seed: int) -> float:
        """Some passes over the rows in batches of `size`; the mean loss of the last one."""
        chance, last = torch.Generator().manual_seed(seed), 0.0
        for _ in range(passes):
            losses = []
            for rows in torch.randperm(len(x), generator=chance).split(size):
                for weight in self.weights:
                    weight.requires_grad_(True)
                loss = tilted_loss(self(x[rows]), outcome[rows].double(), eta).mean()
                slopes = torch.autograd.grad(loss, self.weights)
                self.weights = [weight.detach() for weight in self.weights]
                self._step(slopes, lr)
                losses.append(float(loss.detach()))
            last = sum(losses) / len(losses)
        return last

    def _step(self, slopes: tuple[Tensor, ...], lr: float) -> None:
        self.steps += 1
        for i, slope in enumerate(slopes):
            self.first[i] = BETAS[0] * self.first[i] + (1 - BETAS[0]) * slope
            self.second[i] = BETAS[1] * self.second[i] + (1 - BETAS[1]) * slope.square()
            mean = self.first[i] / (1 - BETAS[0] ** self.steps)
            square = self.second[i] / (1 - BETAS[1] ** self.steps)
            self.weights[i] = self.weights[i] - lr * mean / (square.sqrt() + EPS)


def word_counts(text: str, count: int) -> Tensor:
    """[count] how many words of a text fall into each of as many places, by a hash that is the same everywhere."""
    found = torch.zeros(count, dtype=torch.float64)
    for word in text.lower().split():
        found[zlib.crc32(word.encode()) % count] += 1.0
    return found
