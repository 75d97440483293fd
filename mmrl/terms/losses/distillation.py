"""The divergence from a teacher on the student's own rollouts, as a loss term and as options of an algorithm."""

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
NOT_LISTED = -50.0  # log-probability of an alternative that counts among the rest


class DivergenceEstimator(Choice):
    """A computation of the divergence of a decision."""

    title: ClassVar[str] = "estimator of distillation"
    kinds: ClassVar[dict[str, str]] = {
        "sampled": "mmrl.terms.losses.distillation:SampledDivergence",
        "top_k": "mmrl.terms.losses.distillation:TopKDivergence",
        "full": "mmrl.terms.losses.distillation:FullDivergence",
        "exact": "mmrl.terms.losses.distillation:GaussianDivergence",
        "velocity": "mmrl.terms.losses.distillation:VelocityDistance",
    }
    test: ClassVar[str] = "tests/whole_runs/test_teachers.py"
    of_steps: ClassVar[bool] = False  # whether it compares denoising steps, which has one direction

    @abstractmethod
    def needs_of(self, teacher: Teacher) -> Needs:
        """Returns what the estimate needs of the job."""

    @abstractmethod
    def values(self, teacher: Teacher, direction: Direction, micro: Rollouts, replay: Replay) -> tuple[Tensor, Tensor]:
        """Returns what is minimised, and the estimate without gradient, NaN where there is no teacher; both
        [rollout, decision]."""


class SampledDivergence(DivergenceEstimator):
    """An estimate from the sampled decision alone: one number of the teacher's a token, and a gradient of more
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
        import torch

        from mmrl.core.regularizers import sampled_divergence
        from mmrl.rollouts import DecisionColumn, old_logp

        logp, old = replay.logp, old_logp(micro, replay)
        likelihoods = micro.extra(TeacherLikelihoods(teacher).name, DecisionColumn).values.to(logp)
        known = ~likelihoods.isnan()
        values, estimate = sampled_divergence(logp, old, likelihoods.where(known, old), direction=direction)
        return values.where(known, 0), estimate.where(known, torch.nan)


class ListedDivergence(DivergenceEstimator):
    """A divergence over alternatives to every decision, with the gradient of all their probabilities."""

    @property
    @abstractmethod
    def count(self) -> int | None:
        """Returns the number of alternatives; None: all."""

    def needs_of(self, teacher: Teacher) -> Needs:
        return teacher.needs | Needs(measurements=(TeacherDistributions(teacher, self.count),))

    def values(self, teacher: Teacher, direction: Direction, micro: Rollouts, replay: Replay) -> tuple[Tensor, Tensor]:
        import torch

        from mmrl.core.regularizers import listed_divergence
        from mmrl.protocols.choices import TeacherChoices
        from mmrl.rollouts import ALTERNATIVES, require

        student, listed = ALTERNATIVES.of(replay), micro.extra(ALTERNATIVES.name, TeacherChoices)
        likelihoods = require(listed.logp, "a teacher's log-probabilities").to(student)
        known = ~likelihoods.isnan() & micro.mask.to(student.device)[..., None]
        pair = (logp.where(known, NOT_LISTED) for logp in (student, likelihoods))
        values = listed_divergence(*pair, direction=direction, whole=listed.is_full_vocabulary)
        known = known.any(-1)
        return values.where(known, 0), values.detach().where(known, torch.nan)


class TopKDivergence(ListedDivergence):
    """A divergence over the alternatives that the teacher finds likeliest, with the mass of all others as one more: a
    lower bound of the whole one."""

    equation: ClassVar[str] = "sum_i p_i log(p_i / q_i) over the teacher's k likeliest tokens, and the rest as one"
    source: ClassVar[str] = (
        "top-k distillation on own rollouts, as in verl's and ROLL's recipes; the tail is mmrl's own"
    )
    type: str = "top_k"
    k: int = option(32, "alternatives of a decision", ge=1)

    @property
    def count(self) -> int | None:
        return self.k


class FullDivergence(ListedDivergence):
    """The divergence of whole distributions. A step keeps rollouts x decisions x vocabulary numbers of the teacher's:
    for small vocabularies."""

    equation: ClassVar[str] = "sum_i p_i log(p_i / q_i) over all tokens"
    source: ClassVar[str] = "GKD, arXiv 2306.13649"
    type: str = "full"

    @property
    def count(self) -> int | None:
        return None

    def needs_of(self, teacher: Teacher) -> Needs:
        if isinstance(teacher, ServerTeacher):
            raise ValueError("estimator=full needs whole distributions, which a server does not send; use top_k")
        return super().needs_of(teacher)


class StepDivergence(DivergenceEstimator):
    """A distance from the teacher's prediction of each denoising step, made from the student's states: exact, and the
    same in both directions, for the steps are Gaussian and of one width."""

    of_steps: ClassVar[bool] = True
    offer: ClassVar[str]

    def needs_of(self, teacher: Teacher) -> Needs:
        if not isinstance(teacher, PathTeacher):
            raise ValueError(f"estimator={self.type} takes a teacher.path, not teacher.type={teacher.type}")
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
    """The squared distance of the predicted velocity, or noise, from the teacher's, guidance included."""

    equation: ClassVar[str] = "|v - v_T|^2, v_T from the student's state, with the teacher's guidance"
    source: ClassVar[str] = "reconstructed from DiffusionOPD; guidance: guided distillation, arXiv 2210.03142"
    type: str = "velocity"
    offer: ClassVar[str] = "velocity"

    def distance(self, replay: Replay) -> Tensor:
        from mmrl.rollouts import REFERENCE_ERROR

        return REFERENCE_ERROR.of(replay)


class TeacherDivergence(Section):
    """The divergence of a student from a teacher, decision by decision, where the student's own rollouts went."""

    teacher: Teacher = option(description="the teacher", kinds=ALONE_OR_BY_TAG)
    estimator: DivergenceEstimator = option(SampledDivergence(), "estimator of the divergence of a decision")
    direction: Literal["reverse", "forward"] = option(
        "reverse", "reverse: KL(student || teacher), which seeks one mode; forward: KL(teacher || student)"
    )

    @model_validator(mode="after")
    def _comparable(self) -> TeacherDivergence:
        self.estimator.needs_of(self.teacher)
        if self.estimator.of_steps and self.direction != "reverse":
            raise ValueError(f"estimator={self.estimator.type} has one direction; leave out direction")
        return self

    @property
    def needs_of_teacher(self) -> Needs:
        return self.estimator.needs_of(self.teacher)

    def divergence(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns values to minimise and the estimate, [rollout, decision]."""
        values, estimate = self.estimator.values(self.teacher, self.direction, micro, replay)
        return values, {METRIC: estimate}


class Distillation(TeacherDivergence, Term):
    """The divergence from a teacher on the student's own rollouts, beside what the algorithm learns from rewards."""

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
