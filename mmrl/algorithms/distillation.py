"""On-policy distillation: the policy (student) is fitted to a teacher on its own rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.algorithm import Algorithm
from mmrl.protocols.requirements import Needs
from mmrl.terms.losses.distillation import TeacherDivergence

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts


class OnPolicyDistillation(TeacherDivergence, Algorithm):
    """The divergence from a teacher at each decision of the student's own rollouts.

    Rewards are only logged. One rollout per prompt is enough.
    """

    equation: ClassVar[str] = "KL(pi(. | x, y_<t) || pi_T(. | x, y_<t)) of each t, y ~ pi; or the other direction"
    source: ClassVar[str] = "GKD, arXiv 2306.13649; on-policy distillation, Thinking Machines 2025"
    test: ClassVar[str] = "tests/whole_runs/test_teachers.py"
    type: str = "distillation"

    @property
    def base_needs(self) -> Needs:
        return self.needs_of_teacher

    def advantages(self, batch: Batch) -> Tensor:
        import torch

        return torch.zeros(len(batch.rollouts))

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        return self.divergence(micro, replay)
