"""Distillation of a few-step sampler from the diffusion model that is trained on its images."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option
from mmrl.terms.term import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class SamplerDistillation(Term):
    """A loss that trains the sampler's large steps to end where several small steps of the model end, weighted by the
    images' advantages. To alternate distillation and RL, let the coefficient be 0 in some steps."""

    equation: ClassVar[str] = (
        "coefficient x w |v - (x' - a x) / b|^2, w = 2 clamp(A / (2 bound) + 1/2, 0, 1), or 1 without `reward_aware`; "
        "x' is where the model's steps lead from x, a x + b v the sampler's jump"
    )
    source: ClassVar[str] = (
        "reconstructed from DMSampler, reward-aware distillation; secants of a fine solver: progressive distillation, "
        "arXiv 2202.00512"
    )
    test: ClassVar[str] = "tests/policies/few_step_diffusion/test_few_step_diffusion.py"
    type: str = "sampler_distillation"
    coefficient: Schedule = number(1.0, "weight of the term", ge=0)
    reward_aware: bool = option(True, "weight images by their advantages; false: equally")
    bound: float = option(5.0, "advantages are clamped to +-bound", gt=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"distillation"}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes coefficient x the sampler's squared error, with `reward_aware` weighted by the image's advantage,
        and the error; [rollout, decision]."""
        from mmrl.core.contrast import optimality_weight

        error = replay.extras["sampler_error"]
        values = self.coefficient.value * error
        if self.reward_aware:
            assert micro.advantages is not None
            # 2: an advantage of 0 has the weight 1
            values = values * 2 * optimality_weight(micro.advantages.to(error.device), self.bound)
        return values, {"sampler_error": error.detach()}
