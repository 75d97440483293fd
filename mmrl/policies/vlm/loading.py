"""Loads vision-language policies from folders and hub names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import Transpose, WeightConverter

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.settings import TransformersGenerator
from mmrl.policies.settings import LoRA
from mmrl.policies.tokenizers import Processor, Tokenizer
from mmrl.policies.vlm.critic import critic_of
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.prompts import chat
from mmrl.policies.vlm.responses.packing import pack_images
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.policies.vlm.settings import (
    TokenEngine,
    TokenLimits,
    TokenSampling,
    VisionLanguageModel,
)
from mmrl.policies.vlm.templates import check_template
from mmrl.protocols.critic import SharedCritic
from mmrl.protocols.parts import ConversationTask, Task
from mmrl.rollouts import Message

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

_log = logging.getLogger(__name__)

# Names of modules, as path components of parameter names, in all families of transformers.
CONNECTORS = {"merger", "deepstack_merger_list", "connector", "multi_modal_projector", "projector", "image_newline"}
VISION_TOWERS = {"visual", "vision_model", "vision_tower", "vision_backbone"}


def load(path: str, settings: VisionLanguageModel, config: JobConfig, task: Task | None = None) -> VisionLanguagePolicy:
    """Loads the policy of a job from a folder or a hub name. Raises UserError as `load_model` does."""
    rollout: TokenLimits = config.rollout
    engine: TokenEngine = config.engine
    model, processor = load_model(path, settings, first_conversations(task))
    text = transformers_model(model).config.get_text_config()
    longest, context = rollout.max_response_length.extremes[1], text.max_position_embeddings
    if longest >= context:
        raise UserError(
            f"rollout.max_response_length={longest:g} leaves no room for a prompt in the {context} tokens that "
            f"model.path={path} can read; lower it"
        )
    if settings.activation_checkpointing:
        recompute_activations(model)
    policy = VisionLanguagePolicy(
        model,
        processor,
        sampling=Sampling(top_p=rollout.top_p, top_k=rollout.top_k) if isinstance(rollout, TokenSampling) else None,
        temperature=rollout.temperature if isinstance(rollout, TokenSampling) else None,
        max_prompt_length=rollout.max_prompt_length,
        max_response_length=rollout.max_response_length,
        logp_chunk=engine.logp_chunk,
        packing=engine.packing,
        evaluation_temperature=config.evaluation.temperature,
        segment=rollout.segment if isinstance(rollout, TokenSampling) else None,
        gathers=not isinstance(config.generator, TransformersGenerator) or config.generator.gather,
    )
    if isinstance(config.needs.critic, SharedCritic):
        policy.module.critic = critic_of(transformers_model(model), config.needs.critic, Path(path))
    if isinstance(task, ConversationTask) and task.environment is not None:
        policy.drafter.converse(task.environment)
    return policy


class VisionLanguageSettings(Protocol):
    """Settings of a vision-language model, shared by all kinds of model that contain one."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]: ...

    @property
    def attention(self) -> Literal["sdpa", "eager", "flash_attention_2"]: ...

    @property
    def freeze(self) -> Sequence[Literal["vision", "connector", "language"]]: ...

    @property
    def lora(self) -> LoRA | None: ...

    @property
    def processor(self) -> dict[str, Any]: ...


def load_config(path: str) -> PreTrainedConfig:
    """Returns the configuration of a transformers model, or of the one that an adapter at `path` belongs to. Raises
    UserError where there is none."""
    try:
        return AutoConfig.from_pretrained(base_of(path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        if (kind := _kind_of_remote_code(base_of(path))) is not None:
            raise UserError(
                f"model.path={path} is a {kind} model with code of its own, which is never run; for masked diffusion "
                f"models of the kinds llada, mmada, Dream and sdar write what transformers reads with: mmrl convert "
                f"{path} --out DIR"
            ) from None
        raise UserError(f"model.path={path}: {str(error).splitlines()[0]}") from None


def _kind_of_remote_code(path: str) -> str | None:
    """Returns the `model_type` of a model that names code of its own, None for others."""
    try:
        values, _ = PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return None
    return str(values.get("model_type", "nameless")) if "auto_map" in values else None


def load_pretrained(model_class: Any, path: str, dtype: str, attention: str) -> PreTrainedModel:
    """Loads a model of transformers' class `model_class`, without its adapter. Raises UserError where files lack some
    of its weights, which transformers would leave at random."""
    model, info = model_class.from_pretrained(
        base_of(path), dtype=dtype, attn_implementation=attention, output_loading_info=True, trust_remote_code=False
    )
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"model.path={path}: its files lack {len(missing)} of the model's weights, such as {missing[0]}"
        )
    return model


def load_tokenizer(path: str) -> Tokenizer:
    """Loads the tokenizer at `path`."""
    tokenizer_class: Any = AutoTokenizer
    return tokenizer_class.from_pretrained(path, trust_remote_code=False)


def first_conversations(task: Task | None) -> list[Sequence[Message]]:
    """Returns some prompts of a task as messages, to try a chat template with; none where an environment writes
    them."""
    if task is None or isinstance(task, ConversationTask) and task.environment is not None:
        return []
    conversations: list[Sequence[Message]] = []
    for source in (task.train, task.evaluation):
        size = 0 if source is None else len(source)
        for index in sorted({0, size // 3, 2 * size // 3, size - 1} & set(range(size))):
            assert source is not None
            try:
                conversations.append(chat(source[index]))
            except Exception:  # whatever a row's files raise: it is judged where rows are read, with its name
                _log.debug("row %d is not tried with the chat template", index, exc_info=True)
    return conversations


def load_model(
    path: str, settings: VisionLanguageSettings, conversations: Sequence[Sequence[Message]] = ()
) -> tuple[nn.Module, Processor]:
    """Loads an image-text model and its processor, with its LoRA if `path` is one or a new one if the settings ask for
    one. conversations: that its chat template has to take.

    Raises UserError if there is no model at `path`, it is not one that reads images and writes text, or its template
    does not take the conversations; the latter before weights are read.
    """
    config = load_config(path)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UserError(f"model.path={path} is a {config.model_type} model, which does not read images and write text")
    processor = AutoProcessor.from_pretrained(path, **settings.processor | {"trust_remote_code": False})
    check_template(processor, conversations)
    core = load_pretrained(AutoModelForImageTextToText, path, settings.dtype, settings.attention)
    write_as_published(core)
    pack_images(core)
    return adapt(core, path, freeze=settings.freeze, lora=settings.lora), processor


def write_as_published(model: Any) -> None:
    """Has transformers save all weights in the layout of the published checkpoint, which is what other libraries read.

    Where experts lie transposed in it, transformers reads both layouts and tells them apart by their shape; by the same
    rule it decides that what it writes need not be transposed back, unless ZeRO-3 has emptied the parameter it compares
    with.
    """
    for conversion in model._weight_conversions:
        if isinstance(conversion, WeightConverter):
            for operation in conversion.operations:
                if isinstance(operation, Transpose):
                    operation.check_dims = False


def base_of(path: str) -> str:
    """Returns the base model of the LoRA at `path`, or `path` itself if it is none."""
    if (Path(path) / "adapter_config.json").is_file():
        import peft  # takes a second, and only a LoRA needs it

        return str(peft.PeftConfig.from_pretrained(path).base_model_name_or_path)
    return path


def adapt(model: nn.Module, path: str, *, freeze: Sequence[str], lora: LoRA | None) -> nn.Module:
    """Returns `model` with the LoRA at `path` if there is one, or a new one if `lora` is given; freezes the parts in
    `freeze`. Raises UserError where targets match no module."""
    adapted = (Path(path) / "adapter_config.json").is_file()
    if adapted or lora is not None:
        import peft  # takes a second, and only a LoRA needs it
    if adapted:
        model = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
    elif lora is not None:
        options: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.targets}
        try:
            model = peft.get_peft_model(model, peft.LoraConfig(**options, init_lora_weights=lora.peft_init))
        except ValueError as error:  # its text shows the whole model's class and where that was loaded from
            raise UserError(
                f"model.lora.targets={lora.targets}: no adapter can be added there ({error!s:.120})"
            ) from None
    for parameter_name, parameter in model.named_parameters():  # adapters too
        if part_of(parameter_name) in freeze:
            parameter.requires_grad_(False)
    return model


def recompute_activations(model: nn.Module) -> None:
    """Has layers keep only their inputs for the backward pass (gradient checkpointing)."""
    core = transformers_model(model)
    core.gradient_checkpointing_enable({"use_reentrant": False})
    # For reentrant checkpoints transformers makes the outputs of all embeddings require a gradient, image patches
    # included. These checkpoints need none, and a frozen vision tower would be recomputed and run backward.
    core.disable_input_require_grads()


def part_of(parameter: str) -> str:
    """Returns the part that a parameter belongs to, by its name: vision, connector or language."""
    names = set(parameter.split("."))
    if names & CONNECTORS:
        return "connector"
    return "vision" if names & VISION_TOWERS else "language"
