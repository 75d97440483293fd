"""Where the states of chains lead, and what can be read of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.abilities import Completing, Latent
from mmrl.protocols.measurement import CollectedContext, CollectedMeasurement, PreparedContext, PreparedMeasurement
from mmrl.protocols.offers import Offer

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Column, Rollouts


@dataclass(frozen=True)
class Completions(CollectedMeasurement["Column"]):
    """Rewards [rollout, 1 + decision] of what a chain's states lead to without further noise: before its first
    stochastic step, and behind each, which of the last one is the rollout's own."""

    requires: ClassVar[type] = Completing
    cost: ClassVar[str] = "a deterministic completion of every step of the chain, and its reward"
    of_sampling_weights: ClassVar[bool] = True
    name: ClassVar[str] = "completions"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"separate_chains"})

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> Column:
        import torch

        from mmrl.rollouts import Column

        after = context.rewards(rollouts)[:, None]
        return Column(torch.cat([_completed(rollouts, context, ends=False), after], 1))


@dataclass(frozen=True)
class CandidateCompletions(CollectedMeasurement["Column"]):
    """Rewards [rollout, decision] of what a chain's states behind each of its decisions lead to without further noise,
    of candidates that share the state before it."""

    requires: ClassVar[type] = Completing
    cost: ClassVar[str] = "a deterministic completion of every candidate, and its reward"
    of_sampling_weights: ClassVar[bool] = True
    name: ClassVar[str] = "candidate_completions"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"candidates"})

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> Column:
        from mmrl.rollouts import Column

        return Column(_completed(rollouts, context, ends=True))


def _completed(rollouts: Rollouts, context: CollectedContext, *, ends: bool) -> Tensor:
    """[rollout, decision] the reward of where the state before each decision leads, with `ends` that behind it."""
    count = rollouts.mask.shape[1]
    made = context.policy.complete_steps(rollouts, ends=ends)
    return context.earned(made, rollouts.group.repeat_interleave(count)).view(-1, count)


@dataclass(frozen=True)
class PooledLatents(PreparedMeasurement["Column"]):
    """The latents before each decision, pooled, and their noise level, [rollout, decision, number]."""

    requires: ClassVar[type] = Latent
    cost: ClassVar[str] = "a small network of values, which learns on the CPU"
    name: ClassVar[str] = "latents"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        from mmrl.rollouts import Column

        return Column(context.policy.latents(rollouts))
