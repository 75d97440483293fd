"""Soft actor-critic: off-policy reinforcement learning from stored policy steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import Algorithm, Reduction
from mmrl.collection.settings import CollectionSettings, Independent
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.losses.advantage_weighted import StepReturns, check_returns, demonstrated
from mmrl.terms.losses.q_gradient import QGradient, SoftQFunctions
from mmrl.terms.losses.q_weighted import BEST_OF, BestChunk, with_choice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mmrl.measurements.q_values import QValues
    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import RolloutKind
    from mmrl.protocols.requirements import Capabilities
    from mmrl.rollouts import Replay, Rollouts


class ActorQFunctions(SoftQFunctions):
    """Q networks that the policy climbs, and by which actions may be chosen."""

    best_of: BestChunk | None = option(None, BEST_OF)

    def measurement(self, returns: StepReturns) -> QValues:
        return with_choice(super().measurement(returns), self.best_of)


class SoftActorCritic(Algorithm):
    """Off-policy learning: Q networks learn from stored policy steps, and the policy climbs their gradient through its
    actions. New episodes are only stored; the policy learns from them later.

    A training step learns from the steps that rollout.extras=[stored_steps] draws, in `minibatches` updates of the
    policy, after `q.updates` updates of the Q networks. With demonstrations as a second source it is RLPD."""

    equation: ClassVar[str] = QGradient.equation
    source: ClassVar[str] = (
        "SAC, arXiv 1812.05905, on chunks of actions as in Q-chunking, arXiv 2507.07969; demonstrations among the "
        "drawn steps, of=mean and layer normalisation: RLPD, arXiv 2302.02948; q.noise: DSRL-NA, arXiv 2506.15799"
    )
    test: ClassVar[str] = "tests/joints/test_q_gradient.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "rollouts"
    collection: ClassVar[CollectionSettings] = Independent
    learns_from: ClassVar[frozenset[RolloutKind]] = frozenset({"replayed", "proposals", "demonstrations"})
    type: str = "soft_actor_critic"
    of: Literal["least", "mean"] = option(
        "least", "what the policy maximizes: the least of the Q networks' values, or their mean"
    )
    returns: StepReturns = option(StepReturns(simulator_reward=1.0), "rewards that Q sums")
    q: ActorQFunctions = option(ActorQFunctions(), "the Q networks, and the bonus for entropy")

    @property
    def actor(self) -> QGradient:
        """Returns the policy's loss as a term."""
        return QGradient(of=self.of, returns=self.returns, q=self.q)

    @property
    def base_needs(self) -> Needs:
        return self.actor.needs

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        """Raises ValueError if q.best_of is set and other processes sample rollouts."""
        super().check(config, offered)
        if self.q.best_of is not None:
            self.q.best_of.check(config.rollout)

    def advantages(self, batch: Batch) -> Tensor:
        """Returns 0, since the loss does not use advantages. Raises UserError for a demonstrated step whose
        episode has no recorded reward."""
        import torch

        check_returns(f"algorithm.type={self.type}", demonstrated(batch.rollouts))
        return torch.zeros(len(batch.rollouts))

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        self.actor.prepare(batch)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes temperature x logp - Q of sampled actions and statistics, [rollout, decision]."""
        import torch

        values, stats = self.actor.values(micro, replay)
        # The second summand is 0. With it the loss has a gradient also while no step is stored yet.
        return values + replay.logp.where(torch.zeros_like(replay.logp, dtype=torch.bool), 0), stats

    def reduction(self, micro: Rollouts, totals: dict[str, Tensor], length: int, device: torch.device) -> Reduction:
        """Returns the reduction over decisions of recorded steps only."""
        reduction = super().reduction(micro, totals, length, device)
        return Reduction(reduction.mode, recorded_decisions(micro).to(device), totals, length, reduction.segments)

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        """Returns the divisor of the loss, counted over the decisions of recorded steps only."""
        from mmrl.core.reduce import denominator

        return {
            "decisions": denominator(recorded_decisions(micro), mode=self.reduce_mode, segments=self.segments(micro))
        }

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        return recorded_decisions(micro) if name.startswith("q_gradient/") else super().counted_mask(name, micro)


def recorded_decisions(micro: Rollouts) -> Tensor:
    """Returns which decisions belong to recorded policy steps, [rollout, decision] bool."""
    return micro.mask & micro.recorded[:, None].to(micro.mask.device)
