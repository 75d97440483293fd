"""Measurements of denoising chains (the latents of all denoising steps of a sample).

A completion of a state is the image that denoising it without further noise leads to.
"""

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
    """Rewards of the completions of a chain's states, [rollout, 1 + decision].

    The first is of the state before the first stochastic step, the others of the states after each step. The last one
    is the reward of the rollout itself.
    """

    requires: ClassVar[type] = Completing
    cost: ClassVar[str] = "a deterministic completion of every step of the chain, and its reward"
    needs_sampling_weights: ClassVar[bool] = True
    name: ClassVar[str] = "completions"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"separate_chains"})

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> Column:
        """Returns the rewards of the completions of the state before each step, and as the last column the reward of
        the rollout, [rollout, 1 + decision]."""
        import torch

        from mmrl.rollouts import Column

        after = context.rewards(rollouts)[:, None]  # [rollout, 1]
        return Column(torch.cat([_completion_rewards(rollouts, context, ends=False), after], 1))


@dataclass(frozen=True)
class CandidateCompletions(CollectedMeasurement["Column"]):
    """Rewards [rollout, decision] of the completions of the state after each decision, for candidate next states that
    share the state before it."""

    requires: ClassVar[type] = Completing
    cost: ClassVar[str] = "a deterministic completion of every candidate, and its reward"
    needs_sampling_weights: ClassVar[bool] = True
    name: ClassVar[str] = "candidate_completions"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"candidates"})

    def measure(self, rollouts: Rollouts, context: CollectedContext) -> Column:
        from mmrl.rollouts import Column

        return Column(_completion_rewards(rollouts, context, ends=True))


def _completion_rewards(rollouts: Rollouts, context: CollectedContext, *, ends: bool) -> Tensor:
    """Returns the reward of the completion of the state before each decision, or with `ends` after each decision,
    [rollout, decision]."""
    num_decisions = rollouts.mask.shape[1]
    completions = context.policy.complete_steps(rollouts, ends=ends)
    return context.score(completions, rollouts.group.repeat_interleave(num_decisions)).view(-1, num_decisions)


@dataclass(frozen=True)
class PooledLatents(PreparedMeasurement["Column"]):
    """The pooled latents before each decision and their noise level, [rollout, decision, feature]."""

    requires: ClassVar[type] = Latent
    cost: ClassVar[str] = "a small network of values, which learns on the CPU"
    name: ClassVar[str] = "latents"

    def measure(self, rollouts: Rollouts, context: PreparedContext) -> Column:
        from mmrl.rollouts import Column

        return Column(context.policy.latents(rollouts))
