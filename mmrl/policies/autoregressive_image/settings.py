"""Settings of autoregressive image models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.policies.settings import Collects, LoRA, ModelSettings, Sections
from mmrl.protocols.abilities import DiscreteDecisions, ScoringPrompts, Segmented
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Capabilities
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Section, load_attribute, option

if TYPE_CHECKING:
    from mmrl.engine.memory import MemoryModel
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy


class ImageTokenLimits(Section):
    """Maximum lengths of prompts, and of the text before an image."""

    max_prompt_length: int = option(256, "longest prompt", unit="tokens", ge=1)
    reasoning_length: int = option(
        0, "longest text before the image tokens, its end token included; 0: no text", unit="tokens", ge=0
    )


class ImageTokenSampling(ImageTokenLimits):
    """Sampling of image tokens."""

    temperature: Schedule = number(1.0, "temperature of sampling and of recomputed log-probabilities", gt=0)


class ImageTokenEvaluation(Section):
    """Sampling of image tokens in evaluation."""

    temperature: float = option(1.0, "sampling temperature; 0: the most likely token", ge=0)


class ImageTokenDrawing(Section):
    """Guidance and templates: how prompts condition images."""

    guidance: float = option(1.0, "classifier-free guidance on logits, in rollouts and in replay alike; 1: none", ge=0)
    evaluation_guidance: float | None = option(
        None, "classifier-free guidance in evaluation; default: as in training", ge=0
    )
    negative_prompt: str = option(
        "", "prompt of the unconditional pass, which guidance leads away from; Janus takes padding, as in its training"
    )
    template: str = option("{}", "text around the prompt, such as a request to plan the image first; {}: the prompt")

    question: str = option(
        "", "text between the image and the prompt, when `inverse_likelihood` scores the prompt given the image"
    )

    @model_validator(mode="after")
    def _template_has_prompt(self) -> ImageTokenDrawing:
        if self.template.count("{}") != 1:
            raise ValueError(f"template={self.template!r} must have {{}} exactly once, where the prompt goes")
        return self


class ImageTokenDemonstrations(ImageTokenDrawing):
    """Supervised fine-tuning on the images of a data set."""

    prompt_dropout: float = option(
        0.0, "share of training images without their prompt, which classifier-free guidance needs", ge=0, lt=1
    )


class AutoregressiveImageModel(ModelSettings):
    """A causal language model of transformers that samples an image as tokens of a codebook, or a Janus model. A text
    (reasoning) may come before the image. Each token is one decision."""

    test: ClassVar[str] = "tests/policies/autoregressive_image/test_policy.py"
    source: ClassVar[str] = (
        "SimpleAR, arXiv 2504.11455; guidance on logits: LlamaGen, arXiv 2406.06525; text before images: ReasonGen-R1, "
        "arXiv 2505.24875, T2I-R1, arXiv 2505.00703; models: Janus-Pro, arXiv 2501.17811"
    )
    type: str = "autoregressive_image"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = option("sdpa", "implementation of attention")
    lora: LoRA | None = option(None, "train low-rank adapters in place of the weights")
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")

    @classmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        """Returns the sections `rollout`, `drawing` and `evaluation`; see `ModelSettings.sections`."""
        supervised = collects == "demonstrations"
        return {
            "rollout": ImageTokenLimits if supervised else ImageTokenSampling,
            "drawing": ImageTokenDemonstrations if supervised else ImageTokenDrawing,
            "evaluation": ImageTokenEvaluation,
        }

    def capabilities(self, config: JobConfig) -> Capabilities:
        """Returns what the decisions of this model support; see `ModelSettings.capabilities`."""
        offers: set[Offer] = {
            "entropy",
            "square_sum",
            "tokens",
            DiscreteDecisions,
            "single_sample_kl",
            "reference_ratio",
            "views",
            ScoringPrompts,
            "reference_rollouts",
        }
        limits: ImageTokenLimits = config.rollout
        if limits.reasoning_length:
            offers |= {"lengths", "text", "parts", Segmented}
        return Capabilities("model.type=autoregressive_image", frozenset(offers))

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        return load_attribute("mmrl.policies.autoregressive_image.memory_estimate:memory_model")(self, config, path)

    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        return load_attribute("mmrl.policies.autoregressive_image.loading:load")(path, self, config)
