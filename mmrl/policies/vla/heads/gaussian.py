"""Heads with Gaussian actions, whose standard deviation is a parameter for each number of a chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.policies.vla.heads.gaussian_settings import GaussianActions
from mmrl.policies.vla.heads.head import ActionSampling, EncodedPrefix, LevelledHead, SampledChunks
from mmrl.policies.vla.heads.perceptron import perceptron
from mmrl.policies.vla.settings import Actions, NormalActions

EDGE = 1e-4  # a squashed Gaussian clamps demonstrated actions to this distance from -1 and 1, which tanh never reaches


class DiagonalGaussianHead(LevelledHead):
    """Base of Gaussian heads. Each number of the chunk has a standard deviation that does not depend on the
    observation; it is learned or fixed. The temperature multiplies it."""

    def __init__(self, settings: NormalActions, action: Actions, action_dim: int, state_dim: int) -> None:
        super().__init__(settings.level, action, action_dim, state_dim)
        initial_log_std = torch.full(self.shape, math.log(settings.std))
        self.log_std = nn.Parameter(initial_log_std, requires_grad=not settings.fixed)
        self.min_log_std = math.log(settings.least_std) if settings.least_std else -math.inf

    def clamped_log_std(self) -> Tensor:
        """Returns the logarithm of the standard deviation, at least `min_log_std`: [chunk, action] fp32."""
        return self.log_std.float().clamp(min=self.min_log_std)


class NormalHead(DiagonalGaussianHead):
    """A head with Gaussian actions around a mean that a network predicts."""

    def mean(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Predicts the mean of the actions, [n, chunk, action] fp32."""
        raise NotImplementedError

    def act(self, prefix: EncodedPrefix, state: Tensor, sampling: ActionSampling) -> SampledChunks:
        return self.sample_around(self.mean(prefix, state), sampling)

    def sample_around(self, mean: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples actions from the Gaussian with `mean` [n, chunk, action]."""
        generator = torch.Generator()
        noise = torch.stack([torch.randn(self.shape, generator=generator.manual_seed(seed)) for seed in sampling.seeds])
        actions = mean + sampling.temperature * self.clamped_log_std().exp() * noise.to(mean.device)
        return {"actions": actions, "temperature": self._temperature(sampling)}

    def score(
        self,
        prefix: EncodedPrefix,
        state: Tensor,
        sampled: SampledChunks,
        valid: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> dict[str, Tensor]:
        """Scores sampled actions under the predicted Gaussian; see `Head.score` and `score_around`."""
        return self.score_around(self.mean(prefix, state), sampled, valid, old, reference)

    def score_around(
        self, mean: Tensor, sampled: SampledChunks, valid: Tensor, old: Tensor | None, reference: Tensor | None
    ) -> dict[str, Tensor]:
        """Returns the fields of `score`, given `mean` [n, chunk, action]. "prediction" holds mean and log standard
        deviation, [n, decisions, number, 2]. "divergence" and "reference_kl" are computed from `old` and `reference`,
        the predictions of other policies, unless these are None."""
        log_std = self.clamped_log_std() + sampled["temperature"].log().float()[:, None, None]
        logp = gaussian_logp(sampled["actions"], mean, log_std)
        entropy = gaussian_entropy(log_std).expand_as(logp)
        current = torch.stack([mean, log_std.expand_as(mean)], -1)
        fields = {
            "logp": self._by_level(logp, valid),
            "entropy": self._by_level(entropy, valid),
            "prediction": current.detach().view(len(mean), self.decisions, -1, 2),
        }
        for name, prediction in (("divergence", old), ("reference_kl", reference)):
            if prediction is not None:
                fields[name] = self._by_level(gaussian_divergence(prediction.view(current.shape), current), valid)
        return fields


class GaussianHead(NormalHead):
    """A Gaussian head whose mean an MLP computes from the last hidden state of the prefix's last token and the robot's
    state."""

    last_layer_only = True

    def __init__(self, settings: GaussianActions, action: Actions, action_dim: int, state_dim: int, width: int) -> None:
        """width: size of the backbone's hidden states; 0 for a policy without a backbone."""
        super().__init__(settings, action, action_dim, state_dim)
        sizes = [width + self.state_dim, *[settings.width] * settings.layers]
        self.layers = perceptron(sizes, math.prod(self.shape), last_gain=settings.last_gain)

    def mean(self, prefix: EncodedPrefix, state: Tensor) -> Tensor:
        """Predicts the mean of the actions, [n, chunk, action] fp32."""
        features = prefix.last if self.state_dim == 0 else torch.cat([prefix.last, state.to(prefix.last)], 1)
        return self.layers(features).float().view(-1, *self.shape)


class SquashedGaussianHead(GaussianHead):
    """A Gaussian head whose samples go through tanh, so that actions lie in (-1, 1), or within another `bound`. The
    divergence of two policies is that of their Gaussians; the entropy has no closed form."""

    bound = 1.0

    def sample_around(self, mean: Tensor, sampling: ActionSampling) -> SampledChunks:
        """Samples actions, and "before_tanh" [n, chunk, action], the values whose tanh they are, times `bound`."""
        sampled = super().sample_around(mean, sampling)
        return {**sampled, "actions": self.bound * sampled["actions"].tanh(), "before_tanh": sampled["actions"]}

    def score_around(
        self, mean: Tensor, sampled: SampledChunks, valid: Tensor, old: Tensor | None, reference: Tensor | None
    ) -> dict[str, Tensor]:
        """Returns the fields of `score`, given the `mean` before tanh. The log-density of an action bound tanh(u) is
        the log-density of u minus the logarithm of the slope of bound tanh at u. The entropy has no closed form and is
        left out."""
        before = sampled["before_tanh"]
        fields = super().score_around(mean, {**sampled, "actions": before}, valid, old, reference)
        del fields["entropy"]
        log_slope = log_slope_of_tanh(before) + math.log(self.bound)
        return {**fields, "logp": fields["logp"] - self._by_level(log_slope, valid)}

    def encode_demonstrations(self, actions: Tensor, seeds: Sequence[int]) -> SampledChunks:
        """Returns also "before_tanh", the inverse tanh of the actions; see `EDGE`."""
        inside = (actions.double() / self.bound).clamp(-1 + EDGE, 1 - EDGE)
        return {**super().encode_demonstrations(actions, seeds), "before_tanh": inside.atanh().to(actions.dtype)}


def log_slope_of_tanh(x: Tensor) -> Tensor:
    """Computes log(1 - tanh(x)^2) without cancellation, shaped like x."""
    return 2 * (math.log(2) - x - F.softplus(-2 * x))


def gaussian_logp(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Returns the log-density of each number, shaped like x."""
    return -0.5 * ((x - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Returns the entropy of Gaussians in nats, shaped like log_std."""
    return 0.5 + 0.5 * math.log(2 * math.pi) + log_std


def gaussian_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Returns KL(p || q) of Gaussians [..., 2], whose last dimension holds mean and log standard deviation: [...]."""
    (p_mean, p_log_std), (q_mean, q_log_std) = p.unbind(-1), q.unbind(-1)
    squared_distance = (p_mean - q_mean).square() / q_log_std.exp().square()
    return q_log_std - p_log_std + 0.5 * ((2 * (p_log_std - q_log_std)).exp() + squared_distance - 1)
