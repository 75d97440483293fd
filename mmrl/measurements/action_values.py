"""Q values of the actions that the current policy would take at recorded observations, with their gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.q_values import QValues
from mmrl.protocols.abilities import DifferentiableActions, OffPolicy, OffPolicyLearning
from mmrl.protocols.measurement import ReplayedContext, ReplayedMeasurement
from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.core.values import QEnsemble
    from mmrl.protocols.auxiliary import AuxiliaryModule, AuxiliaryModules
    from mmrl.rollouts import Rollouts


@dataclass(frozen=True)
class SampledActionValues:
    """Q values of sampled chunks of actions, for a micro-batch of n rollouts, of which some are recorded policy steps.
    temperature: the weight of the entropy in the objective; 0: entropy is not used."""

    recorded: Tensor  # [n] bool, which rollouts are recorded policy steps
    q: Tensor  # [n] float64, Q of the chunk sampled at the step's observation, with a gradient; else 0
    logp: Tensor  # [n] float64, log-probability of that chunk, with a gradient; 0 if entropy is not used
    temperature: float


@dataclass(frozen=True)
class ActionValues(ReplayedMeasurement[SampledActionValues]):
    """The Q value of a chunk of actions that the policy samples at each recorded observation of a micro-batch, as a
    function of the policy's weights (the actor's part of SAC, arXiv 1812.05905, and of DDPG, arXiv 1509.02971).

    values: the measurement that trains the Q networks. of: which of the networks' Q values is used, the least or the
    mean.
    """

    values: QValues
    of: Literal["least", "mean"]
    requires: ClassVar[type] = OffPolicyLearning
    cost: ClassVar[str] = "a further forward and backward pass of the policy for each recorded step"

    @property
    def name(self) -> str:
        return f"action_values {self.of} {self.values.name}"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({DifferentiableActions})

    def measure(self, micro: Rollouts, context: ReplayedContext) -> SampledActionValues:
        """Samples a chunk at each recorded step of the micro-batch and returns its Q values, with gradients to the
        policy but not to the Q networks."""
        import torch

        from mmrl.samplers.chain import derive_seed

        recorded = micro.recorded
        rows = recorded.nonzero().flatten()
        zeros = torch.zeros(len(micro), dtype=torch.float64)
        if not len(rows):
            return SampledActionValues(recorded, zeros, zeros, 0.0)
        seeds = [noise_seed(micro, row, derive_seed(context.seed, context.step)) for row in rows.tolist()]
        pairs, sampled_logp = self.sample(micro, rows.tolist(), seeds, context.policy.off_policy)
        networks = self.networks(context.modules, pairs.shape[1], context.seed)
        by_member = networks.module.fixed(pairs)  # [Q network, recorded step]
        q = zeros.index_put((rows,), by_member.amin(0) if self.of == "least" else by_member.mean(0))
        temperature = self.values.entropy_temperature(context.modules)
        if temperature is None or sampled_logp is None:
            return SampledActionValues(recorded, q, zeros, 0.0)
        logp = zeros.index_put((rows,), sampled_logp.double().to(zeros.device))
        return SampledActionValues(recorded, q, logp, float(temperature.module.value))

    def sample(
        self, micro: Rollouts, rows: list[int], seeds: list[int], policy: OffPolicy
    ) -> tuple[Tensor, Tensor | None]:
        """Samples from the policy at the recorded steps `rows` of a micro-batch. seeds: one for each. Returns the input
        of the Q networks, [row, number], and log-probabilities [row], None if entropy is not used; with gradients."""
        import torch

        sampled = policy.resample(micro, rows, seeds, logp=bool(self.values.temperature))
        return torch.cat([sampled.observations, sampled.chunks.to(sampled.observations)], 1), sampled.logp

    def networks(self, modules: AuxiliaryModules, inputs: int, seed: int) -> AuxiliaryModule[QEnsemble]:
        """Returns the Q networks that the policy climbs. inputs: size of their input; seed: the run's seed."""
        return self.values.q_networks(modules, inputs, seed)


def noise_seed(micro: Rollouts, row: int, seed: int) -> int:
    """Returns the seed with which the policy samples a chunk at a recorded step. Copies of a step in several groups,
    and proposals at it, get different seeds. row: the index of the step in the micro-batch `micro`; seed: the seed of
    the training step."""
    from mmrl.samplers.chain import derive_seed

    metadata = micro.samples[row].prompt.metadata
    proposal = metadata.get("proposal_seed", 0)
    # group ids of recorded steps are negative, see `ExtraSource`
    return derive_seed(derive_seed(seed, proposal), -int(micro.group[row]))
