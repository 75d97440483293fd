"""Settings of a diffusion model that has a few-step sampler."""

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

POLICY, SAMPLER = "policy", "sampler"  # parts of the module; the sampler is saved in a folder of that name


class FewStepSampler(Section):
    """The copy that draws in few steps and without guidance. The term `sampler_distillation` trains it."""

    steps: int = option(2, "denoising steps of its images; they divide denoising.steps", unit="steps", ge=1)
    share: float = option(
        1.0,
        "share of a group's rollouts that the copy samples; the model samples the others (hybrid sampling)",
        gt=0,
        le=1,
    )
    evaluates: bool = option(False, "evaluation and sampling draw with the copy in place of the model")


class FewStepModel(DiffusionModel):
    """A diffusion or flow model whose rollouts are drawn by a copy of it in few steps and without guidance. The model
    learns from final images of any sampler; the copy learns to jump where the model goes in many steps."""

    source: ClassVar[str] = "reconstructed from DMSampler: a co-evolving few-step sampler, distilled with rewards"
    test: ClassVar[str] = "tests/policies/few_step_diffusion/test_few_step_diffusion.py"
    type: str = "few_step_diffusion"
    sampler: FewStepSampler = option(FewStepSampler(), "the copy of the model that samples rollouts")

    def capabilities(self, config: JobConfig) -> Capabilities:
        diffusion = super().capabilities(config)
        lost = {"views", "steering", Taught}  # what the copy would have to take part in
        return Capabilities(f"model.type={self.type}", (diffusion.offers - lost) | {"distillation"})

    def check(self, config: JobConfig) -> None:
        super().check(config)
        denoising = config.section("denoising")
        if not isinstance(denoising, Denoising):
            raise ValueError("model.type=few_step_diffusion learns from rewards; warm it up as model.type=diffusion")
        if not isinstance(denoising.likelihood, ImageContrast | ImageMatching):
            raise ValueError(
                f"denoising.likelihood.type={denoising.likelihood.type} scores the model's own chain, which the "
                "few-step sampler does not take; use contrast or matching"
            )
        if denoising.steps % self.sampler.steps:
            raise ValueError(
                f"model.sampler.steps={self.sampler.steps} do not divide denoising.steps={denoising.steps}, the steps "
                "that each of its jumps learns from"
            )

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        refuse_estimate(self.type, path)
        return None

    def load(self, config: JobConfig, task: object, path: str) -> Policy:  # type: ignore[override]
        return load_attribute("mmrl.policies.few_step_diffusion.policy:load")(path, self, config)
