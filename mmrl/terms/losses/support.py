"""A penalty on probability that leaves the support of the reference policy, in place of a KL divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.measurements.teachers import ReferenceTeacher, TeacherDistributions
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class SupportCoverage(Term):
    """A penalty on probability outside the support of the reference policy: the tokens that it finds likely.

    Right responses may sharpen the policy within the support at no cost, unlike with a KL divergence. By default the
    penalty applies to decisions with a negative advantage, where a policy gradient alone pushes the probability of the
    sampled token anywhere, also to tokens that the reference never samples.
    """

    equation: ClassVar[str] = (
        "-coefficient log sum_{v in S} pi(v), S = the k likeliest tokens of the reference, of those the ones with "
        "probability >= min_probability; the likeliest one always"
    )
    source: ClassVar[str] = "reconstructed from the abstract of APO (Anchored Policy Optimization): support coverage"
    test: ClassVar[str] = "tests/joints/test_support.py"
    type: str = "support_coverage"
    coefficient: Schedule = number(0.01, "weight of the term", ge=0)
    k: int = option(32, "tokens per decision that may belong to the support", ge=1)
    min_probability: float = option(
        0.0, "tokens of a lower probability under the reference do not belong to the support", ge=0, lt=1
    )
    of: Literal["negative", "all"] = option(
        "negative", "negative: decisions with a negative advantage; all: all decisions"
    )

    @property
    def needs(self) -> Needs:
        teacher = ReferenceTeacher()
        return teacher.needs | Needs(measurements=(TeacherDistributions(teacher, self.k),))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -coefficient x the log of the support's probability at the selected decisions, else 0, and the
        support's probability at all decisions as a metric; [rollout, decision]."""
        import torch

        from mmrl.core.regularizers import log_support
        from mmrl.protocols.choices import TeacherChoices
        from mmrl.rollouts import ALTERNATIVES, require

        listed = micro.extra(ALTERNATIVES.name, TeacherChoices)
        logp = ALTERNATIVES.of(replay)
        reference = require(listed.logp, "the reference policy's log-probabilities").to(logp)
        log_mass = log_support(logp, reference, self.min_probability)
        selected = torch.ones_like(micro.mask)
        if self.of == "negative":
            assert micro.advantages is not None
            selected = micro.advantages < 0
        values = -self.coefficient.value * log_mass.where(selected.to(logp.device), 0)
        return values, {"support": log_mass.detach().exp()}
