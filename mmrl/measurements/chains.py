"""Measurements of denoising chains: completions of their states, and features of their latents."""

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
    """Rewards [rollout, 1 + decision] of noise-free completions of a chain's states: of the state before the first
    stochastic step, then of the state after each step. The last is the reward of the rollout itself."""

    requires: ClassVar[type] = Completing
    cost: ClassVar[str] = "a deterministic completion of every step of the chain, and its reward"
    needs_sampling_weights: ClassVar[bool] = True
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
    """Rewards [rollout, decision] of noise-free completions of the state after each decision, of candidates that share
    the state before it."""

    requires: ClassVar[type] = Completing
    cost: ClassVar[str] = "a deterministic completion of every candidate, and its reward"
    needs_sampling_weights: ClassVar[bool] = True
    name: ClassVar[str] = "candidate_completions"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"candidates"})

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> Column:
        from mmrl.rollouts import Column

        return Column(_completed(rollouts, context, ends=True))


def _completed(rollouts: Rollouts, context: CollectedContext, *, ends: bool) -> Tensor:
    """Returns the reward of the noise-free completion from the state before each decision, with `ends` from the state
    after it, [rollout, decision]."""
    count = rollouts.mask.shape[1]
    completions = context.policy.complete_steps(rollouts, ends=ends)
    return context.score(completions, rollouts.group.repeat_interleave(count)).view(-1, count)


@dataclass(frozen=True)
class PooledLatents(PreparedMeasurement["Column"]):
    """The latents before each decision, pooled, and their noise level, [rollout, decision, number]."""

    requires: ClassVar[type] = Latent
    cost: ClassVar[str] = "a small network of values, which learns on the CPU"
    name: ClassVar[str] = "latents"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        from mmrl.rollouts import Column

        return Column(context.policy.latents(rollouts))
