"""Loads vision-language policies from folders, or from the Hugging Face hub by name."""

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
from mmrl.policies.vlm.responses.features import can_reuse
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

# Parts of parameter names that say which part of a model a parameter belongs to, in all families of transformers.
CONNECTORS = {"merger", "deepstack_merger_list", "connector", "multi_modal_projector", "projector", "image_newline"}
VISION_TOWERS = {"visual", "vision_model", "vision_tower", "vision_backbone"}


def load(path: str, settings: VisionLanguageModel, config: JobConfig, task: Task | None = None) -> VisionLanguagePolicy:
    """Loads the policy of a job. path: a folder or a hub name. task: the chat template is tried with some of its
    prompts.

    Raises UserError as `load_model`, and if responses may be as long as the context of the model.
    """
    rollout: TokenLimits = config.rollout
    engine: TokenEngine = config.engine
    model, processor = load_model(path, settings, some_conversations(task))
    text = transformers_model(model).config.get_text_config()
    # extremes: the smallest and the largest value of all steps
    max_response_length, context = rollout.max_response_length.extremes[1], text.max_position_embeddings
    if max_response_length >= context:
        raise UserError(
            f"rollout.max_response_length={max_response_length:g} leaves no room for a prompt in the context of "
            f"model.path={path}, {context} tokens; lower it"
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
    core = transformers_model(model)
    policy.module.reuses_features = engine.reuse_features and can_reuse(core) and images_are_frozen(core)
    if isinstance(config.needs.critic, SharedCritic):
        policy.module.critic = critic_of(core, config.needs.critic, Path(path))
    if isinstance(task, ConversationTask) and task.environment is not None:
        policy.drafter.converse(task.environment)
    return policy


class VisionLanguageSettings(Protocol):
    """The settings that `load_model` reads; models of other types that contain a vision-language model have them
    too."""

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
    """Returns the configuration of the transformers model at `path`, or of its base model if `path` is a LoRA. Raises
    UserError if there is none, or if it needs code of its own (trust_remote_code)."""
    try:
        return AutoConfig.from_pretrained(base_of(path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        if (model_type := _remote_code_type(base_of(path))) is not None:
            raise UserError(
                f"model.path={path} is a model of type {model_type} with code of its own (trust_remote_code), which is "
                "never run; convert masked diffusion models of type llada, mmada, Dream or sdar with: mmrl convert "
                f"{path} --out DIR"
            ) from None
        raise UserError(f"model.path={path}: {str(error).splitlines()[0]}") from None


def _remote_code_type(path: str) -> str | None:
    """Returns the `model_type` of a model whose configuration names code of its own, None for other models."""
    try:
        values, _ = PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return None
    return str(values.get("model_type", "nameless")) if "auto_map" in values else None


def load_pretrained(model_class: Any, path: str, dtype: str, attention: str) -> PreTrainedModel:
    """Loads the base model at `path` with a transformers class, without its LoRA. Raises UserError if its files lack
    weights, which transformers would initialise at random.

    attention: sdpa, eager or flash_attention_2.
    """
    model, info = model_class.from_pretrained(
        base_of(path), dtype=dtype, attn_implementation=attention, output_loading_info=True, trust_remote_code=False
    )
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"model.path={path}: its files lack {len(missing)} weights of the model, such as {missing[0]}; take a "
            "complete checkpoint"
        )
    return model


def load_tokenizer(path: str) -> Tokenizer:
    """Loads the tokenizer at `path`."""
    tokenizer_class: Any = AutoTokenizer
    return tokenizer_class.from_pretrained(path, trust_remote_code=False)


def some_conversations(task: Task | None) -> list[Sequence[Message]]:
    """Returns prompts of a task as messages, with which the chat template is tried: up to four for training and four
    for evaluation, spread over the data. Returns [] if an environment writes the messages."""
    if task is None or isinstance(task, ConversationTask) and task.environment is not None:
        return []
    conversations: list[Sequence[Message]] = []
    for source in (task.train, task.evaluation):
        size = 0 if source is None else len(source)
        for index in sorted({0, size // 3, 2 * size // 3, size - 1} & set(range(size))):
            assert source is not None
            try:
                conversations.append(chat(source[index]))
            except Exception:  # a bad row of the data; reading the data reports it by name
                _log.debug("row %d is not tried with the chat template", index, exc_info=True)
    return conversations


def load_model(
    path: str, settings: VisionLanguageSettings, conversations: Sequence[Sequence[Message]] = ()
) -> tuple[nn.Module, Processor]:
    """Loads an image-text model and its processor, with the LoRA at `path`, or with a new LoRA if `settings.lora` is
    set.

    conversations: messages that the chat template must accept, which is tried before weights are loaded. Raises
    UserError if there is no model at `path`, if it does not read images and write text, or if its template refuses a
    conversation.
    """
    config = load_config(path)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UserError(
            f"model.path={path} is a model of type {config.model_type}, which does not read images and write text; "
            "take an image-text-to-text model of transformers"
        )
    processor = AutoProcessor.from_pretrained(path, **settings.processor | {"trust_remote_code": False})
    check_template(processor, conversations)
    core = load_pretrained(AutoModelForImageTextToText, path, settings.dtype, settings.attention)
    save_in_published_layout(core)
    pack_images(core)
    return adapt(core, path, freeze=settings.freeze, lora=settings.lora), processor


def save_in_published_layout(model: Any) -> None:
    """Makes `save_pretrained` write all weights in the layout of the published checkpoint, which other libraries read.

    Some published checkpoints have transposed weights of experts. transformers accepts both layouts and tells them
    apart by shape. It also compares shapes while it saves, which would fail with the empty parameters of ZeRO-3.
    """
    for conversion in model._weight_conversions:
        if isinstance(conversion, WeightConverter):
            for operation in conversion.operations:
                if isinstance(operation, Transpose):
                    operation.check_dims = False


def base_of(path: str) -> str:
    """Returns the path of the base model of the LoRA at `path`, or `path` itself if no LoRA is there."""
    if (Path(path) / "adapter_config.json").is_file():
        import peft  # takes a second, and only a LoRA needs it

        return str(peft.PeftConfig.from_pretrained(path).base_model_name_or_path)
    return path


def adapt(model: nn.Module, path: str, *, freeze: Sequence[str], lora: LoRA | None) -> nn.Module:
    """Returns `model` with the LoRA at `path` if there is one, or with a new LoRA if `lora` is given, and freezes
    parts.

    freeze: names of parts, among "vision", "connector" and "language". Raises UserError if lora.targets match no
    module.
    """
    has_lora = (Path(path) / "adapter_config.json").is_file()
    if has_lora or lora is not None:
        import peft  # takes a second, and only a LoRA needs it
    if has_lora:
        model = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
    elif lora is not None:
        options: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.targets}
        try:
            model = peft.get_peft_model(model, peft.LoraConfig(**options, init_lora_weights=lora.peft_init))
        except ValueError as error:  # cut, because its text continues with the class and the files of the model
            raise UserError(
                f"model.lora.targets={lora.targets} matches no module of the model ({error!s:.120}); name linear "
                "layers, or set all-linear"
            ) from None
    for name, parameter in model.named_parameters():  # those of the LoRA too
        if part_of(name) in freeze:
            parameter.requires_grad_(False)
    return model


def images_are_frozen(model: nn.Module) -> bool:
    """Returns whether features of images never change: neither the vision tower nor the connector is trained, and no
    LoRA is in them, which the reference policy would switch off."""
    images = [(name, p) for name, p in model.named_parameters() if part_of(name) != "language"]
    return bool(images) and not any(p.requires_grad or ".lora_" in name for name, p in images)


def recompute_activations(model: nn.Module) -> None:
    """Turns on gradient checkpointing: layers keep only their inputs for the backward pass, and recompute the rest."""
    core = transformers_model(model)
    core.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers makes the outputs of all embeddings require a gradient, image patches included, which only reentrant
    # checkpointing needs. It would make a frozen vision tower be recomputed and run backward.
    core.disable_input_require_grads()


def part_of(parameter: str) -> str:
    """Returns the part of the model that a parameter belongs to, by its name: vision, connector or language."""
    names = set(parameter.split("."))
    if names & CONNECTORS:
        return "connector"
    return "vision" if names & VISION_TOWERS else "language"
