"""A surrogate whose ratios are relative to a mixture of the old policy and a teacher (RLAD)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.surrogates.surrogate import Clipped, Result
from mmrl.measurements.teachers import ALONE_OR_BY_TAG, Teacher, TeacherLikelihoods
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class TeacherRatio(Clipped):
    """PPO's clip of the ratio of the policy and a mixture of old policy and teacher: reinforcement learning that
    imitates a teacher where the advantage agrees with it.

    A decision with a positive advantage gains until its probability is 1 + high times that of the mixture, so the
    gradient goes further where the teacher prefers the decision, and not at all where the teacher finds it much less
    likely. With a negative advantage it is the other way round. Rollouts without a teacher (teacher.by_tag) have PPO's
    ratio.
    """

    equation: ClassVar[str] = "-min(r A, clamp(r, 1 - low, 1 + high) A), r = pi / (pi_T^share pi_old^(1 - share))"
    source: ClassVar[str] = (
        "reconstructed from the abstract of RLAD, arXiv 2602.22495 (trust region ratio distillation): PPO with a "
        "ratio to a mixture of teacher and old policy; that the mixture is geometric is mmrl's reading"
    )
    test: ClassVar[str] = "tests/whole_runs/test_teachers.py"
    type: str = "teacher_ratio"
    teacher: Teacher = option(description="model that anchors the ratio beside the old policy", kinds=ALONE_OR_BY_TAG)
    share: Schedule = number(0.5, "exponent of the teacher in the mixture; 0: PPO's clip", ge=0, le=1)

    @property
    def needs(self) -> Needs:
        offers = frozenset({"single_sample_kl"})  # its log-probabilities of single samples can be compared
        return self.teacher.needs | Needs(offers=offers, old=True, measurements=(TeacherLikelihoods(self.teacher),))

    def log_anchor(self, micro: Rollouts, replay: Replay) -> Tensor:
        """Computes share (log pi_T - log pi_old), [rollout, decision]; 0 without a teacher."""
        from mmrl.rollouts import DecisionColumn, old_logp

        old = old_logp(micro, replay)
        likelihoods = micro.extra(TeacherLikelihoods(self.teacher).name, DecisionColumn).values.to(old)
        return self.share.value * (likelihoods - old).where(~likelihoods.isnan(), 0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes PPO's clipped objective of the ratio to the mixture, and statistics; [rollout, decision]."""
        from mmrl.core.surrogates import surrogate

        return surrogate(log_ratio, advantages, kind="clip", **self.bounds)
