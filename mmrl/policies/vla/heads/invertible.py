"""An exactly invertible flow over actions, so that the likelihood of a chunk is exact too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmrl.policies.vla.heads.head import ActionSampling, Chosen, Head, Reading
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions, InvertibleActions


class InvertibleHead(Head):
    """Two copies x and y of the chunk flow from noise to actions, one line after the other at each of T steps:

        x <- x + v(y, t) / T        y <- y + v(x, t) / T        x <- p x + (1 - p) y        y <- p y + (1 - p) x

    The executed actions are their mean. The first two are shears, which keep volumes; the last two scale them by p
    each, for each of D numbers. So log p(x, y) = log N(noise) - 2 T D log p, exactly, whatever v is (after GenPO, arXiv
    2505.18763). A chunk is one decision; actions that were not executed are part of it.
    """

    context_only = True

    def __init__(
        self, settings: InvertibleActions, action: Actions, action_dim: int, state_dim: int, width: int
    ) -> None:
        """width: of the backbone, 0 where it reads nothing."""
        super().__init__(action, action_dim, state_dim)
        self.steps, self.mix, self.apart, self.scale = settings.steps, settings.mix, settings.apart, settings.scale
        self.size = math.prod(self.shape)
        sizes = [width + self.state_dim + self.size + 1, *[settings.width] * settings.layers]
        self.velocity: nn.Sequential = perceptron(sizes, self.size, last_gain=settings.last_gain)

    @property
    def decisions(self) -> int:
        return 1

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        noise = torch.stack(
            [torch.randn(2, self.size, generator=torch.Generator().manual_seed(seed)) for seed in sampling.seeds]
        ).to(state.device)
        copies = self.forwards(sampling.temperature * self.scale * noise, self._context(reading, state))
        return {
            "copies": copies,
            "actions": copies.mean(1).view(-1, *self.shape),
            "temperature": torch.full((len(copies),), sampling.temperature or 1.0),
        }

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        noise = self.backwards(chosen["copies"], self._context(reading, state))
        std = (self.scale * chosen["temperature"]).to(noise)[:, None, None]
        logp = -0.5 * (noise / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
        volume = 2 * self.steps * self.size * math.log(self.mix)
        return {"logp": (logp.sum((1, 2)) - volume)[:, None]}

    def teach(self, actions: Tensor, seeds: Sequence[int]) -> Chosen:
        """Returns copies at a distance on both sides of the demonstrated chunk, for equal ones have no density."""
        flat = actions.flatten(1)
        drawn = torch.stack(
            [torch.randn(self.size, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        ).to(flat)
        copies = torch.stack([flat + self.apart * drawn, flat - self.apart * drawn], 1)
        return {"copies": copies, "actions": actions, "temperature": torch.ones(len(actions))}

    # --- the flow ---

    def forwards(self, copies: Tensor, context: Tensor) -> Tensor:
        """Maps noise [n, 2, chunk x action] to actions."""
        x, y = copies.unbind(1)
        for step in range(self.steps):
            x = x + self._velocity(y, context, step)
            y = y + self._velocity(x, context, step)
            x = self.mix * x + (1 - self.mix) * y
            y = self.mix * y + (1 - self.mix) * x
        return torch.stack([x, y], 1)

    def backwards(self, copies: Tensor, context: Tensor) -> Tensor:
        """Maps actions [n, 2, chunk x action] to noise: the inverse of `forwards`, line by line."""
        x, y = copies.unbind(1)
        for step in reversed(range(self.steps)):
            y = (y - (1 - self.mix) * x) / self.mix
            x = (x - (1 - self.mix) * y) / self.mix
            y = y - self._velocity(x, context, step)
            x = x - self._velocity(y, context, step)
        return torch.stack([x, y], 1)

    def _velocity(self, copy: Tensor, context: Tensor, step: int) -> Tensor:
        time = torch.full((len(copy), 1), step / self.steps, device=copy.device)
        return self.velocity(torch.cat([context, copy, time], 1)).float() / self.steps

    def _context(self, reading: Reading, state: Tensor) -> Tensor:
        return reading.last if self.state_dim == 0 else torch.cat([reading.last, state.to(reading.last)], 1)
