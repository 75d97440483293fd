"""A head whose flow from noise to actions is exactly invertible, so that a chunk's likelihood is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmrl.policies.vla.heads.head import ActionSampling, EncodedPrefix, Head, SampledChunks
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions, InvertibleActions


class InvertibleHead(Head):
    """Transforms two copies x and y of the chunk from noise to actions, in T steps of four updates each:

        x <- x + v(y, t) / T        y <- y + v(x, t) / T        x <- p x + (1 - p) y        y <- p y + (1 - p) x

    The executed actions are the mean of x and y. The first two updates keep the volume. The last two scale it by p for
    each of the D numbers of a chunk. So log p(x, y) = log N(noise) - 2 T D log p is exact for any network v (after
    GenPO, arXiv 2505.18763). A chunk is one decision, including its actions that were not executed.
    """

    last_layer_only = True

    def __init__(
        self, settings: InvertibleActions, action: Actions, action_dim: int, state_dim: int, width: int
    ) -> None:
        """width: size of the backbone's hidden states; 0 for a policy without a backbone."""
        super().__init__(action, action_dim, state_dim)
        self.steps, self.mix, self.apart, self.scale = settings.steps, settings.mix, settings.apart, settings.scale
        self.size = math.prod(self.shape)
        # inputs: last hidden state, robot's state, one copy of the chunk, and the time of the step
        sizes = [width + self.state_dim + self.size + 1, *[settings.width] * settings.layers]
        self.velocity: nn.Sequential = perceptron(sizes, self.size, last_gain=settings.last_gain)

    @property
    def decisions(self) -> int:
        return 1

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples two copies of each chunk by the flow from noise, "copies" [n, 2, chunk x action]. "actions" are their
        mean; see `Head.act`."""
        noise = torch.stack(
            [torch.randn(2, self.size, generator=torch.Generator().manual_seed(seed)) for seed in sampling.seeds]
        ).to(state.device)
        copies = self.noise_to_actions(sampling.temperature * self.scale * noise, self._context(prefix, state))
        return {
            "copies": copies,
            "actions": copies.mean(1).view(-1, *self.shape),
            "temperature": torch.full((len(copies),), sampling.temperature or 1.0),
        }

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Returns "logp" [n, 1]: the log-density of the noise that the inverse flow computes from the copies, minus the
        logarithm of the flow's change of volume. valid, old, reference: not used."""
        noise = self.actions_to_noise(sampled["copies"], self._context(prefix, state))
        std = (self.scale * sampled["temperature"]).to(noise)[:, None, None]
        logp = -0.5 * (noise / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
        log_volume_change = 2 * self.steps * self.size * math.log(self.mix)
        return {"logp": (logp.sum((1, 2)) - log_volume_change)[:, None]}

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        """Returns two copies of each demonstrated chunk, one with noise added and one with it subtracted: if they were
        equal, all pairs would lie in a subspace of volume 0 and have no density."""
        flat = actions.flatten(1)
        noise = torch.stack(
            [torch.randn(self.size, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        ).to(flat)
        copies = torch.stack([flat + self.apart * noise, flat - self.apart * noise], 1)
        return {"copies": copies, "actions": actions, "temperature": torch.ones(len(actions))}

    # --- the flow ---

    def noise_to_actions(self, copies: Tensor, context: Tensor) -> Tensor:
        """Transforms noise [n, 2, chunk x action] to the two copies of the chunk. context: [n, width + state]."""
        x, y = copies.unbind(1)
        for step in range(self.steps):
            x = x + self._velocity(y, context, step)
            y = y + self._velocity(x, context, step)
            x = self.mix * x + (1 - self.mix) * y
            y = self.mix * y + (1 - self.mix) * x
        return torch.stack([x, y], 1)

    def actions_to_noise(self, copies: Tensor, context: Tensor) -> Tensor:
        """Transforms two copies of the chunk [n, 2, chunk x action] to noise: the inverse of `noise_to_actions`, update
        by update."""
        x, y = copies.unbind(1)
        for step in reversed(range(self.steps)):
            y = (y - (1 - self.mix) * x) / self.mix
            x = (x - (1 - self.mix) * y) / self.mix
            y = y - self._velocity(x, context, step)
            x = x - self._velocity(y, context, step)
        return torch.stack([x, y], 1)

    def _velocity(self, copy: Tensor, context: Tensor, step: int) -> Tensor:
        """Returns v(copy, step / T) / T, [n, chunk x action] fp32."""
        time = torch.full((len(copy), 1), step / self.steps, device=copy.device)
        return self.velocity(torch.cat([context, copy, time], 1)).float() / self.steps

    def _context(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Concatenates the last hidden state of the prefix's last token and the robot's state, [n, width + state]."""
        return prefix.last if self.state_dim == 0 else torch.cat([prefix.last, state.to(prefix.last)], 1)
