"""Random noise on the rewards (RRP)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.schedules.schedule import Schedule, number

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Perturbation(Transform):
    """Adds Gaussian noise to each reward, for exploration. So rollouts of a group with equal rewards have random
    advantages. Let `std` fall to 0: {type: linear, start: 0.3, end: 0, steps: 200}."""

    equation: ClassVar[str] = "r + std e, e ~ N(0, 1)"
    source: ClassVar[str] = "reconstructed from the abstract of random reward perturbation (RRP)"
    type: str = "perturbation"
    std: Schedule = number(0.1, "standard deviation of the noise", ge=0)

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the rewards plus noise, [rollout of all ranks]; the noise of a step depends on the run's seed."""
        import torch

        noise = torch.randn(len(batch.rollouts), generator=batch.generator(self.type))
        return rewards + self.std.value * batch.gather(noise).to(rewards)
