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
from mmrl.policies.vla.backbones.backbone import CachedPrefix
from mmrl.policies.vla.heads.flow import ExpertHead
from mmrl.policies.vla.heads.gaussian_settings import L1Actions
from mmrl.policies.vla.settings import ActionChain, Actions, EpisodePrompts, FlowActions, VisionLanguageActionModel
from mmrl.policies.vlm import loading
from mmrl.policies.vlm import memory_estimate as vlm
from mmrl.runtime.installation import extra_command
from mmrl.settings import plain

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

# Assumed sizes: tokens of an instruction, numbers of an action (as in LIBERO) and of a state.
INSTRUCTION_LENGTH, ACTION_DIM, STATE_DIM = 30, 7, 32
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
# LeRobot's policies by their published sizes. weights: number of all parameters; pi0's and pi0.5's as LeRobot 0.6.1
# holds them, with two unused language model heads. keys: layers, width and tokens of the prefix's key-value cache.
# expert: the action expert's transformer. modulated: how many of its norms the noise level modulates. chunk: number of
# actions that it denoises. Sources: SmolVLA arXiv 2506.01844, pi0 2410.24164, pi0.5 2504.16054.
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
    """Returns the network at `path` on the meta device and the passes that this job makes with it; None for mmrl's
    small networks. Raises UserError if the sizes of the model are not known."""
    if any((Path(path) / name).is_file() for name in (small.CONFIG, states_only.CONFIG)):
        return None
    if path in LEROBOT:
        return lerobot_model(settings, config, path)
    if path in vlm.PUBLISHED:
        return vlm_with_head(settings, config, path)
    # the sizes of the published model are known without a download
    checkpoint_config = OPENVLA if path == "openvla/openvla-7b" else _read_config(path)
    if checkpoint_config is OPENVLA or checkpoint_config.get("model_type") == "openvla":
        return openvla_model(settings, config, checkpoint_config)
    if "output_features" in checkpoint_config:
        raise UserError(
            f"model.path={path} is a LeRobot policy whose memory cannot be estimated; set model.path to the policy "
            f"that it was fine-tuned from, if that is one of {', '.join(LEROBOT)}"
        )
    return vlm_with_head(settings, config, path)


def _read_config(path: str) -> dict[str, Any]:
    """Reads the config.json of the model at `path`, or of its base model if `path` is a LoRA. Raises UserError if there
    is none."""
    try:
        return PreTrainedConfig.get_config_dict(loading.base_of(path))[0]
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path}: {str(error).strip().splitlines()[0]}") from None


def num_policy_steps(config: JobConfig) -> tuple[int, int]:
    """Returns the number of policy steps of the longest episode, and how many policy steps of a micro-batch are
    computed at once."""
    action: Actions = config.section("action")
    steps = math.ceil(action.horizon / action.chunk)
    return steps, config.engine.steps_at_once or steps * config.engine.micro_batch


def score_in_parts(score: Callable[[int], Tensor], rows: int, config: JobConfig) -> Tensor | list[Tensor]:
    """Runs `score`, which takes a number of policy steps, for `rows` episodes of maximum length, in parts as
    `Network.forward` does. Returns its output, or a list of the outputs of the parts."""
    max_steps, steps_at_once = num_policy_steps(config)
    total = max_steps * rows
    if total <= steps_at_once:
        return score(total)
    # Two parts stand for all: a part keeps only its inputs for the backward pass.
    return [checkpoint(score, steps_at_once, use_reentrant=False, preserve_rng_state=False) for _ in range(2)]


def micro_batch_notes(config: JobConfig) -> list[str]:
    """Returns notes for the report of the estimate: the size of a micro-batch."""
    max_steps, steps_at_once = num_policy_steps(config)
    return [
        f"a micro-batch is {config.engine.micro_batch} episodes of up to {max_steps} policy steps, {steps_at_once} of "
        "them computed at once"
    ]


def openvla_model(
    settings: VisionLanguageActionModel, config: JobConfig, checkpoint_config: dict[str, Any]
) -> MemoryModel:
    """Builds an OpenVLA or OpenVLA-OFT on the meta device from its config.json. Raises UserError if the extra `openvla`
    is not installed."""
    try:
        from mmrl.policies.vla.backbones import oft
        from mmrl.policies.vla.backbones.openvla import BidirectionalPrefix, OpenVLAConfig, OpenVLAForActionPrediction
    except ModuleNotFoundError as error:
        raise UserError(f"OpenVLA: {error}; install it with: {extra_command('openvla')}") from error
    openvla_config: Any = OpenVLAConfig(**checkpoint_config)
    openvla_config._attn_implementation = "sdpa"
    model_class: Any = OpenVLAForActionPrediction
    dtype = getattr(torch, settings.dtype)
    with on_meta(settings.dtype):
        unwrapped = model_class(openvla_config)
        model: Any = loading.adapt(unwrapped, "", freeze=settings.freeze, lora=settings.lora)
    model.to(dtype)
    action: Actions = config.section("action")
    width, size = openvla_config.text_config.hidden_size, openvla_config.image_sizes[0]
    module, has_l1_head = nn.ModuleDict({"model": model}), isinstance(action.head.checkpoint_head, L1Actions)
    with on_meta(settings.dtype):
        if has_l1_head:
            module["head"] = oft.ActionNetwork(width, ACTION_DIM)
        if has_l1_head and action.proprioception:
            module["proprio"] = oft.ProprioProjector(width, STATE_DIM)
    if action.head.checkpoint_head is not action.head:  # a head built around a base freezes the rest
        module.requires_grad_(False)

    def score(steps: int) -> Tensor:
        """Runs the forward pass that scores `steps` policy steps, on the meta device. Returns its output."""
        ids = torch.zeros(steps, INSTRUCTION_LENGTH, dtype=torch.long, device="meta")
        num_images = len(action.cameras or [1])  # without action.cameras all cameras are in one image
        pixels = torch.empty(steps, num_images, 3, size, size, device="meta", dtype=dtype)
        inputs = unwrapped.embed(ids, torch.ones_like(ids), [pixels] * len(openvla_config.timm_model_ids))
        tokens = torch.empty(steps, action.chunk * ACTION_DIM, width, device="meta", dtype=dtype)
        if action.head.bidirectional:
            end = torch.empty(1, width, device="meta", dtype=dtype)
            hidden = BidirectionalPrefix(unwrapped.language_model, inputs, end).encode_with(tokens)
            if not has_l1_head:
                return hidden
            return module["head"](hidden[:, :-1].unflatten(1, (action.chunk, ACTION_DIM)).flatten(2))
        embeddings = torch.cat([inputs["inputs_embeds"], tokens], 1)
        mask = full_attention_mask(steps, embeddings.shape[1])
        output = unwrapped.language_model.base_model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False)
        last_hidden: Tensor = output.last_hidden_state
        return last_hidden

    return MemoryModel(
        module,
        lambda rows: score_in_parts(score, rows, config),
        sample=lambda: score(_num_envs(config)),
        notes=micro_batch_notes(config),
    )


def vlm_with_head(settings: VisionLanguageActionModel, config: JobConfig, path: str) -> MemoryModel:
    """Builds a vision-language model with one of mmrl's heads. If the model is frozen, only the head is trained, on
    cached prefixes."""
    action: Actions = config.section("action")
    rollout: EpisodePrompts = config.rollout
    model = vlm.network(path, dtype=settings.dtype, freeze=list(settings.freeze), lora=settings.lora)
    width = vlm.decoder(model).get_input_embeddings().embedding_dim
    length, dtype = rollout.max_prompt_length, getattr(torch, settings.dtype)
    if action.head.checkpoint_head is not action.head:  # a head built around a base freezes the rest
        model.requires_grad_(False)
    frozen = not any(p.requires_grad for p in model.parameters())
    module = nn.ModuleDict({"backbone": model})
    notes = [*micro_batch_notes(config), f"of prompts of up to rollout.max_prompt_length={length} tokens"]
    if isinstance(action.head, FlowActions):
        # built on the CPU, since it computes the noise levels of its steps
        head = ExpertHead(action.head, action, ACTION_DIM, STATE_DIM, width)
        module["head"] = head.to("meta", dtype)
    else:
        notes.append("the head's own weights are left out, since they are small beside the model's")

    def score(steps: int) -> Tensor:
        """Runs the forward pass that scores `steps` policy steps, on the meta device. Returns its output."""
        if frozen:
            hidden = torch.empty(steps, length, width, device="meta", dtype=dtype)
        else:
            hidden = vlm.last_hidden(model, steps, length + action.chunk * ACTION_DIM, requires_grad=True)[:, :length]
        if not isinstance(action.head, FlowActions):
            return hidden
        prefix = CachedPrefix(hidden, torch.ones(steps, length, dtype=torch.bool, device="meta"))
        rows = torch.arange(steps, device="meta").repeat_interleave(head.decisions)
        noisy = torch.empty(len(rows), action.chunk, ACTION_DIM, device="meta", dtype=dtype)
        sigma, state = torch.empty(len(rows), device="meta"), torch.empty(steps, head.state_dim, device="meta")
        return head.velocity(prefix, state.to(dtype), noisy, sigma.to(dtype), rows)

    return MemoryModel(
        module,
        lambda rows: score_in_parts(score, rows, config),
        sample=lambda: vlm.last_hidden(model, _num_envs(config), length, requires_grad=False),
        notes=notes,
    )


def lerobot_model(settings: VisionLanguageActionModel, config: JobConfig, path: str) -> MemoryModel:
    """Builds a stand-in for a LeRobot policy: a transformer of the action expert's size with the prefix's keys and
    values, and one frozen parameter as large as all other parameters of the policy together."""
    if set(settings.freeze) != {"vision", "connector", "language"}:
        raise UserError(
            f"model.freeze={list(settings.freeze)}: the memory of a LeRobot policy can be estimated only with "
            "model.freeze=[vision, connector, language]"
        )
    sizes = LEROBOT[path]
    layers, keys, tokens = sizes["keys"]  # keys: width of a token's keys in one layer; tokens: of the prefix
    width, dtype = sizes["expert"]["hidden_size"], getattr(torch, settings.dtype)
    with on_meta(settings.dtype):
        expert: Any = LlamaModel(LlamaConfig(**sizes["expert"], vocab_size=3))  # it gets embeddings, no tokens
        # scale, shift and gate of each modulated norm
        modulation = nn.Linear(width, 3 * width * sizes["modulated"]) if sizes["modulated"] else nn.Identity()
        expert_size = sum(p.numel() for part in (expert, modulation) for p in part.parameters())
        rest = nn.Linear(int(sizes["weights"]) - expert_size, 1, bias=False)
        modulation.requires_grad_(settings.lora is None)
        expert = loading.adapt(expert, "", freeze=(), lora=settings.lora)
    rest.requires_grad_(False)
    module = nn.ModuleDict({"expert": expert, "modulation": modulation, "rest": rest}).to(dtype)
    action = config.section("action")
    num_scored = 1 if not isinstance(action.head, FlowActions) else _num_scored_steps(action.head)

    def score(steps: int) -> Tensor:
        """Runs the forward pass that scores `steps` policy steps, on the meta device. Returns its output."""
        rows = steps * num_scored
        cache = torch.empty(rows, layers * 2 * keys, tokens, device="meta", dtype=dtype)  # a copy for each scored step
        noisy = torch.empty(rows, sizes["chunk"], width, device="meta", dtype=dtype)
        noisy.requires_grad_(True)
        mask = full_attention_mask(rows, sizes["chunk"])
        last_hidden: Tensor = expert(inputs_embeds=noisy, attention_mask=mask, use_cache=False).last_hidden_state
        return last_hidden + 0 * cache[:, :1, :1]  # so that the cache is in memory until here

    notes = [
        *micro_batch_notes(config),
        "the expert is counted as a transformer of its size (LeRobot's own code is not run)",
    ]
    return MemoryModel(module, lambda rows: score_in_parts(score, rows, config), notes=notes)


def _num_scored_steps(head: FlowActions) -> int:
    """Returns how many denoising steps of a chunk are scored: the window's size, or all."""
    window = plain(head.likelihood.window) if isinstance(head.likelihood, ActionChain) else {}
    return int(window.get("size") or head.steps)


def _num_envs(config: JobConfig) -> int:
    """Returns how many environments the simulator steps at once."""
    return int(vars(config.task).get("rows") or 1)
