"""Rewards of single policy steps, inside an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrl.measurements.spans import SpanValues
from mmrl.protocols.requirements import Needs
from mmrl.settings import Section, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Steps


class StepRewards(Section):
    """Rewards of single policy steps from one of task.rewards, such as a judge of observations. Its own weight should
    be 0, since the critic would count it twice."""

    reward: str = option(description="name of a reward that returns spans of policy steps")
    weight: float = option(1.0, "weight of these rewards, beside those of the simulator")

    @property
    def spans(self) -> SpanValues:
        return SpanValues(self.reward, "policy_steps")

    @property
    def needs(self) -> Needs:
        return Needs(measurements=(self.spans,))

    def check_rewards(self, names: list[str]) -> None:
        """Raises ValueError for a reward that the task does not have."""
        self.spans.check_reward(names, "algorithm.step_rewards.reward")

    def of(self, batch: Batch, steps: Steps) -> Tensor:
        """Returns weight x the value of each span at its last policy step, 0 elsewhere: [rollout, step]."""
        import torch

        rewards = torch.zeros_like(steps.rewards)
        per_step = batch.rollouts.mask.shape[1] // steps.mask.shape[1]  # decisions of a policy step
        column = batch.measured(self.spans)
        for row, (values, (decision, span, _)) in enumerate(zip(column.values, column.shares, strict=True)):
            last = torch.full((len(values),), -1, dtype=torch.int64)
            last = last.scatter_reduce(0, span.long(), decision.long() // per_step, "amax")
            known = last >= 0  # not of steps without an executed action
            rewards[row].index_add_(0, last[known], values[known].to(rewards))
        return self.weight * rewards.where(steps.mask, 0.0)
