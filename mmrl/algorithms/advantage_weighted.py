"""Offline reinforcement learning from recorded episodes, by weighted imitation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import Algorithm, Reduction
from mmrl.collection.settings import CollectionSettings, Demonstrations
from mmrl.protocols.critic import CriticSettings, SharedCritic
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.losses.advantage_weighted import AdvantageWeights, StepReturns

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts

RETURNS = "advantage_weighted"  # name of the column with the return of each step


class AdvantageWeighted(Algorithm):
    """Imitation of recorded steps, failures too, each weighted by how much more its episode earned from there on than a
    critic expects. The critic learns the expectile of returns beside the policy. It needs no simulator's episodes:
    task.demonstrations brings the data."""

    equation: ClassVar[str] = (
        "-w(R - V(s)) logp + value_coefficient |expectile - 1[R < V]| (R - V)^2, w without gradient, R the discounted "
        "return from the step on"
    )
    source: ClassVar[str] = (
        "AWR, arXiv 1910.00177; expectiles: IQL, arXiv 2110.06169, without its Q; binary weights: CRR, arXiv 2006.15134"
    )
    test: ClassVar[str] = "tests/joints/test_advantage_weighted.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "demonstrations"
    collection: ClassVar[CollectionSettings] = Demonstrations
    type: str = "advantage_weighted"
    weights: AdvantageWeights = option(AdvantageWeights(), "weight of a step by its advantage")
    returns: StepReturns = option(StepReturns(), "what a step is compared with its value by")
    critic: CriticSettings = option(SharedCritic(), "estimates the return from an observation on")
    expectile: float = option(
        0.5, "of returns that the critic learns; 0.5: their mean, above it nearer to the best of them", gt=0, lt=1
    )
    value_coefficient: float = option(0.5, "weight of the critic's loss", gt=0)

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"critic"}), critic=self.critic)

    def advantages(self, batch: Batch) -> Tensor:
        """Returns 1 for every step, and stores its return. Raises UserError for a step whose episode does not say what
        it earned."""
        import torch

        from mmrl.errors import UserError
        from mmrl.rollouts import Column

        returns = self.returns.of(batch.rollouts)
        if returns.isnan().any():
            lacks = batch.rollouts.samples[int(returns.isnan().nonzero()[0])].prompt.id
            raise UserError(
                f"algorithm.type=advantage_weighted: the episode of {lacks} does not say what it earned; LeRobot's "
                "data sets say so in the feature next.reward or next.success; or use algorithm.type=supervised"
            )
        batch.rollouts.extras[RETURNS] = Column(returns)
        return torch.ones(len(returns))

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        difference = self._difference(micro, replay).detach()
        weights = self.weights.of(difference)
        stats = {"weight": weights.expand(replay.logp.shape), "advantage": difference.expand(replay.logp.shape)}
        return -weights * replay.logp, {f"advantage_weighted/{name}": column for name, column in stats.items()}

    def objective(self, micro: Rollouts, replay: Replay, over: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.values import expectile_error

        loss, stats = super().objective(micro, replay, over)
        error = expectile_error(self._difference(micro, replay)[:, 0], self.expectile)
        stats["critic/error"] = error.detach()
        return loss + self.value_coefficient * error.sum() / over.totals["rollouts"], stats

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        return super().denominators(micro) | {"rollouts": micro.mask.any(1).sum()}

    def counted(self, name: str, micro: Rollouts) -> Tensor:
        return micro.mask.any(1) if name.startswith("critic/") else micro.mask

    def _difference(self, micro: Rollouts, replay: Replay) -> Tensor:
        """Returns R - V(s) of each step with the critic's gradient, [rollout, 1]."""
        from mmrl.rollouts import Column, require

        value = require(replay.value, "values")
        return micro.extra(RETURNS, Column).values.to(value.device)[:, None] - value[:, :1]
