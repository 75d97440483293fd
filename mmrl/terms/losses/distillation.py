"""On-policy distillation: the divergence from a teacher on the student's own rollouts, as a loss term and as options of
an algorithm. The student is the policy that is trained."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from mmrl.measurements.teachers import (
    ALONE_OR_BY_TAG,
    PathTeacher,
    ServerTeacher,
    Teacher,
    TeacherDistributions,
    TeacherLikelihoods,
    TeacherPredictions,
)
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Choice, Section, option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.core.regularizers import Direction
    from mmrl.rollouts import Replay, Rollouts

METRIC = "distillation/kl"
NOT_LISTED = -50.0  # log-probability of padding: exp(-50) is about 0, so padding adds nothing to the divergence


class DivergenceEstimator(Choice):
    """A way to compute the divergence of student and teacher at a decision."""

    title: ClassVar[str] = "estimator of distillation"
    kinds: ClassVar[dict[str, str]] = {
        "sampled": "mmrl.terms.losses.distillation:SampledDivergence",
        "top_k": "mmrl.terms.losses.distillation:TopKDivergence",
        "full": "mmrl.terms.losses.distillation:FullDivergence",
        "exact": "mmrl.terms.losses.distillation:GaussianDivergence",
        "velocity": "mmrl.terms.losses.distillation:VelocityDistance",
    }
    test: ClassVar[str] = "tests/whole_runs/test_teachers.py"
    compares_steps: ClassVar[bool] = False  # whether it compares denoising steps; `direction` then has no meaning

    @abstractmethod
    def needs_of(self, teacher: Teacher) -> Needs:
        """Returns what the estimator requires of the policy and the job. Raises ValueError if it does not fit the
        teacher."""

    @abstractmethod
    def values(self, teacher: Teacher, direction: Direction, micro: Rollouts, replay: Replay) -> tuple[Tensor, Tensor]:
        """Computes values to minimize, and the detached estimate of the divergence, which is NaN where no teacher
        exists; both [rollout, decision]. direction: reverse, KL(student || teacher), or forward."""


class SampledDivergence(DivergenceEstimator):
    """An estimate from the sampled token only: it needs one log-probability per token, but its gradient has more
    variance."""

    equation: ClassVar[str] = (
        "reverse r (logp - teacher), the difference without gradient, r = exp(logp - old_logp); forward -exp(teacher - "
        "old_logp) (logp - teacher)"
    )
    source: ClassVar[str] = "on-policy distillation, Thinking Machines 2025; Video-OPD"
    type: str = "sampled"

    def needs_of(self, teacher: Teacher) -> Needs:
        offers = frozenset({"single_sample_kl"})
        return teacher.needs | Needs(offers=offers, old=True, measurements=(TeacherLikelihoods(teacher),))

    def values(self, teacher: Teacher, direction: Direction, micro: Rollouts, replay: Replay) -> tuple[Tensor, Tensor]:
        """Computes a loss and an estimate of the divergence from the log-probabilities of the sampled tokens; 0 and NaN
        where the teacher's are unknown. Both [rollout, decision]."""
        import torch

        from mmrl.core.regularizers import sampled_kl_loss
        from mmrl.rollouts import DecisionColumn, old_logp

        logp, old = replay.logp, old_logp(micro, replay)
        likelihoods = micro.extra(TeacherLikelihoods(teacher).name, DecisionColumn).values.to(logp)
        known = ~likelihoods.isnan()
        values, estimate = sampled_kl_loss(logp, old, likelihoods.where(known, old), direction=direction)
        return values.where(known, 0), estimate.where(known, torch.nan)


class ListedDivergence(DivergenceEstimator):
    """A divergence summed over several tokens at each decision, with the gradient of all their probabilities."""

    @property
    @abstractmethod
    def count(self) -> int | None:
        """Returns the number of tokens per decision; None: the whole vocabulary."""

    def needs_of(self, teacher: Teacher) -> Needs:
        return teacher.needs | Needs(measurements=(TeacherDistributions(teacher, self.count),))

    def values(self, teacher: Teacher, direction: Direction, micro: Rollouts, replay: Replay) -> tuple[Tensor, Tensor]:
        """Computes the divergence over the teacher's listed tokens, as values to minimize (0 without a teacher) and
        detached as a metric (NaN without a teacher). Both [rollout, decision]."""
        import torch

        from mmrl.core.regularizers import top_k_kl
        from mmrl.protocols.choices import TeacherChoices
        from mmrl.rollouts import ALTERNATIVES, require

        student, listed = ALTERNATIVES.of(replay), micro.extra(ALTERNATIVES.name, TeacherChoices)
        likelihoods = require(listed.logp, "a teacher's log-probabilities").to(student)
        known = ~likelihoods.isnan() & micro.mask.to(student.device)[..., None]
        student, likelihoods = student.where(known, NOT_LISTED), likelihoods.where(known, NOT_LISTED)
        values = top_k_kl(student, likelihoods, direction=direction, complete=listed.is_full_vocabulary)
        has_teacher = known.any(-1)
        return values.where(has_teacher, 0), values.detach().where(has_teacher, torch.nan)


class TopKDivergence(ListedDivergence):
    """The divergence over the teacher's k most likely tokens and one more that stands for all others: a lower bound of
    the full divergence."""

    equation: ClassVar[str] = "sum_i p_i log(p_i / q_i) over the teacher's k most likely tokens, and the rest as one"
    source: ClassVar[str] = (
        "top-k distillation on own rollouts, as in verl's and ROLL's recipes; the tail is mmrl's own"
    )
    type: str = "top_k"
    k: int = option(32, "tokens per decision", ge=1)

    @property
    def count(self) -> int | None:
        return self.k


class FullDivergence(ListedDivergence):
    """The divergence over the whole vocabulary, for small vocabularies: a step stores rollouts x decisions x vocabulary
    log-probabilities."""

    equation: ClassVar[str] = "sum_i p_i log(p_i / q_i) over all tokens"
    source: ClassVar[str] = "GKD, arXiv 2306.13649"
    type: str = "full"

    @property
    def count(self) -> int | None:
        return None

    def needs_of(self, teacher: Teacher) -> Needs:
        if isinstance(teacher, ServerTeacher):
            raise ValueError("estimator=full needs whole distributions, which teacher.server does not send; use top_k")
        return super().needs_of(teacher)


class StepDivergence(DivergenceEstimator):
    """A distance from the teacher's prediction at each denoising step, from the student's noisy states. It is exact and
    symmetric, since both steps are Gaussian with the same std."""

    compares_steps: ClassVar[bool] = True
    offer: ClassVar[str]

    def needs_of(self, teacher: Teacher) -> Needs:
        if not isinstance(teacher, PathTeacher):
            raise ValueError(
                f"estimator={self.type} needs teacher.path, got teacher.type={teacher.type}; set teacher.type=path"
            )
        return teacher.needs | Needs(offers=frozenset({self.offer}), measurements=(TeacherPredictions(teacher),))

    @abstractmethod
    def distance(self, replay: Replay) -> Tensor:
        """Returns the distance from the teacher's prediction, with its gradient, [rollout, decision]."""

    def values(self, teacher: Teacher, direction: Direction, micro: Rollouts, replay: Replay) -> tuple[Tensor, Tensor]:
        distance = self.distance(replay)
        return distance, distance.detach()


class GaussianDivergence(StepDivergence):
    """The exact KL divergence of a Gaussian step from the teacher's."""

    equation: ClassVar[str] = "|mu - mu_T|^2 / (2 std^2), mu_T from the student's state"
    source: ClassVar[str] = "reconstructed from DiffusionOPD: on-policy distillation of denoising steps"
    type: str = "exact"
    offer: ClassVar[str] = "gaussian"

    def distance(self, replay: Replay) -> Tensor:
        from mmrl.rollouts import require

        return require(replay.reference_kl, "exact KLs")


class VelocityDistance(StepDivergence):
    """The squared distance of the predicted velocity (or noise) from the teacher's, both with guidance."""

    equation: ClassVar[str] = "|v - v_T|^2, v_T from the student's state, with the teacher's guidance"
    source: ClassVar[str] = "reconstructed from DiffusionOPD; guidance: guided distillation, arXiv 2210.03142"
    type: str = "velocity"
    offer: ClassVar[str] = "velocity"

    def distance(self, replay: Replay) -> Tensor:
        from mmrl.rollouts import REFERENCE_ERROR

        return REFERENCE_ERROR.of(replay)


class TeacherDivergence(Section):
    """The divergence of the student from a teacher at each decision of the student's own rollouts."""

    teacher: Teacher = option(description="model that the student is distilled from", kinds=ALONE_OR_BY_TAG)
    estimator: DivergenceEstimator = option(SampledDivergence(), "estimator of the divergence of a decision")
    direction: Literal["reverse", "forward"] = option(
        "reverse", "reverse: KL(student || teacher), which seeks one mode; forward: KL(teacher || student)"
    )

    @model_validator(mode="after")
    def _check_estimator(self) -> TeacherDivergence:
        self.estimator.needs_of(self.teacher)
        if self.estimator.compares_steps and self.direction != "reverse":
            raise ValueError(f"estimator={self.estimator.type} has one direction only; remove direction")
        return self

    @property
    def needs_of_teacher(self) -> Needs:
        return self.estimator.needs_of(self.teacher)

    def divergence(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes values to minimize and the estimate as a metric, both [rollout, decision]."""
        values, estimate = self.estimator.values(self.teacher, self.direction, micro, replay)
        return values, {METRIC: estimate}


class Distillation(TeacherDivergence, Term):
    """The divergence from a teacher on the student's own rollouts, added to the RL loss."""

    equation: ClassVar[str] = "coefficient x the divergence of the estimator"
    source: ClassVar[str] = "on-policy distillation: GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543"
    test: ClassVar[str] = "tests/whole_runs/test_teachers.py"
    type: str = "distillation"
    coefficient: Schedule = number(1.0, "weight of the term", ge=0)

    @property
    def needs(self) -> Needs:
        return self.needs_of_teacher

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        values, statistics = self.divergence(micro, replay)
        return self.coefficient.value * values, statistics
