"""Settings of a diffusion model whose rollouts a few-step student samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.policies.diffusion.settings import (
    Denoising,
    DiffusionModel,
    ImageContrast,
    ImageMatching,
    refuse_estimate,
)
from mmrl.protocols.requirements import Capabilities
from mmrl.protocols.teachers import Taught
from mmrl.settings import Section, load_attribute, option

if TYPE_CHECKING:
    from mmrl.engine.memory import MemoryModel
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy

# Names of model and student in `FewStepPolicy.module`; SAMPLER is also the folder in which the student is saved
POLICY, SAMPLER = "policy", "sampler"


class FewStepSampler(Section):
    """The student: a copy of the model that samples in few steps and without guidance. The term `sampler_distillation`
    trains it."""

    steps: int = option(2, "denoising steps of the student; must divide denoising.steps", unit="steps", ge=1)
    share: float = option(
        1.0, "share of a group's rollouts that the student samples; the model samples the others", gt=0, le=1
    )
    evaluates: bool = option(False, "evaluation and mmrl sample use the student in place of the model")


class FewStepModel(DiffusionModel):
    """A diffusion or flow model whose rollouts are sampled by a student, a copy of it, in few steps and without
    guidance. The model learns from final images, whichever network sampled them; the student learns to reach in one
    step what the model reaches in several."""

    source: ClassVar[str] = "reconstructed from DMSampler: a co-evolving few-step sampler, distilled with rewards"
    test: ClassVar[str] = "tests/policies/few_step_diffusion/test_few_step_diffusion.py"
    type: str = "few_step_diffusion"
    sampler: FewStepSampler = option(FewStepSampler(), "the student, a copy of the model, that samples rollouts")

    def capabilities(self, config: JobConfig) -> Capabilities:
        diffusion = super().capabilities(config)
        unsupported = {"views", "steering", Taught}  # they would have to change the student too
        return Capabilities(f"model.type={self.type}", (diffusion.offers - unsupported) | {"distillation"})

    def check(self, config: JobConfig) -> None:
        """Raises ValueError for likelihoods and numbers of steps that do not work with a few-step student."""
        super().check(config)
        denoising = config.section("denoising")
        if not isinstance(denoising, Denoising):
            raise ValueError(
                f"model.type=few_step_diffusion cannot be trained by algorithm.type={config.algorithm.type}: it needs "
                "an algorithm that samples rollouts and rewards them; for supervised training use model.type=diffusion"
            )
        if not isinstance(denoising.likelihood, ImageContrast | ImageMatching):
            raise ValueError(
                f"denoising.likelihood.type={denoising.likelihood.type} scores the model's own denoising "
                "steps, which the few-step sampler does not take; use contrast or matching"
            )
        if denoising.steps % self.sampler.steps:
            raise ValueError(
                f"denoising.steps={denoising.steps} must be a multiple of model.sampler.steps={self.sampler.steps}, "
                "since each step of the few-step sampler replaces the same number of denoising steps; change one"
            )

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        refuse_estimate(self.type, path)
        return None

    def load(self, config: JobConfig, task: object, path: str) -> Policy:  # type: ignore[override]
        return load_attribute("mmrl.policies.few_step_diffusion.policy:load")(path, self, config)
