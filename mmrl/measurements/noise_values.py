"""Q networks of the noise from which a frozen flow denoises actions, distilled from Q networks of the actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.measurements.action_values import ActionValues
from mmrl.measurements.q_values import QValues, draw_rows
from mmrl.protocols.abilities import OffPolicyLearning
from mmrl.protocols.measurement import PreparedContext, PreparedMeasurement
from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.core.values import QEnsemble
    from mmrl.protocols.auxiliary import AuxiliaryModule, AuxiliaryModules
    from mmrl.rollouts import Column, Rollouts

STREAM = -2  # number of the seed of the noise and rows here; Q networks of actions use rows and updates, from 0


@dataclass(frozen=True)
class NoiseQValues(PreparedMeasurement["Column"]):
    """Distillation of Q networks of the noise (DSRL-NA, arXiv 2506.15799): Q_i(s, w) learns Q_i(s, flow(s, w)) of the
    actions that a frozen flow denoises from standard normal noise w at recorded observations s. The column holds the
    squared error of each recorded step before its last update, NaN for other rollouts and steps that were not drawn.

    values: trains the Q networks of actions, before these. updates: updates per training step; each draws `batch` of
    `values` of the recorded steps, and new noise for each.
    """

    values: QValues
    updates: int
    requires: ClassVar[type] = OffPolicyLearning
    cost: ClassVar[str] = "a forward pass and a denoised chunk for each recorded step that an update draws"

    @property
    def name(self) -> str:
        return f"noise_q_values updates={self.updates} {self.values.name}"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"noise"})

    def networks(self, modules: AuxiliaryModules, inputs: int, seed: int) -> AuxiliaryModule[QEnsemble]:
        """Returns the Q networks of the noise. inputs: size of an encoded observation and noise together; seed: the
        run's seed."""
        from mmrl.core.values import QEnsemble

        settings = self.values
        first_seed = seed + 1 + settings.members  # after those of the Q networks of actions
        return modules.get(
            f"{settings.name} noise_q",
            lambda: QEnsemble(inputs, settings.width, settings.members, first_seed),
            lr=settings.lr,
        )

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        """Updates the Q networks of the noise. A collective."""
        import torch

        from mmrl.rollouts import Column
        from mmrl.samplers.chain import derive_seed

        errors = torch.full((len(rollouts),), torch.nan)
        recorded = rollouts.recorded.nonzero().flatten()
        if not int(context.sum(torch.tensor(len(recorded)))):  # on all ranks
            return Column(errors)
        observations = [rollouts.samples[i].prompt.metadata["observation"] for i in recorded.tolist()]
        stream = derive_seed(derive_seed(context.seed, context.step), STREAM)
        for update in range(self.updates):
            seed = derive_seed(stream, update)
            rows = draw_rows(len(recorded), self.values.batch, seed)
            errors[recorded[rows]] = self._update([observations[i] for i in rows.tolist()], seed, context).float()
        return Column(errors)

    def _update(self, observations: list[Any], seed: int, context: PreparedContext) -> Tensor:
        """Takes an optimizer step toward the Q values of actions that are denoised from new noise at n observations.
        Returns the mean squared errors of the networks before it, [n]."""
        import torch

        by_noise, by_actions = self._pairs(observations, seed, context)
        target = self.values.q_networks(context.modules, by_actions.shape[1], context.seed).predict(by_actions)
        networks = self.networks(context.modules, by_noise.shape[1], context.seed)
        errors = (networks.module(by_noise) - target).square()
        count = int(context.sum(torch.tensor(len(observations))))
        networks.descend([errors.sum() / count], context.sum)
        return errors.detach().mean(0)

    def _pairs(self, observations: list[Any], seed: int, context: PreparedContext) -> tuple[Tensor, Tensor]:
        """Samples noise at n observations. Returns observations and noise, and observations and the actions denoised
        from it, as inputs of Q networks, [n, number] each."""
        import torch

        from mmrl.samplers.chain import derive_seed

        policy = context.policy.off_policy
        width, chunk_width = policy.encoding_sizes
        by_noise = [torch.zeros(0, width + policy.noise_size)]
        by_actions = [torch.zeros(0, width + chunk_width)]
        size = max(map(len, context.micro_batches))  # observations that the policy encodes at once
        for first in range(0, len(observations), size):
            part = observations[first : first + size]
            sampled = policy.denoise_prior(part, [derive_seed(seed, first + i) for i in range(len(part))])
            by_noise.append(torch.cat([sampled.observations, sampled.noise.float().cpu()], 1))
            by_actions.append(torch.cat([sampled.observations, sampled.chunks.float().cpu()], 1))
        return torch.cat(by_noise), torch.cat(by_actions)


@dataclass(frozen=True)
class NoiseActionValues(ActionValues):
    """The Q value of noise that the policy samples at each recorded observation of a micro-batch, as a function of the
    policy's weights: the actor of DSRL. Nothing is denoised.

    noise: the measurement that trains the Q networks of the noise."""

    noise: NoiseQValues
    cost: ClassVar[str] = "a further forward and backward pass of the network that samples noise"

    @property
    def name(self) -> str:
        return f"noise_action_values {self.of} {self.noise.name}"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"noise"})

    def sample(self, micro: Rollouts, rows: list[int], seeds: list[int], policy: Any) -> tuple[Tensor, Tensor | None]:
        import torch

        sampled = policy.resample_noise(micro, rows, seeds, logp=bool(self.values.temperature))
        return torch.cat([sampled.observations, sampled.noise.to(sampled.observations)], 1), sampled.logp

    def networks(self, modules: AuxiliaryModules, inputs: int, seed: int) -> AuxiliaryModule[QEnsemble]:
        return self.noise.networks(modules, inputs, seed)
