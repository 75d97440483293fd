"""LeRobot's flow policies as backbones: SmolVLA (arXiv 2506.01844), pi0 (arXiv 2410.24164) and pi0.5 (arXiv
2504.16054), from the folders that LeRobot writes.

Networks, normalisation and tokenization are LeRobot's own code. LeRobot's time is the noise level sigma here: 1 is
noise, 0 the actions, and the velocity is noise - actions. The prefix (images, instruction and SmolVLA's state) is
encoded once. The action expert attends to the keys and values of all its layers at each denoising step.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import huggingface_hub
import numpy as np
import peft
import torch
import torch.nn.functional as F
from einops import rearrange
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies import pi_gemma
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import NormalizerProcessorStep, PolicyProcessorPipeline, TransitionKey
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from numpy.typing import NDArray
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache, masking_utils

from mmrl.errors import UserError
from mmrl.policies.settings import LoRA
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.backbones.processor_files import (
    CONFIG,
    FILES,
    POSTPROCESSOR,
    PREPROCESSOR,
    ConstantValues,
    ProcessorFiles,
    load_processor_files,
)
from mmrl.policies.vla.heads.flow import FlowHead
from mmrl.policies.vla.heads.head import EncodedPrefix
from mmrl.policies.vla.settings import Actions, FlowActions, FrozenFlow, TaughtFlow, VisionLanguageActionModel
from mmrl.policies.vlm import loading
from mmrl.sims.vector.simulator import nearest

WEIGHTS = "model.safetensors"
EMPTY = ".empty_camera_"  # part of the names of images that no camera gives: LeRobot fills them itself
UNSUPPORTED_OPTIONS = ("adapt_to_pi_aloha", "use_relative_actions", "compile_model")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # a LoRA in peft's format, as LeRobot saves it


@dataclass(frozen=True)
class LeRobotObservation:
    """A preprocessed observation."""

    images: Tensor  # [camera, 3, height, width] uint8
    state: Tensor  # [state], in the robot's units
    text: str


class ExpertPrefix:
    """The prefix of n observations, to which the action expert attends. Of an `EncodedPrefix` it only has `last`."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], mask: Tensor, state: Tensor, last: Tensor) -> None:
        """layers: keys and values of each layer, [n, head, token, size]; mask: [n, token] bool; state: normalised and
        padded to LeRobot's max_state_dim, [n, max state]; last: the last hidden state of the last token, [n, width]."""
        self.keys_and_values, self.mask, self.state, self.last = tuple(layers), mask, state, last

    def select(self, rows: Tensor) -> ExpertPrefix:
        """Returns the prefixes of observations `rows` [m], which may repeat."""
        if torch.equal(rows, torch.arange(len(self.mask), device=rows.device)):  # each once, in order: no copy
            return self
        layers = [(keys[rows], values[rows]) for keys, values in self.keys_and_values]
        return ExpertPrefix(layers, self.mask[rows], self.state[rows], self.last[rows])

    def cache(self) -> DynamicCache:
        """Returns keys and values as a new transformers cache each time, because LeRobot appends to the cache."""
        return DynamicCache(tuple((keys, values) for keys, values in self.keys_and_values))


class LeRobotNormalizer:
    """An `mmrl.policies.vla.heads.codec.ActionNormalizer` that uses the processors of a LeRobot checkpoint."""

    clipped = False

    def __init__(
        self,
        preprocessor: PolicyProcessorPipeline,
        postprocessor: PolicyProcessorPipeline,
        constants: ConstantValues | None,
    ) -> None:
        """constants: the numbers of actions that never change in the data; None if actions are not normalised."""
        self.normalise = next(step for step in preprocessor.steps if isinstance(step, NormalizerProcessorStep))
        self.postprocessor, self.constants = postprocessor, constants

    def to_robot(self, actions: NDArray) -> NDArray[np.float64]:
        return self.postprocessor(torch.from_numpy(actions.astype(np.float32))).double().numpy()

    def from_robot(self, actions: NDArray) -> NDArray[np.float64]:
        numbers = torch.from_numpy(actions.astype(np.float32))
        transition = {TransitionKey.ACTION: numbers if self.constants is None else self.constants.fill(numbers)}
        return self.normalise(transition)[TransitionKey.ACTION].double().numpy()

    def distance_from_center(self, actions: NDArray) -> NDArray[np.float64]:
        distance = np.abs(self.from_robot(actions))
        return distance if self.constants is None else np.where(self.constants.moved(actions), np.inf, distance)


class LeRobotBackbone(Backbone):
    """A whole LeRobot policy. Its action expert is a part of this module, although `LeRobotHead` calls it; all other
    parts compute the prefix."""

    def __init__(
        self, policy: PreTrainedPolicy | peft.PeftModel, files: ProcessorFiles, features: Sequence[str]
    ) -> None:
        """policy: LeRobot's policy, or the peft model that wraps it. features: names of the checkpoint's image
        features, one for each of the cameras in `prepare`."""
        super().__init__()
        self.policy = policy
        config = self.unwrapped.config
        self.extra_files, self.constants = files.contents, files.constants["state"]
        overrides = {"device_processor": {"device": "cpu"}}
        with TemporaryDirectory() as folder:
            files.write(Path(folder))
            self.preprocessor, postprocessor = make_pre_post_processors(
                config, folder, preprocessor_overrides=overrides
            )
        self.action_normalizer = LeRobotNormalizer(self.preprocessor, postprocessor, files.constants["action"])
        self.action_dim, self.state_dim = config.action_feature.shape[0], config.robot_state_feature.shape[0]
        self.features = tuple(features)

    @property
    def unwrapped(self) -> PreTrainedPolicy:
        """LeRobot's policy without peft's wrapper."""
        return self.policy if isinstance(self.policy, PreTrainedPolicy) else self.policy.get_base_model()

    def format_prompt(self, instruction: str) -> str:
        return instruction

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[LeRobotObservation]:
        """Splits n observations into rows, without preprocessing, which `collate` does; see `Backbone.prepare`."""
        pixels = torch.from_numpy(rearrange(list(images), "camera n h w c -> n camera c h w").copy())
        observations = zip(pixels, torch.from_numpy(state.copy()), texts, strict=True)
        return [LeRobotObservation(cameras, row_state, text) for cameras, row_state, text in observations]

    def collate(self, rows: Sequence[LeRobotObservation], device: torch.device) -> dict[str, Tensor]:
        """Stacks rows and preprocesses them with LeRobot's processor, by the names of its features; see
        `Backbone.collate`."""
        images = torch.stack([row.images for row in rows], 1).float() / 255  # cameras first
        state = torch.stack([row.state for row in rows])
        observation: dict[str, Any] = {
            **dict(zip(self.features, images, strict=True)),
            # numbers that never change in the data get their value in the data
            OBS_STATE: state if self.constants is None else self.constants.fill(state),
            "task": [row.text for row in rows],
        }
        batch = self.preprocessor(observation)
        names = (*self.features, OBS_STATE, OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)
        return {name: batch[name].to(device) for name in names}

    def cache_rows(self, prefix: EncodedPrefix) -> list[dict[str, Tensor]]:
        """Splits n prefixes into rows on the CPU without padding: last hidden state, robot's state, and keys and
        values."""
        expert_prefix = cast(ExpertPrefix, prefix)
        mask, last, state = expert_prefix.mask, expert_prefix.last, expert_prefix.state
        layers = torch.stack([torch.stack(pair) for pair in expert_prefix.keys_and_values])
        layers = rearrange(layers, "l two n h t d -> n t l two h d")  # tokens first, for padding
        return [
            {"hidden": last[i].cpu(), "state": state[i].cpu(), "layers": layers[i][mask[i]].cpu()}
            for i in range(len(mask))
        ]

    def collate_cached(self, rows: Sequence[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
        """Pads rows of `cache_rows` to a batch; "layers" is [n, token, layer, 2, head, size], keys and values."""
        layers = [row["layers"] for row in rows]
        mask = [torch.ones(len(row), dtype=torch.bool) for row in layers]
        batch = {
            "hidden": torch.stack([row["hidden"] for row in rows]),
            "state": torch.stack([row["state"] for row in rows]),
            "layers": nn.utils.rnn.pad_sequence(layers, batch_first=True),
            "mask": nn.utils.rnn.pad_sequence(mask, batch_first=True),
        }
        return {name: value.to(device) for name, value in batch.items()}

    def cached_prefix(self, inputs: dict[str, Tensor]) -> EncodedPrefix:
        layers = rearrange(inputs["layers"], "n t l two h d -> l two n h t d")
        pairs = [(keys, values) for keys, values in layers]
        return cast(EncodedPrefix, ExpertPrefix(pairs, inputs["mask"], inputs["state"], inputs["hidden"]))

    def flow_head(
        self, settings: FlowActions | TaughtFlow | FrozenFlow, action: Actions, action_dim: int, state_dim: int
    ) -> FlowHead:
        """Builds the head around the policy's own action expert. Raises UserError if action, state or chunk do not
        fit."""
        config = self.unwrapped.config
        for name, policy_size, robot_size in (
            ("action", self.action_dim, action_dim),
            ("state", self.state_dim, state_dim),
        ):
            if policy_size != robot_size:
                raise UserError(
                    f"the LeRobot policy's {name} has {policy_size} numbers, but the simulator's has {robot_size}; use "
                    "the simulator of the robot that the policy was trained on"
                )
        if action.chunk > config.chunk_size:
            raise UserError(
                f"action.chunk={action.chunk}, but the LeRobot policy plans {config.chunk_size} actions; set "
                "action.chunk to this number or less"
            )
        latent = (config.chunk_size, config.max_action_dim)
        return LeRobotHead(settings, action, action_dim, state_dim, latent, self)

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the whole policy, or its LoRA in LeRobot's format: peft's files and a config.json with use_peft. state:
        the gathered state dict of this module."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.extra_files.items():
            (folder / name).write_bytes(content)
        weights: dict[str, Tensor] = {}
        pointers: set[int] = set()
        for name, value in state.items():
            is_tied = value.data_ptr() in pointers  # safetensors refuses tensors that share memory
            weights[name.removeprefix("policy.")] = value.clone() if is_tied else value.contiguous()
            pointers.add(value.data_ptr())
        if self.policy is self.unwrapped:
            save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
            return
        config = json.loads(self.extra_files[CONFIG])
        (folder / CONFIG).write_text(json.dumps({**config, "use_peft": True}, indent=4))
        self.policy.save_pretrained(str(folder), state_dict=weights, save_embedding_layers=False)

    @classmethod
    def freeze(cls, policy: nn.Module, parts: Sequence[str]) -> None:
        """Freezes `parts` of a policy: vision, connector (the projections of images and of the state) or language;
        never the action expert."""
        for name, parameter in policy.named_parameters():
            if cls._part(name) in parts:
                parameter.requires_grad_(False)

    @property
    def frozen(self) -> bool:
        return not any(p.requires_grad for n, p in self.policy.named_parameters() if self._part(n) != "expert")

    def velocity(self, prefix: ExpertPrefix, x: Tensor, sigma: Tensor) -> Tensor:
        """Predicts the velocity, shaped like x. x: noisy chunks [n, chunk_size, max_action_dim], sizes of LeRobot's
        configuration; sigma: noise levels [n]."""
        raise NotImplementedError

    @classmethod
    def _part(cls, name: str) -> str:
        """Returns the part that a parameter belongs to: vision, connector, language or expert."""
        raise NotImplementedError


class SmolVLABackbone(LeRobotBackbone):
    """SmolVLA, whose prefix holds the state."""

    def __init__(
        self, policy: PreTrainedPolicy | peft.PeftModel, files: ProcessorFiles, features: Sequence[str]
    ) -> None:
        super().__init__(policy, files, features)
        self.width: int = self.unwrapped.model.vlm_with_expert.config.text_config.hidden_size

    def encode(self, inputs: dict[str, Tensor], *, every_layer: bool) -> EncodedPrefix:
        """Encodes images, text and state once. Returns an `ExpertPrefix`: keys and values of every layer. every_layer:
        not used."""
        model = self.unwrapped.model
        images, image_masks = self.unwrapped.prepare_images(inputs)
        state = self.unwrapped.prepare_state(inputs)
        tokens = inputs[OBS_LANGUAGE_TOKENS], inputs[OBS_LANGUAGE_ATTENTION_MASK]
        embeddings, mask, attention_marks = model.embed_prefix(images, image_masks, *tokens, state=state)
        (hidden, _), cache = model.vlm_with_expert(
            attention_mask=make_att_2d_masks(mask, attention_marks),
            position_ids=mask.cumsum(1) - 1,
            inputs_embeds=[embeddings, None],  # None: no tokens of the action expert yet
            use_cache=True,
        )
        return make_expert_prefix(cache, mask, state, hidden)

    def velocity(self, prefix: ExpertPrefix, x: Tensor, sigma: Tensor) -> Tensor:
        model = self.unwrapped.model
        return model.denoise_step(prefix.mask, prefix.cache(), x, sigma)

    @classmethod
    def _part(cls, name: str) -> str:
        """Returns the part that a parameter belongs to; `state_proj` projects the state to a token of the prefix."""
        if ".state_proj." in name:
            return "connector"
        return loading.part_of(name) if ".vlm." in name else "expert"


class Pi0Backbone(LeRobotBackbone):
    """pi0, whose action expert reads the state."""

    def __init__(
        self, policy: PreTrainedPolicy | peft.PeftModel, files: ProcessorFiles, features: Sequence[str]
    ) -> None:
        """Builds the backbone, and patches LeRobot so that it works with the installed transformers."""
        super().__init__(policy, files, features)
        _drop_cache_position()
        self.width: int = self.unwrapped.model.paligemma_with_expert.paligemma.config.text_config.hidden_size

    def encode(self, inputs: dict[str, Tensor], *, every_layer: bool) -> EncodedPrefix:
        """Encodes images and text once. Returns an `ExpertPrefix`: keys and values of every layer, and the state.
        every_layer: not used."""
        model = self.unwrapped.model
        paligemma_with_expert = model.paligemma_with_expert
        images, image_masks = self.unwrapped._preprocess_images(inputs)
        tokens = inputs[OBS_LANGUAGE_TOKENS], inputs[OBS_LANGUAGE_ATTENTION_MASK]
        embeddings, mask, attention_marks = model.embed_prefix(images, image_masks, *tokens)
        # as LeRobot's own sampling does
        paligemma_with_expert.paligemma.model.language_model.config._attn_implementation = "eager"
        (hidden, _), cache = paligemma_with_expert(
            attention_mask=prepare_attention_masks_4d(make_att_2d_masks(mask, attention_marks)),
            position_ids=mask.cumsum(1) - 1,
            inputs_embeds=[embeddings, None],  # None: no tokens of the action expert yet
            use_cache=True,
        )
        return make_expert_prefix(cache, mask, self._state(inputs), hidden)

    def _state(self, inputs: dict[str, Tensor]) -> Tensor:
        """Returns the normalised state that the expert reads, zero-padded to [n, max state]."""
        state: Tensor = self.unwrapped.prepare_state(inputs)
        return state

    def velocity(self, prefix: ExpertPrefix, x: Tensor, sigma: Tensor) -> Tensor:
        model = self.unwrapped.model
        return model.denoise_step(prefix.state, prefix.mask, prefix.cache(), x, sigma)

    @classmethod
    def _part(cls, name: str) -> str:
        return loading.part_of(name) if ".paligemma." in name else "expert"


class Pi05Backbone(Pi0Backbone):
    """pi0.5, for which LeRobot's processor writes the state into the text."""

    def velocity(self, prefix: ExpertPrefix, x: Tensor, sigma: Tensor) -> Tensor:
        model = self.unwrapped.model
        return model.denoise_step(prefix.mask, prefix.cache(), x, sigma)

    def _state(self, inputs: dict[str, Tensor]) -> Tensor:
        return inputs[OBS_STATE]


class LeRobotHead(FlowHead):
    """A flow head around the action expert of a LeRobot policy, whose parameters belong to the backbone. The expert
    plans more actions than are executed, with more numbers than the robot's actions have. The surplus is not scored, as
    in pi_RL (arXiv 2510.25889)."""

    def __init__(
        self,
        settings: FlowActions | TaughtFlow | FrozenFlow,
        action: Actions,
        action_dim: int,
        state_dim: int,
        latent: tuple[int, int],
        backbone: LeRobotBackbone,
    ) -> None:
        """latent: the shape that the policy's own action expert denoises, actions of a chunk x numbers of an action.
        backbone: holds that expert."""
        super().__init__(settings, action, action_dim, state_dim, latent)
        self._backbone = [backbone]  # in a list: its parameters are not this module's

    def velocity(self, prefix: EncodedPrefix, state: Tensor, x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return self._backbone[0].velocity(cast(ExpertPrefix, prefix).select(rows), x, sigma).float()


BACKBONES: dict[str, type[LeRobotBackbone]] = {"smolvla": SmolVLABackbone, "pi0": Pi0Backbone, "pi05": Pi05Backbone}


def make_expert_prefix(
    cache: Iterable[tuple[Tensor, ...]], mask: Tensor, state: Tensor, hidden: Tensor
) -> EncodedPrefix:
    """Builds the encoded prefix from LeRobot's outputs. cache: keys and values of each layer; mask: [n, token], False
    at padding; state: normalised, [n, max state]; hidden: last hidden states, [n, token, width]."""
    # index of the last token: the first position at which the count of tokens is highest
    end = mask.long().cumsum(1).argmax(1)
    last = hidden[torch.arange(len(mask), device=mask.device), end]
    layers = [(keys, values) for keys, values, *_ in cache]
    return cast(EncodedPrefix, ExpertPrefix(layers, mask.bool(), state, last))


def _drop_cache_position() -> None:
    """Patches LeRobot 0.6 so that it no longer passes `cache_position` to `create_causal_mask`, which transformers 5.16
    does not accept. pi0 and pi0.5 pass masks of their own, which do not depend on it."""
    original = masking_utils.create_causal_mask
    if "cache_position" in inspect.signature(original).parameters:
        return

    def create_causal_mask(*, cache_position: Tensor, **options: Any) -> Any:
        """Calls the function of transformers without `cache_position`."""
        return original(**options)

    pi_gemma.create_causal_mask = create_causal_mask


def match_features(path: str, names: Sequence[str], action: Actions) -> list[str]:
    """Returns the checkpoint's image feature for each camera of the policy, in the order of `action.cameras`; if that
    is not set, the policy gets one image. names: the names of the checkpoint's image features.

    Raises UserError if cameras and image features do not match."""
    num_cameras = len(action.cameras or ("all",))
    features = action.camera_features
    if features is None:
        if num_cameras != len(names):
            raise UserError(
                f"model.path={path} was trained on {len(names)} cameras ({', '.join(names)}), but action.cameras gives "
                f"it {num_cameras}; name as many there, or set action.camera_features to those that it gets"
            )
        return list(names)
    if len(features) != num_cameras or len(set(features)) < num_cameras:
        raise UserError(
            f"action.camera_features must be {num_cameras} different names, one for each camera, not {features}"
        )
    for name in features:
        if name not in names:
            raise UserError(
                f"action.camera_features: model.path={path} has no {name!r}{nearest(name, names)}; it has "
                f"{', '.join(names)}"
            )
    return features


def load(path: str, model: VisionLanguageActionModel, action: Actions) -> LeRobotBackbone:
    """Loads a LeRobot policy from a folder or a hub name, with the LoRA in that folder, or with a new LoRA if
    `model.lora` is set. Raises UserError for a file, tensor or option that does not fit."""
    if model.processor:
        raise UserError("model.processor is not for LeRobot policies; remove it")
    folder = _folder(path)
    is_lora = (folder / ADAPTER_FILES[0]).is_file()
    base = loading.base_of(str(folder)) if is_lora else path
    saved_config = json.loads(_require_file(path, folder / CONFIG).read_text())
    for option in UNSUPPORTED_OPTIONS:
        if saved_config.get(option):
            raise UserError(
                f"model.path={path}: {CONFIG} has {option}=true, which mmrl cannot train; take another policy"
            )
    if saved_config.get("use_peft") and not is_lora:
        raise UserError(
            f"model.path={path}: {CONFIG} has use_peft=true, but {ADAPTER_FILES[0]} is missing; copy the whole folder"
        )
    weights = _require_file(path, (_folder(base) if is_lora else folder) / WEIGHTS)
    for name in (PREPROCESSOR, POSTPROCESSOR):
        _require_file(path, folder / f"{name}.json")
    files = load_processor_files(path, folder, action)
    config = PreTrainedConfig.from_pretrained(folder)
    # EMPTY: features of LeRobot that no camera fills
    features = match_features(path, [name for name in config.image_features if EMPTY not in name], action)
    config.device = "cpu"  # the engine moves it
    if saved_config["type"] == "smolvla":
        config.load_vlm_weights = False  # they are in the checkpoint
    policy_class: Any = get_policy_class(saved_config["type"])
    backbone_class, policy = BACKBONES[saved_config["type"]], policy_class(config).float()
    _load_weights(policy, load_file(weights), str(weights.parent))
    freeze_unused_heads(policy)
    backbone_class.freeze(policy, model.freeze)
    if model.dtype == "bfloat16":
        use_fp32_projections(policy)
    if is_lora:
        policy = peft.PeftModel.from_pretrained(policy, folder, is_trainable=True)
        backbone_class.freeze(policy, model.freeze)  # this time the adapters inside these parts
    elif model.lora is not None:
        policy = with_lora(policy, base, model.lora)
    for parameter in policy.parameters():  # not buffers: they hold the angles of rotary embeddings
        parameter.data = parameter.data.to(getattr(torch, model.dtype))
    return backbone_class(policy, files, features)


def freeze_unused_heads(policy: nn.Module) -> None:
    """Freezes language model heads, on whose output no action depends, unless their weights are tied to the input
    embeddings."""
    named = list(policy.named_parameters(remove_duplicate=False))
    num_uses = Counter(id(parameter) for _, parameter in named)
    for name, parameter in named:
        if "lm_head." in name and num_uses[id(parameter)] == 1:
            parameter.requires_grad_(False)


class Fp32Linear(nn.Linear):
    """A linear layer that computes in fp32, whatever the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)


def use_fp32_projections(policy: PreTrainedPolicy) -> None:
    """Makes the projections of states, noisy actions, noise levels and velocities compute in fp32, as LeRobot does.

    A denoising step changes actions by less than the 8 bits of bfloat16 resolve. Attention, norms and rotary embeddings
    compute in fp32 by LeRobot's own code."""
    parts = [policy.model, *(module for module in policy.modules() if isinstance(module, pi_gemma.PiGemmaRMSNorm))]
    for part in parts:
        for name, linear in list(part.named_children()):
            if isinstance(linear, nn.Linear):
                fp32 = Fp32Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
                fp32.weight, fp32.bias = linear.weight, linear.bias
                setattr(part, name, fp32)


def with_lora(policy: PreTrainedPolicy, base: str, lora: LoRA) -> peft.PeftModel:
    """Adds LoRA adapters to the trainable linear layers of `policy`. base: the path of the policy's files, which peft
    saves with the adapters. Raises UserError if no layer matches."""
    lora_config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        init_lora_weights=lora.peft_init,
    )
    lora_config.target_modules = None if lora.targets == "all-linear" else lora.targets
    names = [n for n, m in policy.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    if lora_config.target_modules is not None:
        names = [n for n in names if check_target_module_exists(lora_config, n)]
    if not names:
        raise UserError(
            f"model.lora.targets={lora.targets} matches no linear layer that would be trained; name others, or change "
            f"what is frozen (model.freeze, and {CONFIG} of {base})"
        )
    lora_config.target_modules = set(names)  # type: ignore[assignment]  # as peft converts a list
    policy.name_or_path = base  # which peft saves
    return peft.get_peft_model(policy, lora_config)


def _require_file(path: str, file: Path) -> Path:
    """Returns `file`. Raises UserError if it does not exist."""
    if not file.is_file():
        raise UserError(
            f"model.path={path} is a LeRobot policy, but {file} is missing; save it with LeRobot 0.5 or later"
        )
    return file


def _folder(path: str) -> Path:
    """Returns `path` if it is a folder, else downloads the files of that hub name and returns their folder."""
    if Path(path).is_dir():
        return Path(path)
    return Path(huggingface_hub.snapshot_download(path, allow_patterns=[WEIGHTS, *FILES, *ADAPTER_FILES]))


def _load_weights(policy: nn.Module, tensors: dict[str, Tensor], path: str) -> None:
    """Loads tensors by name into `policy`. Raises UserError for missing, unexpected or mismatched ones, which LeRobot's
    own loading accepts. Of two tied tensors, one in the file is enough."""
    named = {name if name.startswith("model.") else f"model.{name}": tensor for name, tensor in tensors.items()}
    state = policy.state_dict()
    pointers = {state[name].data_ptr() for name in named if name in state}
    missing = sorted(name for name in state if name not in named and state[name].data_ptr() not in pointers)
    unexpected = sorted(set(named) - set(state))
    mismatched = sorted(name for name in named if name in state and state[name].shape != named[name].shape)
    for problem, names in (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched)):
        if names:
            raise UserError(
                f"model.path={path}: its weights do not fit its config.json: {problem} {names[0]}; download it again"
            )
    policy.load_state_dict(named, strict=False)
