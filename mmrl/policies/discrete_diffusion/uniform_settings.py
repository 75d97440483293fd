"""Settings of uniform discrete diffusion models, which turn random tokens into a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from mmrl.policies.discrete_diffusion.settings import (
    MaskedEvaluation,
    MaskedLimits,
    MaskedSampling,
    TokenDiffusionModel,
    check_redraw,
)
from mmrl.policies.settings import Collects, Sections
from mmrl.settings import Section, load_attribute, option

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy


class Noising(Section):
    """The steps of sampling, and the noised copies of a response (states) in which its tokens are scored."""

    steps: int = option(8, "denoising steps of a response", unit="steps", ge=1)
    draws: int = option(
        1, "noised copies of a response, at stratified noise levels; its log-likelihood is their mean", ge=1
    )
    levels: tuple[float, float] = option(
        (0.0, 1.0), "smallest and largest probability that a token is replaced by a random one"
    )

    @model_validator(mode="after")
    def _levels_are_ordered(self) -> Noising:
        """Raises ValueError unless 0 <= low <= high <= 1."""
        low, high = self.levels
        if not 0 <= low <= high <= 1:
            raise ValueError(f"levels={list(self.levels)} must be two numbers from 0 to 1, the smaller one first")
        return self


class NoisingRollouts(Noising):
    """Sampling of responses in training, and the estimate of their likelihoods."""

    draws: int = option(
        4, "noised copies of a response, at stratified noise levels; its log-likelihood is their mean", ge=1
    )
    redraw: bool = option(True, "every epoch scores a response in new states; false: in the states of the first epoch")


class UniformModel(TokenDiffusionModel):
    """A uniform discrete diffusion model of text or image tokens: a masked language model of transformers, or a causal
    one with bidirectional attention. It gets a response in which random tokens replace some tokens, without the noise
    level, and predicts the original tokens. Each token of the response is one decision."""

    equation: ClassVar[str] = (
        "mean over levels t of log p(x_k | x with each token replaced with probability t), x the response"
    )
    source: ClassVar[str] = (
        "UDM-GRPO, arXiv 2604.18518: the clean sample is the action, states are noised forward; steps of the sampler: "
        "discrete flow matching, arXiv 2407.15595"
    )
    test: ClassVar[str] = "tests/policies/discrete_diffusion/test_uniform.py"
    type: str = "uniform_diffusion"

    @classmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        """Returns the sections `rollout`, `noising` and `evaluation`; see `ModelSettings.sections`."""
        supervised = collects == "demonstrations"
        return {
            "rollout": MaskedLimits if supervised else MaskedSampling,
            "noising": Noising if supervised else NoisingRollouts,
            "evaluation": MaskedEvaluation,
        }

    def check(self, config: JobConfig) -> None:
        """Raises ValueError if every epoch scores new states (`redraw`), but the algorithm measures something in the
        states of the first epoch only."""
        super().check(config)
        noising = config.section("noising")
        if isinstance(noising, NoisingRollouts):
            check_redraw(config, noising.redraw, "noising.redraw")

    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        return load_attribute("mmrl.policies.discrete_diffusion.loading:load_uniform")(path, self, config)
