"""Settings of vision-language models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.engine.settings import UnevenEngine
from mmrl.generation.settings import GeneratorSettings, TransformersGenerator, VLLMGenerator
from mmrl.policies.settings import Collects, LoRA, ModelSettings, Sections
from mmrl.protocols.abilities import (
    ContinuingResponses,
    DecisionTexts,
    DiscreteDecisions,
    JoiningResponses,
    Segmented,
    Storing,
    TopK,
)
from mmrl.protocols.critic import SharedCritic
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Capabilities
from mmrl.protocols.teachers import Taught, TaughtTokens
from mmrl.schedules.schedule import Constant, Schedule, number
from mmrl.settings import Section, load_attribute, option

if TYPE_CHECKING:
    from mmrl.engine.memory import MemoryModel
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy


class TokenLimits(Section):
    """Longest prompts and responses."""

    max_prompt_length: int = option(1024, "longest prompt, image tokens included", unit="tokens", ge=1)
    max_response_length: Schedule = number(256, "longest response, its end token included", unit="tokens", ge=1)

    @model_validator(mode="after")
    def _max_length_is_finite(self) -> TokenLimits:
        if math.isinf(self.max_response_length.extremes[1]):
            raise ValueError("max_response_length has no upper bound; set its `high`, in tokens")
        return self


class TokenSampling(TokenLimits):
    """Sampling of responses."""

    temperature: Schedule = number(1.0, "temperature of sampling and of recomputed log-probabilities", gt=0)
    top_p: float = option(1.0, "sample from the most likely tokens that together have this probability", gt=0, le=1)
    top_k: int = option(0, "number of most likely tokens to sample from; 0: all", ge=0)
    segment: int | None = option(
        None, "tokens of a segment, for algorithm.level=segment; null: responses have none", unit="tokens", ge=1
    )
    allow_truncated_sampling: bool = option(
        False, "top_p and top_k bias the gradient; they are refused unless this is set"
    )
    generator: GeneratorSettings = option(TransformersGenerator(), "the program that samples responses")

    @property
    def producer(self) -> GeneratorSettings:
        return self.generator

    @model_validator(mode="after")
    def _truncation_is_allowed(self) -> TokenSampling:
        """Raises ValueError for top-p or top-k sampling unless `allow_truncated_sampling` is set."""
        if (self.top_p < 1 or self.top_k > 0) and not self.allow_truncated_sampling:
            raise ValueError(
                f"top_p={self.top_p:g} and top_k={self.top_k} never sample the less likely tokens, which biases the "
                "gradient; set top_p=1 and top_k=0, or rollout.allow_truncated_sampling=true to keep them"
            )
        return self


class TokenEvaluation(Section):
    """Sampling of responses in evaluation."""

    temperature: float = option(0.0, "0: the most likely token each time", ge=0)


class TokenEngine(UnevenEngine):
    """Memory and time of replaying tokens."""

    micro_tokens: int | None = option(
        None,
        "upper bound of the tokens that are replayed at once on a rank, prompts and padding included; "
        "engine.micro_batch bounds their rollouts; a rollout above this bound is replayed alone; changes memory and "
        "time, not results",
        unit="tokens",
        ge=1,
    )

    logp_chunk: int = option(
        1024, "tokens whose logits over the vocabulary exist at the same time", unit="tokens", ge=1
    )

    packing: bool = option(
        True,
        "rollouts are replayed as one long sequence, without padding, where a tenth or more of a micro-batch would be "
        "padding; with model.attention=sdpa, in the families Qwen2.5-VL, Qwen3-VL, Idefics3 (SmolVLM), LLaVA-OneVision "
        "and InternVL; equal to rounding",
    )

    reuse_features: bool = option(
        True,
        "the features of an image are computed once and kept while its rollouts exist, where vision tower and "
        "connector are frozen (model.freeze, or a LoRA of language layers); in the families of engine.packing, except "
        "under ZeRO 3 and in prompts with videos; needs transformers 5.19; equal to rounding",
    )

    def max_rows(self, rows: int, length: int) -> int:
        """Returns how many of `rows` rollouts of `length` tokens fit into one micro-batch."""
        return rows if self.micro_tokens is None else min(rows, max(1, self.micro_tokens // length))

    @property
    def token_limit(self) -> int | None:
        return self.micro_tokens


def converses(config: JobConfig) -> bool:
    """Returns whether rollouts of a job are conversations: an environment or a game answers the responses."""
    return any(vars(config.task).get(key) is not None for key in ("environment", "game"))


class VisionLanguageModel(ModelSettings):
    """Any image-text model of transformers. Each response token is a decision."""

    test: ClassVar[str] = "tests/policies/test_vlm.py"
    type: str = "vision_language"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = option("sdpa", "implementation of attention")
    freeze: list[Literal["vision", "connector", "language"]] = option([], "parts that are not trained")
    lora: LoRA | None = option(None, "train low-rank adapters in place of the weights")
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    processor: dict[str, Any] = option({}, "keyword arguments of AutoProcessor.from_pretrained, such as max_pixels")

    @classmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        rollout = TokenLimits if collects == "demonstrations" else TokenSampling
        return {"rollout": rollout, "evaluation": TokenEvaluation, "engine": TokenEngine}

    def capabilities(self, config: JobConfig) -> Capabilities:
        """Returns what the decisions of this model support with the job's generator and task; see `ModelSettings`."""
        offers: set[Offer] = {"entropy", "square_sum", "tokens", "text", DiscreteDecisions, "single_sample_kl", "views"}
        offers |= {
            "lengths",
            "reference_ratio",
            "demonstrations",
            Storing,
            "critic",
            JoiningResponses,
            TopK,
            DecisionTexts,
        }
        offers |= {Taught, TaughtTokens}
        sampling = config.rollout
        if isinstance(sampling, TokenSampling) and isinstance(sampling.generator, VLLMGenerator):
            offers |= {"drafts"}
        else:
            offers |= {"reference_rollouts"}
        if isinstance(sampling, TokenSampling) and sampling.segment is not None:
            offers |= {Segmented}
        # With asynchronous steps the engine already samples the next step, so it cannot sample more for this step
        if not (config.generator is not None and config.generator.steps_ahead):
            offers |= {"temperatures", ContinuingResponses}
        source = "model.type=vision_language"
        if converses(config):
            source += " in conversations (task.environment)"
            offers -= {JoiningResponses, DecisionTexts}  # these need a single response; rewards see only the last one
            offers |= {"turns"}
        return Capabilities(source, frozenset(offers), groups=("critic",))

    def check(self, config: JobConfig) -> None:
        """Raises ValueError for a critic, an environment or options of vLLM that do not fit this model or one
        another."""
        critic, sampling = config.needs.critic, config.rollout
        if not (critic is None or isinstance(critic, SharedCritic)):
            raise ValueError(
                f"algorithm.critic.type={critic.type} does not work with a vision-language model; set it to shared, "
                "with algorithm.critic.detach=true if the critic's loss must not train the model"
            )
        if not isinstance(sampling, TokenSampling):
            return
        generator = sampling.generator
        if converses(config) and isinstance(generator, TransformersGenerator) and not generator.gather:
            raise ValueError(
                "rollout.generator.gather=false makes all ranks generate in lockstep, which conversations with "
                "different numbers of turns cannot do; set it to true, or rollout.generator.type=vllm"
            )
        if not isinstance(sampling.generator, VLLMGenerator):
            return
        if sampling.generator.routing_replay and config.engine.compile != "none":
            raise ValueError(
                f"engine.compile={config.engine.compile} does not go with rollout.generator.routing_replay=true, which "
                "adds hooks inside the model's blocks; set engine.compile=none, or routing_replay=false"
            )
        if sampling.generator.steps_ahead:
            for key in ("temperature", "max_response_length"):
                if not isinstance(vars(sampling)[key], Constant):
                    raise ValueError(
                        f"rollout.{key} follows a schedule, but with rollout.generator.async_steps="
                        f"{sampling.generator.steps_ahead} rollouts are sampled during earlier steps; set async_steps "
                        f"to 0, or rollout.{key} to a number"
                    )
        if (max_temperature := sampling.temperature.extremes[1]) > 2:
            raise ValueError(f"rollout.temperature={max_temperature:g}: vLLM accepts at most 2; lower it")
        partial = sampling.generator.partial
        if partial is None:
            return
        if partial.oversample > config.rollout.prompts:
            raise ValueError(
                f"rollout.generator.partial.oversample={partial.oversample} is more than rollout.prompts="
                f"{config.rollout.prompts}: responses would get too old before a step can train on them; lower "
                "oversample"
            )
        if partial.segment >= sampling.max_response_length.extremes[0]:
            raise ValueError(
                f"rollout.generator.partial.segment={partial.segment} is not below rollout.max_response_length="
                f"{sampling.max_response_length.extremes[0]:g} tokens, so no response would be sampled in parts; "
                "lower segment"
            )
        if config.rollout.micro_batch is not None:
            raise ValueError(
                "rollout.generator.partial generates for all prompts of a step at once, which rollout.micro_batch="
                f"{config.rollout.micro_batch} would split; set rollout.micro_batch=null"
            )

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        return load_attribute("mmrl.policies.vlm.memory_estimate:memory_model")(self, config, path)

    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        return load_attribute("mmrl.policies.vlm.loading:load")(path, self, config, task)

    @property
    def frozen(self) -> VisionLanguageModel:
        return self.model_copy(update={"lora": None, "freeze": [], "activation_checkpointing": False})
