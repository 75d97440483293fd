"""Implicit Q-learning from recorded episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import Algorithm
from mmrl.collection.settings import CollectionSettings, Demonstrations
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.losses.advantage_weighted import AdvantageWeights, StepReturns, check_returns
from mmrl.terms.losses.q_weighted import GuidingQFunctions, estimates_of, report_agreement

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.measurements.q_values import QValues
    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts


class ImplicitQLearning(Algorithm):
    """Imitation of recorded steps, including failures, each weighted by the advantage of its actions under Q networks
    that learn from the same steps. Unlike advantage_weighted, it credits a step for the value of the next observation,
    not for what its own episode earned from there on."""

    equation: ClassVar[str] = (
        "-w(Q(s, a) - V(s)) logp; V: |expectile - 1[u < 0]| u^2 with u = min_i Q'_i(s, a) - V(s); Q_i: (r + gamma^k "
        "V(s') - Q_i(s, a))^2 of a chunk of k actions; Q' follows Q"
    )
    source: ClassVar[str] = "IQL, arXiv 2110.06169, on chunks of actions as in Q-chunking, arXiv 2507.07969"
    test: ClassVar[str] = "tests/joints/test_q_weighted.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "demonstrations"
    collection: ClassVar[CollectionSettings] = Demonstrations
    type: str = "implicit_q_learning"
    returns: StepReturns = option(StepReturns(), "rewards that Q sums")
    q: GuidingQFunctions = option(GuidingQFunctions(), "the Q networks and V")
    weights: AdvantageWeights = option(AdvantageWeights(), "weight of a step by its advantage")

    @property
    def measurement(self) -> QValues:
        return self.q.measurement(self.returns)

    @property
    def base_needs(self) -> Needs:
        return Needs(measurements=(self.measurement,))

    def advantages(self, batch: Batch) -> Tensor:
        """Returns Q - V of each step. Raises UserError for a step whose episode has no recorded reward."""
        check_returns(f"algorithm.type={self.type}", [sample.prompt for sample in batch.rollouts.samples])
        return estimates_of(batch.rollouts, self.measurement)["advantage"]

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        report_agreement(batch, self.measurement, self.returns)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -w(Q - V) logp and statistics, [rollout, decision]; the weight w has no gradient."""
        estimates = estimates_of(micro, self.measurement)
        advantages = estimates["advantage"].to(replay.logp)[:, None]
        weights = self.weights.of(advantages)
        columns = {"weight": weights, "advantage": advantages, "value": estimates["value"].to(replay.logp)[:, None]}
        stats = {f"q_learning/{name}": column.expand(replay.logp.shape) for name, column in columns.items()}
        return -weights * replay.logp, stats
