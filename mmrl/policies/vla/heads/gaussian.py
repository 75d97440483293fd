"""Heads with Gaussian actions, whose standard deviation is a parameter for each number of a chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mmrl.policies.vla.heads.head import ActionSampling, Chosen, LevelledHead, Reading
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions, GaussianActions, NormalActions


class SpreadHead(LevelledHead):
    """A head with one standard deviation for each number of the chunk, learned or fixed, which the temperature
    multiplies."""

    def __init__(self, settings: NormalActions, action: Actions, action_dim: int, state_dim: int) -> None:
        super().__init__(settings.level, action, action_dim, state_dim)
        spread = torch.full(self.shape, math.log(settings.std))
        self.log_std = nn.Parameter(spread, requires_grad=not settings.fixed)
        self.least = math.log(settings.least_std) if settings.least_std else -math.inf

    def spread(self) -> Tensor:
        """Returns the logarithm of the standard deviation, [chunk, action] fp32."""
        return self.log_std.float().clamp(min=self.least)


class NormalHead(SpreadHead):
    """A head with Gaussian actions around a mean that a network predicts."""

    def mean(self, reading: Reading, state: Tensor) -> Tensor:
        """Returns the mean [n, chunk, action] fp32."""
        raise NotImplementedError

    def act(self, reading: Reading, state: Tensor, sampling: ActionSampling) -> Chosen:
        return self.drawn(self.mean(reading, state), sampling)

    def drawn(self, mean: Tensor, sampling: ActionSampling) -> Chosen:
        generator = torch.Generator()
        noise = torch.stack([torch.randn(self.shape, generator=generator.manual_seed(seed)) for seed in sampling.seeds])
        actions = mean + sampling.temperature * self.spread().exp() * noise.to(mean.device)
        return {"actions": actions, "temperature": self._temperature(sampling)}

    def score(
        self,
        reading: Reading,
        state: Tensor,
        chosen: Chosen,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        return self.scored(self.mean(reading, state), chosen, valid, old, reference)

    def scored(
        self, mean: Tensor, chosen: Chosen, valid: Tensor, old: Tensor | None, reference: Tensor | None
    ) -> dict[str, Tensor]:
        """Returns the fields of `score`, given `mean` [n, chunk, action]."""
        log_std = self.spread() + chosen["temperature"].log().float()[:, None, None]
        logp = gaussian_logp(chosen["actions"], mean, log_std)
        entropy = gaussian_entropy(log_std).expand_as(logp)
        now = torch.stack([mean, log_std.expand_as(mean)], -1)
        fields = {
            "logp": self._by_level(logp, valid),
            "entropy": self._by_level(entropy, valid),
            "prediction": now.detach().view(len(mean), self.decisions, -1, 2),
        }
        for name, other in (("divergence", old), ("reference_kl", reference)):
            if other is not None:
                fields[name] = self._by_level(gaussian_divergence(other.view(now.shape), now), valid)
        return fields


class GaussianHead(NormalHead):
    """A Gaussian head whose mean is a perceptron of the prompt's last token and the robot's state."""

    context_only = True

    def __init__(self, settings: GaussianActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: of the backbone, 0 where it reads nothing."""
        super().__init__(settings, action, action_dim, state_dim)
        sizes = [width + self.state_dim, *[settings.width] * settings.layers]
        self.layers = perceptron(sizes, math.prod(self.shape), last_gain=settings.last_gain)

    def mean(self, reading: Reading, state: Tensor) -> Tensor:
        features = reading.last if self.state_dim == 0 else torch.cat([reading.last, state.to(reading.last)], 1)
        return self.layers(features).float().view(-1, *self.shape)


def gaussian_logp(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Returns the log-density of every number, [...]."""
    return -0.5 * ((x - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    return 0.5 + 0.5 * math.log(2 * math.pi) + log_std


def gaussian_divergence(a: Tensor, b: Tensor) -> Tensor:
    """Returns KL(a || b) of Gaussians given by mean and log standard deviation in the last dimension, [...]."""
    (mean, log_std), (other, log_other) = a.unbind(-1), b.unbind(-1)
    apart = (mean - other).square() / log_other.exp().square()
    return log_other - log_std + 0.5 * ((2 * (log_std - log_other)).exp() + apart - 1)
