"""Memory estimates of vision-language-action models on the meta device, for the policy steps of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig

from mmrl.engine.memory import MemoryModel, full_attention_mask, on_meta
from mmrl.errors import UserError
from mmrl.policies.vla.backbones import small, states_only
from mmrl.policies.vla.backbones.backbone import CachedReading
from mmrl.policies.vla.heads.flow import ExpertHead
from mmrl.policies.vla.settings import (
    ActionChain,
    Actions,
    EpisodePrompts,
    FlowActions,
    L1Actions,
    VisionLanguageActionModel,
)
from mmrl.policies.vlm import loading
from mmrl.policies.vlm import memory_estimate as vlm
from mmrl.runtime.installation import extra_command
from mmrl.settings import plain

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

WORDS, ACTION, STATE = 30, 7, 32  # tokens of an instruction, numbers of an action and of a state; of LIBERO's
OPENVLA: dict[str, Any] = {
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32064,
        "max_position_embeddings": 2048,
    },
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "image_sizes": [224, 224],
}
GEMMA_300M = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
# LeRobot's policies by their published sizes: all weights (of pi0 and pi0.5 as LeRobot 0.6.1 holds them, with two
# unused language model heads), the prefix as (layers, width of keys and values, tokens), the expert's transformer, how
# many of its norms a noise level modulates, and the length of the chunk that it denoises. SmolVLA: arXiv 2506.01844,
# pi0: 2410.24164, pi0.5: 2504.16054.
LEROBOT: dict[str, dict[str, Any]] = {
    "lerobot/smolvla_base": {
        "weights": 450e6,
        "keys": (16, 320, 241),
        "expert": {
            "hidden_size": 720,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "head_dim": 64,
        },
        "modulated": 0,
        "chunk": 50,
    },
    "lerobot/pi0": {
        "weights": 4028e6,
        "keys": (18, 256, 816),
        "expert": GEMMA_300M,
        "modulated": 0,
        "chunk": 50,
    },
    "lerobot/pi05_base": {
        "weights": 4143e6,
        "keys": (18, 256, 968),
        "expert": GEMMA_300M,
        "modulated": 37,
        "chunk": 50,
    },
}


def memory_model(settings: VisionLanguageActionModel, config: JobConfig, path: str) -> MemoryModel | None:
    """Builds the memory estimate of a job, None for mmrl's small networks. Raises UserError where the sizes of the
    model are not known."""
    if any((Path(path) / name).is_file() for name in (small.CONFIG, states_only.CONFIG)):
        return None
    if path in LEROBOT:
        return lerobot(settings, config, path)
    if path in vlm.PUBLISHED:
        return with_head(settings, config, path)
    checkpoint_config = OPENVLA if path == "openvla/openvla-7b" else _read_config(path)
    if checkpoint_config is OPENVLA or checkpoint_config.get("model_type") == "openvla":
        return openvla(settings, config, checkpoint_config)
    if "output_features" in checkpoint_config:
        raise UserError(
            f"model.path={path}: of LeRobot's policies the sizes of {', '.join(LEROBOT)} are known; give one of "
            "these names to estimate its memory"
        )
    return with_head(settings, config, path)


def _read_config(path: str) -> dict[str, Any]:
    try:
        return PreTrainedConfig.get_config_dict(loading.base_of(path))[0]
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path}: {str(error).strip().splitlines()[0]}") from None


def policy_steps_of(config: JobConfig) -> tuple[int, int]:
    """Returns the policy steps of an episode, and how many of a micro-batch are computed at once."""
    action: Actions = config.section("action")
    steps = math.ceil(action.horizon / action.chunk)
    return steps, config.engine.steps_at_once or steps * config.engine.micro_batch


def in_parts(score: Callable[[int], Tensor], rows: int, config: JobConfig) -> Tensor | list[Tensor]:
    """Computes `score(steps)` for the policy steps of `rows` episodes, in parts as the policy's network does."""
    steps, at_once = policy_steps_of(config)
    total = steps * rows
    if total <= at_once:
        return score(total)
    # The second part stands for all others: of each the network keeps only its inputs.
    return [checkpoint(score, at_once, use_reentrant=False, preserve_rng_state=False) for _ in range(2)]


def notes_of(config: JobConfig) -> list[str]:
    steps, at_once = policy_steps_of(config)
    return [
        f"a micro-batch is {config.engine.micro_batch} episodes of up to {steps} policy steps, {at_once} of them "
        "computed at once"
    ]


def openvla(settings: VisionLanguageActionModel, config: JobConfig, checkpoint_config: dict[str, Any]) -> MemoryModel:
    """Returns the memory model of an OpenVLA, built on the meta device from its config.json. Raises UserError where the
    extra is not installed."""
    try:
        from mmrl.policies.vla.backbones import oft
        from mmrl.policies.vla.backbones.openvla import BidirectionalPrefix, OpenVLAConfig, OpenVLAForActionPrediction
    except ModuleNotFoundError as error:
        raise UserError(f"OpenVLA: {error}; install it with: {extra_command('openvla')}") from error
    openvla_config: Any = OpenVLAConfig(**checkpoint_config)
    openvla_config._attn_implementation = "sdpa"
    kind: Any = OpenVLAForActionPrediction
    with on_meta(settings.dtype):
        core = kind(openvla_config)
        model: Any = loading.adapt(core, "", freeze=settings.freeze, lora=settings.lora)
    model.to(getattr(torch, settings.dtype))
    action, width, dtype = (
        config.section("action"),
        openvla_config.text_config.hidden_size,
        getattr(torch, settings.dtype),
    )
    size = openvla_config.image_sizes[0]
    module, l1_head = nn.ModuleDict({"model": model}), isinstance(action.head.core, L1Actions)
    with on_meta(settings.dtype):
        if l1_head:
            module["head"] = oft.ActionNetwork(width, ACTION)
        if l1_head and action.proprioception:
            module["proprio"] = oft.ProprioProjector(width, STATE)
    if action.head.core is not action.head:  # it holds still what it is built around
        module.requires_grad_(False)

    def score(steps: int) -> Tensor:
        ids = torch.zeros(steps, WORDS, dtype=torch.long, device="meta")
        pixels = torch.empty(steps, len(action.cameras or [1]), 3, size, size, device="meta", dtype=dtype)
        inputs = core.embed(ids, torch.ones_like(ids), [pixels] * len(openvla_config.timm_model_ids))
        tokens = torch.empty(steps, action.chunk * ACTION, width, device="meta", dtype=dtype)
        if action.head.together:
            end = torch.empty(1, width, device="meta", dtype=dtype)
            read = BidirectionalPrefix(core.language_model, inputs, end).together(tokens)
            return module["head"](read[:, :-1].unflatten(1, (action.chunk, ACTION)).flatten(2)) if l1_head else read
        embeddings = torch.cat([inputs["inputs_embeds"], tokens], 1)
        mask = full_attention_mask(steps, embeddings.shape[1])
        output = core.language_model.base_model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False)
        out: Tensor = output.last_hidden_state
        return out

    return MemoryModel(
        module,
        lambda rows: in_parts(score, rows, config),
        sample=lambda: score(_played(config)),
        notes=notes_of(config),
    )


def with_head(settings: VisionLanguageActionModel, config: JobConfig, path: str) -> MemoryModel:
    """Builds the estimate of a vision-language model with one of mmrl's heads. Of a frozen model only the head runs."""
    action: Actions = config.section("action")
    rollout: EpisodePrompts = config.rollout
    model = vlm.network(path, dtype=settings.dtype, freeze=list(settings.freeze), lora=settings.lora)
    width = vlm.decoder(model).get_input_embeddings().embedding_dim
    length, dtype = rollout.max_prompt_length, getattr(torch, settings.dtype)
    if action.head.core is not action.head:  # it holds still what it is built around
        model.requires_grad_(False)
    frozen = not any(p.requires_grad for p in model.parameters())
    module = nn.ModuleDict({"backbone": model})
    notes = [*notes_of(config), f"of prompts of up to rollout.max_prompt_length={length} tokens"]
    if isinstance(action.head, FlowActions):
        head = ExpertHead(action.head, action, ACTION, STATE, width)  # it reads its noise levels
        module["head"] = head.to("meta", dtype)
    else:
        notes.append("the head's own weights, which are small beside the model's, are not counted")

    def score(steps: int) -> Tensor:
        if frozen:
            hidden = torch.empty(steps, length, width, device="meta", dtype=dtype)
        else:
            hidden = vlm.last_hidden(model, steps, length + action.chunk * ACTION, requires_grad=True)[:, :length]
        if not isinstance(action.head, FlowActions):
            return hidden
        reading = CachedReading(hidden, torch.ones(steps, length, dtype=torch.bool, device="meta"))
        rows = torch.arange(steps, device="meta").repeat_interleave(head.decisions)
        noisy = torch.empty(len(rows), action.chunk, ACTION, device="meta", dtype=dtype)
        levels, state = torch.empty(len(rows), device="meta"), torch.empty(steps, head.state_dim, device="meta")
        return head.velocity(reading, state.to(dtype), noisy, levels.to(dtype), rows)

    return MemoryModel(
        module,
        lambda rows: in_parts(score, rows, config),
        sample=lambda: vlm.last_hidden(model, _played(config), length, requires_grad=False),
        notes=notes,
    )


def lerobot(settings: VisionLanguageActionModel, config: JobConfig, path: str) -> MemoryModel:
    """Builds the estimate of a LeRobot policy: the action expert as a transformer of its size, with keys and values of
    the prefix; the frozen rest is counted by its weights."""
    if set(settings.freeze) != {"vision", "connector", "language"}:
        raise UserError("memory of a LeRobot policy is estimated only with model.freeze=[vision, connector, language]")
    sizes = LEROBOT[path]
    layers, keys, tokens = sizes["keys"]
    width, dtype = sizes["expert"]["hidden_size"], getattr(torch, settings.dtype)
    with on_meta(settings.dtype):
        expert: Any = LlamaModel(LlamaConfig(**sizes["expert"], vocab_size=3))
        modulation = nn.Linear(width, 3 * width * sizes["modulated"]) if sizes["modulated"] else nn.Identity()
        counted = sum(p.numel() for part in (expert, modulation) for p in part.parameters())
        rest = nn.Linear(int(sizes["weights"]) - counted, 1, bias=False)
        modulation.requires_grad_(settings.lora is None)
        expert = loading.adapt(expert, "", freeze=(), lora=settings.lora)
    rest.requires_grad_(False)
    module = nn.ModuleDict({"expert": expert, "modulation": modulation, "rest": rest}).to(dtype)
    action = config.section("action")
    points = 1 if not isinstance(action.head, FlowActions) else _points(action.head)

    def score(steps: int) -> Tensor:
        rows = steps * points
        cache = torch.empty(rows, layers * 2 * keys, tokens, device="meta", dtype=dtype)  # laid out by row anew
        noisy = torch.empty(rows, sizes["chunk"], width, device="meta", dtype=dtype)
        noisy.requires_grad_(True)
        mask = full_attention_mask(rows, sizes["chunk"])
        out: Tensor = expert(inputs_embeds=noisy, attention_mask=mask, use_cache=False).last_hidden_state
        return out + 0 * cache[:, :1, :1]

    notes = [*notes_of(config), "the expert is counted as a transformer of its size (LeRobot's own code is not run)"]
    return MemoryModel(module, lambda rows: in_parts(score, rows, config), notes=notes)


def _points(head: FlowActions) -> int:
    """Returns the number of denoising steps of a chunk that are scored."""
    window = plain(head.likelihood.window) if isinstance(head.likelihood, ActionChain) else {}
    return int(window.get("size") or head.steps)


def _played(config: JobConfig) -> int:
    """Returns the number of observations that are acted on at once, the rows of the simulator."""
    return int(vars(config.task).get("rows") or 1)
