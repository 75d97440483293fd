"""Base class of algorithms on recorded policy steps and what their episodes earned."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import Algorithm, Reduction
from mmrl.collection.settings import CollectionSettings, Demonstrations
from mmrl.protocols.critic import CriticSettings, SharedCritic
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.losses.advantage_weighted import StepReturns, check_returns

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts

RETURNS = "recorded_returns"  # name of the column with the return of each step


class RecordedSteps(Algorithm):
    """An algorithm on single policy steps of task.demonstrations, with a critic that learns the expectile of their
    returns beside the policy."""

    test: ClassVar[str] = "tests/joints/test_advantage_weighted.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "demonstrations"
    collection: ClassVar[CollectionSettings] = Demonstrations
    returns: StepReturns = option(StepReturns(), "return of a step, which is compared with the critic's value")
    critic: CriticSettings = option(SharedCritic(), "estimates the return from an observation on")
    expectile: float = option(
        0.5,
        "expectile of the returns that the critic learns; 0.5: their mean; higher: nearer to the best ones",
        gt=0,
        lt=1,
    )
    value_coefficient: float = option(0.5, "weight of the critic's loss", gt=0)

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"critic"}), critic=self.critic)

    def advantages(self, batch: Batch) -> Tensor:
        """Returns 1 for every step, and stores its return. Raises UserError for a step whose episode has no
        recorded reward."""
        import torch

        from mmrl.rollouts import Column

        prompts = [sample.prompt for sample in batch.rollouts.samples]
        check_returns(f"algorithm.type={self.type}", prompts)
        returns = self.returns.of(prompts)
        batch.rollouts.extras[RETURNS] = Column(returns)
        return torch.ones(len(returns))

    def objective(self, micro: Rollouts, replay: Replay, reduction: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the critic's loss to the policy's: the mean expectile error over the steps that the critic learns
        from."""
        from mmrl.core.values import expectile_error

        loss, stats = super().objective(micro, replay, reduction)
        valued = self.valued(micro).to(loss.device)
        error = expectile_error(self.difference(micro, replay)[:, 0], self.expectile).where(valued, 0.0)
        stats["critic/error"] = error.detach()
        return loss + self.value_coefficient * error.sum() / reduction.totals["valued"].clamp(min=1), stats

    def valued(self, micro: Rollouts) -> Tensor:
        """Returns which steps the critic learns from, [rollout] bool."""
        return micro.mask.any(1)

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        return super().denominators(micro) | {"valued": self.valued(micro).sum()}

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        return self.valued(micro) if name.startswith("critic/") else micro.mask

    def difference(self, micro: Rollouts, replay: Replay) -> Tensor:
        """Returns R - V(s) of each step with the critic's gradient, [rollout, 1]."""
        from mmrl.rollouts import Column, require

        value = require(replay.value, "values")
        return micro.extra(RETURNS, Column).values.to(value.device)[:, None] - value[:, :1]
