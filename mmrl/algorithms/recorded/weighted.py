"""Weighted imitation of recorded episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.recorded.recorded import RecordedSteps
from mmrl.settings import option
from mmrl.terms.losses.advantage_weighted import AdvantageWeights

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class AdvantageWeighted(RecordedSteps):
    """Imitation of recorded steps, including failures, each weighted by how much its return exceeds the value that a
    critic expects. It needs no new episodes: task.demonstrations has the data."""

    equation: ClassVar[str] = (
        "-w(R - V(s)) logp + value_coefficient |expectile - 1[R < V]| (R - V)^2, w without gradient, R the discounted "
        "return from the step on"
    )
    source: ClassVar[str] = (
        "AWR, arXiv 1910.00177; expectiles: IQL, arXiv 2110.06169, without its Q; binary weights: CRR, arXiv 2006.15134"
    )
    type: str = "advantage_weighted"
    weights: AdvantageWeights = option(AdvantageWeights(), "weight of a step by its advantage")

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -w(R - V) logp and statistics, [rollout, decision]; the weight w has no gradient."""
        difference = self.difference(micro, replay).detach()
        weights = self.weights.of(difference)
        stats = {"weight": weights.expand(replay.logp.shape), "advantage": difference.expand(replay.logp.shape)}
        return -weights * replay.logp, {f"advantage_weighted/{name}": column for name, column in stats.items()}
