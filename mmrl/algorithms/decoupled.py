"""Proximal policy optimization in which policy and critic look ahead differently far."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.ppo import PPO
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Steps


class DecoupledPPO(PPO):
    """The critic learns from returns of its own lambda, by default what really came of it, while the policy's lambda
    grows with the length of the response, so that the end is felt at the beginning of long ones too. With
    optim.hold_steps the critic learns alone at first; the term `likelihood` (of: positive) adds the rest of VAPO."""

    equation: ClassVar[str] = (
        "A by lambda = 1 - 1 / (length_scale l) for a rollout of l steps, at least 0 (null: lam); the critic's target "
        "V + A with value_lam"
    )
    source: ClassVar[str] = "VAPO, arXiv 2504.05118; its decoupled lambda: arXiv 2503.01491"
    test: ClassVar[str] = "tests/joints/test_ppo.py"
    type: str = "decoupled_ppo"
    gamma: float = option(1.0, "discount of a step", gt=0, le=1)
    value_lam: float = option(1.0, "lambda of the critic's targets; 1: returns", ge=0, le=1)
    length_scale: float | None = option(
        0.05, "lambda of the policy is 1 - 1 / (length_scale x steps of the rollout); null: it is lam", gt=0
    )

    def estimates(self, rewards: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        import torch

        _, returns = self.estimated(rewards, steps, self.value_lam)
        if self.length_scale is None:
            return self.estimated(rewards, steps, self.lam)[0], returns
        length, found = steps.mask.sum(1), torch.zeros_like(returns)
        for count in length.unique().tolist():
            rows = length == count
            lam = max(0.0, 1 - 1 / (self.length_scale * max(count, 1)))
            found[rows] = self.estimated(rewards[rows], steps.select(rows), lam)[0]
        return found, returns
