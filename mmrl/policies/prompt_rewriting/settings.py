"""Settings of an image generator whose prompts a language model rewrites; both are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.policies.diffusion.settings import (
    Denoising,
    DiffusionModel,
    ImageChain,
    ImageMatching,
    refuse_estimate,
)
from mmrl.policies.settings import Collects, LoRA, Sections
from mmrl.policies.vlm.settings import TokenEngine, TokenEvaluation, TokenSampling
from mmrl.protocols.abilities import Segmented
from mmrl.protocols.requirements import Capabilities
from mmrl.settings import load_attribute, option
from mmrl.settings.origins import WeightsOrigin

if TYPE_CHECKING:
    from mmrl.engine.memory import MemoryModel
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy

WRITER, GENERATOR = "writer", "generator"  # names of the two models in the module, and of their saved folders


class PromptWriter(WeightsOrigin):
    """The language model that rewrites prompts, an image-text model. By default it is the one that a run saved beside
    the generator in model.path. Section `rollout` holds its sampling settings."""

    required: ClassVar[bool] = False
    attention: Literal["sdpa", "eager", "flash_attention_2"] = option("sdpa", "implementation of attention")
    freeze: list[Literal["vision", "connector", "language"]] = option([], "parts that are not trained")
    lora: LoRA | None = option(None, "train low-rank adapters in place of the weights")
    processor: dict[str, Any] = option({}, "keyword arguments of AutoProcessor.from_pretrained")
    template: str = option(
        "Rewrite this prompt for an image generator, with all that it should show: {}",
        "the writer's prompt, in which {} stands for the task's prompt",
    )
    originals: int = option(
        0, "rollouts of each group whose images are rendered from the task's prompt, without rewriting", ge=0
    )

    @model_validator(mode="after")
    def _holds_the_prompt(self) -> PromptWriter:
        if self.template.count("{}") != 1:
            raise ValueError(f"template must hold {{}} exactly once, where the prompt goes; got {self.template!r}")
        return self


class PromptRewritingModel(DiffusionModel):
    """A diffusion or flow model that renders prompts which a language model rewrites. Both learn from the same rewards:
    the decisions of a rollout are the tokens of the text and the denoising steps of its image."""

    source: ClassVar[str] = "PromptRL, arXiv 2602.01382"
    test: ClassVar[str] = "tests/policies/prompt_rewriting/test_prompt_rewriting.py"
    type: str = "prompt_rewriting"
    writer: PromptWriter = option(PromptWriter(), "the language model that rewrites prompts")

    @classmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        diffusion = super().sections(tree, collects)
        return {**diffusion, "rollout": TokenSampling, "evaluation": TokenEvaluation, "engine": TokenEngine}

    def capabilities(self, config: JobConfig) -> Capabilities:
        """Returns what the decisions of this model support; see `ModelSettings.capabilities`."""
        return Capabilities(
            "model.type=prompt_rewriting",
            frozenset({"text", "parts", Segmented, "single_sample_kl", "reference_ratio"}),
        )

    def check(self, config: JobConfig) -> None:
        """Raises ValueError for settings of other sections that do not work with rewritten prompts."""
        super().check(config)
        rollout, denoising = config.rollout, config.section("denoising")
        if not isinstance(denoising, Denoising) or not isinstance(rollout, TokenSampling):
            raise ValueError(
                f"model.type=prompt_rewriting cannot be trained by algorithm.type={config.algorithm.type}: it needs an "
                "algorithm that samples rollouts and rewards them, such as grpo; for supervised training, train its "
                "language model and its image model in runs of their own"
            )
        if self.embeddings is not None:
            raise ValueError(
                "model.embeddings holds embeddings of prompts that are known before training, but model.type="
                "prompt_rewriting writes its prompts while it trains; leave model.embeddings out"
            )
        likelihood = denoising.likelihood
        if not isinstance(likelihood, ImageChain | ImageMatching):
            raise ValueError(
                f"denoising.likelihood.type={likelihood.type} gives no likelihood that could be combined with "
                "that of tokens; use chain or matching"
            )
        chain = likelihood if isinstance(likelihood, ImageChain) else None
        if chain is not None and (chain.branching or chain.shared_states or chain.chunks):
            raise ValueError(
                "denoising.likelihood: branching, shared_states and chunks need groups with one prompt for all images; "
                "with model.type=prompt_rewriting each rollout has its own; remove them"
            )
        if rollout.generator.type != "transformers":
            raise ValueError(
                f"rollout.generator.type={rollout.generator.type} does not support model.type=prompt_rewriting; use "
                "transformers"
            )
        if rollout.segment is not None:
            raise ValueError(
                "rollout.segment is set, but the segments of model.type=prompt_rewriting are text and image; remove it"
            )
        if self.writer.originals >= config.group_size:
            raise ValueError(
                f"model.writer.originals={self.writer.originals} leaves no rollout of rollout.group_size="
                f"{config.group_size} whose prompt the writer rewrites; lower model.writer.originals"
            )

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        refuse_estimate(self.type, path)
        return None

    def load(self, config: JobConfig, task: object, path: str) -> Policy:  # type: ignore[override]
        return load_attribute("mmrl.policies.prompt_rewriting.loading:load")(path, self, config, task)
