"""OpenVLA (arXiv 2406.09246) and OpenVLA-OFT (arXiv 2502.19645), from folders or hub names as they are published.

Files and names of parameters are those of the published checkpoints, so that saved models can be read by OpenVLA's
code. No code of a checkpoint is run, and nothing is unpickled: `mmrl.policies.vla.backbones.checkpoint_conversion`
converts parts that are published as pickles.
"""

from __future__ import annotations

import fnmatch
import functools
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import numpy as np
import timm
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image
from timm.layers.layer_scale import LayerScale
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from mmrl.errors import UserError
from mmrl.generation.transformers import Prefix, positions
from mmrl.policies.models import write_model
from mmrl.policies.vla.backbones import oft
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.heads.codec import StateQuantiles
from mmrl.policies.vla.heads.gaussian_settings import L1Actions
from mmrl.policies.vla.heads.head import EncodedPrefix, Head
from mmrl.policies.vla.settings import Actions, NormalActions, VisionLanguageActionModel
from mmrl.policies.vla.statistics import load_state_quantiles
from mmrl.policies.vlm import loading
from mmrl.policies.vlm import policy as vlm

WEIGHTS = "*.safetensors"  # pattern of the files with weights
PREPROCESSOR, TOKENIZER = "preprocessor_config.json", "tokenizer.json"
EXTRA_FILES = (  # files that are copied to saved models
    *(PREPROCESSOR, TOKENIZER, "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "dataset_statistics.json"),
)
PROMPT = "In: What action should the robot take to {}?\nOut:"
SPACE_TOKEN = 29871  # Llama's token of a single space, which stands between prompt and actions in training


class OpenVLAConfig(PreTrainedConfig):
    """The config.json of an OpenVLA model; other keys, such as norm_stats, are kept as they are."""

    model_type = "openvla"
    sub_configs = {"text_config": LlamaConfig}

    text_config: dict | LlamaConfig | None = None
    timm_model_ids: list[str] | None = None
    timm_override_act_layers: list[str | None] | None = None
    image_sizes: list[int] | None = None
    use_fused_vision_backbone: bool = True
    pad_token_id: int = 32000
    pad_to_multiple_of: int = 64  # number of rows at the end of the embeddings that belong to no token

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = LlamaConfig(**self.text_config)
        super().__post_init__(**kwargs)


class OpenVLALayerScale(nn.Module):
    """timm's LayerScale, with its parameter named as in OpenVLA's files."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class VisionBackbone(nn.Module):
    """One or two vision transformers of timm. For each patch, the features of their next-to-last layers are
    concatenated."""

    def __init__(self, config: OpenVLAConfig) -> None:
        """Builds the vision transformers that `config` names; calling one returns the patch features of its
        next-to-last layer, in a list of one."""
        super().__init__()
        assert config.timm_model_ids and config.timm_override_act_layers and config.image_sizes
        self.names = ("featurizer", "fused_featurizer") if config.use_fused_vision_backbone else ("featurizer",)
        self.width = 0
        for i, name in enumerate(self.names):
            vit: Any = timm.create_model(
                config.timm_model_ids[i],
                pretrained=False,
                num_classes=0,
                img_size=config.image_sizes[i],
                act_layer=config.timm_override_act_layers[i],
            )
            # replaced only because its parameter has another name in OpenVLA's files
            for module in list(vit.modules()):
                for child, scale in module.named_children():
                    if isinstance(scale, LayerScale):
                        module.add_module(child, OpenVLALayerScale(len(scale.gamma)))
            # Set as its forward, so that hooks of the module's call (ZeRO-3) run.
            vit.forward = functools.partial(
                vit.forward_intermediates,
                indices=[len(vit.blocks) - 2],  # the next-to-last layer
                output_fmt="NLC",
                intermediates_only=True,
                stop_early=True,
            )
            self.add_module(name, vit)
            self.width += vit.embed_dim

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Returns patch features [n, camera x patch, width], camera by camera as in OpenVLA-OFT. images: for each
        vision transformer [n, camera, 3, size, size]."""
        features = []
        for name, pixels in zip(self.names, images, strict=True):
            features.append(self.get_submodule(name)(pixels.flatten(0, 1))[0])
        patches = torch.cat(features, 2)
        return rearrange(patches, "(n c) p w -> n (c p) w", c=images[0].shape[1])


class Projector(nn.Module):
    """Projects patch features to the width of the language model."""

    def __init__(self, vision_width: int, language_width: int, fused: bool) -> None:
        """fused: whether there are two vision transformers."""
        super().__init__()
        hidden_width = 4 * vision_width if fused else language_width
        self.fc1, self.fc2 = nn.Linear(vision_width, hidden_width), nn.Linear(hidden_width, language_width)
        self.fc3 = nn.Linear(language_width, language_width) if fused else None
        self.act = nn.GELU()

    def forward(self, patches: Tensor) -> Tensor:
        h = self.fc2(self.act(self.fc1(patches)))
        return h if self.fc3 is None else self.fc3(self.act(h))


class OpenVLAForActionPrediction(PreTrainedModel):
    """A Llama whose prompt has projected image patches behind its first token."""

    config_class = OpenVLAConfig
    config: OpenVLAConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = True

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        assert isinstance(config.text_config, LlamaConfig)
        self.vision_backbone = VisionBackbone(config)
        language_width = config.text_config.hidden_size
        self.projector = Projector(self.vision_backbone.width, language_width, config.use_fused_vision_backbone)
        self.language_model = LlamaForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def embed(
        self, ids: Tensor, mask: Tensor, images: Sequence[Tensor], state: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns the Llama's inputs, "inputs_embeds" and "attention_mask". ids, mask: [n, token]; images: as for
        `VisionBackbone`; state: the embedded robot state [n, 1, width], which follows the patches."""
        patches = self.projector(self.vision_backbone(images))
        patches = patches if state is None else torch.cat([patches, state.to(patches.dtype)], 1)
        tokens = self.get_input_embeddings()(ids)
        patch_mask = mask.new_ones(patches.shape[:2])
        return {
            "inputs_embeds": torch.cat([tokens[:, :1], patches, tokens[:, 1:]], 1),
            "attention_mask": torch.cat([mask[:, :1], patch_mask, mask[:, 1:]], 1),
        }


@dataclass(frozen=True)
class OpenVLAObservation:
    """A preprocessed observation."""

    images: Tensor  # [camera, 3, size, size] uint8
    ids: Tensor  # [token] int64
    state: Tensor  # [state], normalised; empty if the model does not read the state


@dataclass(frozen=True)
class ObservationPreprocessing:
    """Settings of preprocessing and encoding of observations."""

    bidirectional: bool  # True: prompt and actions are encoded in one pass as in OpenVLA-OFT, see `BidirectionalPrefix`
    crop: float = 1.0  # share of an image's area that the center crop keeps
    resize_as_in_training: bool = False  # True: images are resized by the function of this name
    states: StateQuantiles | None = None  # normalises the robot's state; None: the state is not read


class OpenVLABackbone(Backbone):
    """The backbone of OpenVLA and OpenVLA-OFT."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        extra_files: dict[str, bytes],
        max_prompt_length: int,
        preprocessing: ObservationPreprocessing,
        parts: oft.PartFiles,
    ) -> None:
        """extra_files: contents of the files that `save` copies, by name. parts: checked files of OpenVLA-OFT; the
        state projector is loaded here, the L1 head by `l1_head`."""
        super().__init__()
        self.model, self.tokenizer, self.extra_files = model, tokenizer, extra_files
        self.max_prompt_length, self.preprocessing, self.head_file = max_prompt_length, preprocessing, parts.head
        config = self.unwrapped.config
        assert isinstance(config.text_config, LlamaConfig)
        self.width: int = config.text_config.hidden_size
        # without the ids at the end that only pad the vocabulary
        self.vocabulary: int = config.text_config.vocab_size - config.pad_to_multiple_of
        self.pad, self.end = config.pad_token_id, config.text_config.eos_token_id
        image_config = json.loads(extra_files[PREPROCESSOR])
        if image_config["image_resize_strategy"] != "resize-naive" or len(set(image_config["interpolations"])) > 1:
            raise UserError(
                f"the model's {PREPROCESSOR} asks for "
                f"image_resize_strategy={image_config['image_resize_strategy']} and "
                f"interpolations={image_config['interpolations']}; only resize-naive with one interpolation for all is "
                "supported"
            )
        if len({tuple(size) for size in image_config["input_sizes"]}) > 1:
            raise UserError(
                f"the model's {PREPROCESSOR} asks for images of several sizes, {image_config['input_sizes']}; only one "
                "is supported"
            )
        self.size, self.resampling = (
            image_config["input_sizes"][0][1:],  # height and width, after the number of channels
            Image.Resampling[image_config["interpolations"][0].upper()],
        )
        for name in ("mean", "std"):  # [vision transformer, 3]
            self.register_buffer(name, torch.tensor(image_config[name + "s"], dtype=torch.float32), persistent=False)
        self.proprio: oft.ProprioProjector | None = None
        if parts.projector is not None:
            assert preprocessing.states is not None
            self.proprio = oft.ProprioProjector(self.width, len(preprocessing.states.q01))
            oft.read_into(self.proprio, parts.projector)
        self.reads_state = self.proprio is not None

    @property
    def unwrapped(self) -> OpenVLAForActionPrediction:
        """The model without peft's wrapper."""
        model = vlm.transformers_model(self.model)
        assert isinstance(model, OpenVLAForActionPrediction)
        return model

    @property
    def input_embeddings(self) -> nn.Module:
        return self.unwrapped.get_input_embeddings()

    @property
    def output_weight(self) -> Tensor:
        return self.unwrapped.get_output_embeddings().weight  # type: ignore[return-value]

    def format_prompt(self, instruction: str) -> str:
        return PROMPT.format(instruction.lower())

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[OpenVLAObservation]:
        """Preprocesses observations. Raises UserError for a prompt longer than `max_prompt_length`."""
        quantiles = self.preprocessing.states
        # [:, :0]: without quantiles the state is not read, and rows hold an empty one
        states = torch.from_numpy(state[:, :0].copy() if quantiles is None else quantiles.normalize(state))
        rows = []
        for *cameras, text, row_state in zip(*images, texts, states, strict=True):
            pixels = torch.stack([self._resize(image) for image in cameras])
            rows.append(OpenVLAObservation(pixels, self._ids(text, len(cameras)), row_state))
        return rows

    def collate(self, rows: Sequence[OpenVLAObservation], device: torch.device) -> dict[str, Tensor]:
        """Stacks rows of `prepare` to the inputs of `encode`; token ids are padded on the right."""
        ids = [row.ids for row in rows]
        batch = {
            "ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad),
            "mask": nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
            "images": torch.stack([row.images for row in rows]),
            "state": torch.stack([row.state for row in rows]),
        }
        return {name: value.to(device) for name, value in batch.items()}

    def encode(self, inputs: dict[str, Tensor], *, every_layer: bool) -> EncodedPrefix:
        """Encodes images, prompt and state. Returns a `BidirectionalPrefix` for OpenVLA-OFT, else a cached `Prefix`."""
        model = self.unwrapped
        pixels = inputs["images"].float() / 255
        mean, std = (part[:, None, None, :, None, None].float() for part in (self.mean, self.std))
        # For each vision transformer [n, camera, 3, size, size]
        images = ((pixels - mean) / std).to(model.dtype).unbind(0)
        state = None if self.proprio is None else self.proprio(inputs["state"])
        embedded = model.embed(inputs["ids"], inputs["mask"], images, state)
        if self.preprocessing.bidirectional:
            end = self.input_embeddings(torch.tensor([self.end], device=model.device))
            return cast(EncodedPrefix, BidirectionalPrefix(model.language_model, embedded, end))
        return Prefix(model.language_model, embedded, every_layer=every_layer)

    def l1_head(self, settings: NormalActions, action: Actions, action_dim: int) -> Head:
        """Builds OpenVLA-OFT's L1 regression head with the weights of the checkpoint. `load` has checked that their
        file exists and fits."""
        assert self.head_file is not None
        head = oft.L1Head(settings, action, action_dim, self.width)
        oft.read_into(head, self.head_file)
        return head

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the model (or its LoRA), copies of its other files, and the state projector if there is one."""
        write_model(self.model, folder, state)
        for name, content in self.extra_files.items():
            (folder / name).write_bytes(content)
        if projector := {n.removeprefix("proprio."): t for n, t in state.items() if n.startswith("proprio.")}:
            oft.write("proprio_projector", folder, projector, {})

    def _resize(self, image: NDArray[np.uint8]) -> Tensor:
        """Resizes an image [h, w, 3] to the model's size and crops it: [3, height, width] uint8."""
        height, width = self.size
        if self.preprocessing.resize_as_in_training:
            resized = resize_as_in_training(image, height, width)
        else:
            resized = np.asarray(Image.fromarray(image).resize((width, height), self.resampling))
        return torch.from_numpy(center_crop(resized, self.preprocessing.crop).transpose(2, 0, 1).copy())

    def _ids(self, text: str, cameras: int) -> Tensor:
        """Tokenizes a prompt, [token] int64, and appends the space that precedes actions if it is missing. cameras: the
        number of images. Raises UserError if prompt and image patches are longer than `max_prompt_length`."""
        ids = self.tokenizer.encode(text).ids
        if ids[-1] != SPACE_TOKEN:
            ids = [*ids, SPACE_TOKEN]
        vit: Any = self.unwrapped.vision_backbone.get_submodule("featurizer")
        length = len(ids) + cameras * vit.patch_embed.num_patches + self.reads_state  # the state is one token
        if length > self.max_prompt_length:
            images = "its image" if cameras == 1 else f"its {cameras} images"
            raise UserError(
                f"the prompt {text!r} and {images} have {length} tokens, more than rollout.max_prompt_length="
                f"{self.max_prompt_length}; raise it"
            )
        return torch.tensor(ids)


class BidirectionalPrefix:
    """Prompts that are encoded together with the tokens that follow, under bidirectional attention, as OpenVLA-OFT was
    trained. So keys and values cannot be cached. `hidden` and `last` are hidden states of the prompt encoded alone."""

    layers: tuple[Tensor, ...] = ()

    def __init__(self, model: LlamaForCausalLM, inputs: dict[str, Tensor], end: Tensor) -> None:
        """inputs: "inputs_embeds" [n, token, width] and "attention_mask" [n, token], padded on the right; end: the
        end token's embedding [1, width]."""
        self.model, self.inputs, self.end = model, inputs, end
        self.mask = inputs["attention_mask"]
        position_ids = positions(model, inputs)
        self.position_ids, self.length = position_ids, self.mask.sum(1)

    @functools.cached_property
    def hidden(self) -> Tensor:
        return self._forward(self.inputs["inputs_embeds"], self.mask, self.position_ids)

    @functools.cached_property
    def last(self) -> Tensor:
        return self._last(self.hidden)

    def encode_with(self, tokens: Tensor) -> Tensor:
        """Encodes prompts, followed by embeddings `tokens` [n, t, width] and an end token. Returns the last hidden
        states of each prompt's last token and of `tokens`, [n, 1 + t, width]."""
        n, t = tokens.shape[:2]
        prompt = self.inputs["inputs_embeds"]
        suffix = torch.cat([tokens.to(prompt.dtype), self.end.expand(n, 1, -1)], 1)
        mask = torch.cat([self.mask, self.mask.new_ones(n, t + 1)], 1)
        position_ids = torch.cat(
            [self.position_ids, self.length[:, None] + torch.arange(t + 1, device=tokens.device)], 1
        )
        hidden = self._forward(torch.cat([prompt, suffix], 1), mask, position_ids)
        return torch.cat([self._last(hidden)[:, None], hidden[:, prompt.shape[1] : -1]], 1)

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError(
            "under bidirectional attention keys and values of a prompt cannot be cached; use encode_with"
        )

    def _last(self, hidden: Tensor) -> Tensor:
        """Selects the hidden states of each prompt's last token, [n, width]."""
        return hidden[torch.arange(len(hidden), device=hidden.device), self.length - 1]

    def _forward(self, embeddings: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Computes last hidden states [n, token, width]. embeddings: [n, token, width]; mask: [n, token], 0 at padding;
        position_ids: [n, token]."""
        # Every position attends to all positions that are not padding.
        attention_bias = (1 - mask[:, None, None, :].to(embeddings.dtype)) * torch.finfo(embeddings.dtype).min
        output = self.model.base_model(
            inputs_embeds=embeddings,
            attention_mask=attention_bias.expand(-1, 1, embeddings.shape[1], -1),
            position_ids=position_ids,
            use_cache=False,
        )
        return output.last_hidden_state


def load(
    path: str, settings: VisionLanguageActionModel, action: Actions, max_prompt_length: int, sizes: tuple[int, int]
) -> OpenVLABackbone:
    """Loads OpenVLA or OpenVLA-OFT from a folder or a hub name; if `path` is a LoRA, its base model with the LoRA.

    sizes: the action size, and the size of the state that the policy may read. Raises UserError for a file, tensor or
    option that does not fit, before weights are read where possible."""
    if settings.processor:
        raise UserError(f"model.processor.{next(iter(settings.processor))} is not for OpenVLA; remove it")
    if action.head.bidirectional and settings.attention == "flash_attention_2":
        key = "type=l1" if isinstance(action.head.checkpoint_head, L1Actions) else "decoding=bidirectional"
        raise UserError(
            f"model.attention={settings.attention} does not support bidirectional attention, which action.head.{key} "
            "needs; set it to sdpa or eager"
        )
    folder = _folder(loading.base_of(path))
    extra_files = {name: (folder / name).read_bytes() for name in EXTRA_FILES if (folder / name).is_file()}
    missing = next((name for name in (PREPROCESSOR, TOKENIZER) if name not in extra_files), None)
    if missing is not None:
        raise UserError(f"model.path={path}: {folder / missing} is missing; copy it from the published checkpoint")
    parts = oft.find_files([Path(path), folder])
    config: Any = OpenVLAConfig.from_pretrained(folder)
    parts.check(path, action, (config.text_config.hidden_size, *sizes))
    states = None
    if parts.projector is not None:
        assert action.statistics is not None
        states = load_state_quantiles(action.statistics, action.statistics_key, sizes[1], action.normalisation)
    preprocessing = ObservationPreprocessing(
        action.head.bidirectional, action.center_crop, action.resize == "openvla", states
    )
    model: Any = _load_model(folder, settings.dtype, settings.attention)
    model = loading.adapt(model, path, freeze=settings.freeze, lora=settings.lora)
    tokenizer = Tokenizer.from_str(extra_files[TOKENIZER].decode())
    backbone = OpenVLABackbone(model, tokenizer, extra_files, max_prompt_length, preprocessing, parts)
    if backbone.proprio is not None and "connector" in settings.freeze:
        backbone.proprio.requires_grad_(False)
    return backbone


def resize_as_in_training(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resizes an image [h, w, 3] as OpenVLA's LIBERO data and evaluations do: JPEG compression (TensorFlow's
    encode_jpeg: quality 95, chroma subsampling 4:2:0), then TensorFlow's antialiased lanczos3, rounded once at the
    end."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
    decoded = np.asarray(Image.open(file)).astype(np.float32)
    channels = [Image.fromarray(decoded[..., c]).resize((width, height), Image.Resampling.LANCZOS) for c in range(3)]
    return np.stack([np.asarray(channel) for channel in channels], -1).round().clip(0, 255).astype(np.uint8)


def center_crop(image: NDArray[np.uint8], area: float) -> NDArray[np.uint8]:
    """Crops the center of an image [height, width, 3] to the share `area` of its area and resizes it back, as OpenVLA's
    evaluation does: TensorFlow's crop_and_resize (bilinear, corners aligned) and conversion to bytes."""
    if area == 1:
        return image
    side = np.float32(np.sqrt(area))

    def interpolate(values: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
        """Crops and resizes one axis of `values` [height, width, 3] by linear interpolation."""
        n = values.shape[axis]
        position = (1 - side) / 2 * np.float32(n - 1) + np.arange(n, dtype=np.float32) * side
        fraction = np.expand_dims(position - np.floor(position), tuple(i for i in range(3) if i != axis))
        index = position.astype(int)
        lower, upper = values.take(index, axis), values.take(np.minimum(index + 1, n - 1), axis)
        return lower + (upper - lower) * fraction

    cropped = interpolate(interpolate(image.astype(np.float32) / np.float32(255), 1), 0)
    # TensorFlow's conversion to bytes: 255.5 and truncation in place of 255 and rounding
    return (cropped.clip(0, 1) * np.float32(255.5)).astype(np.uint8)


def _folder(path: str) -> Path:
    """Returns `path` if it is a folder, else downloads the model of that hub name and returns its folder. Raises
    UserError if there are no weights in safetensors."""
    if Path(path).is_dir():
        folder, names = Path(path), [file.name for file in Path(path).iterdir()]
    else:
        names = huggingface_hub.list_repo_files(path)
        folder = Path(huggingface_hub.snapshot_download(path, allow_patterns=["config.json", WEIGHTS, *EXTRA_FILES]))
    oft.check_readable(path, names)
    if not set(fnmatch.filter(names, WEIGHTS)) - set(oft.FILES.values()):
        raise UserError(
            f"model.path={path} has no {WEIGHTS}; convert its weights to safetensors, since pickles are never opened"
        )
    return folder


def _load_model(folder: Path, dtype: str, attention: str) -> OpenVLAForActionPrediction:
    """Loads the OpenVLA model. Raises UserError for missing, unexpected and mismatched weights."""
    model_class: Any = OpenVLAForActionPrediction
    model, report = model_class.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=attention,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are reported below
        output_loading_info=True,
    )
    for problem in ("missing", "unexpected", "mismatched"):
        keys = sorted(key if isinstance(key, str) else key[0] for key in report[f"{problem}_keys"])
        if keys:
            raise UserError(
                f"model.path={folder}: its weights do not fit its config.json: {problem} {keys[0]}; download it again"
            )
    return model
