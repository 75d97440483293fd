"""Base classes of model families that wrap a diffusers pipeline. The components of the pipeline encode prompts and
decode latents; of its scheduler only the noise levels are used."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from einops import rearrange
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.embeddings import Embeddings
from mmrl.policies.diffusion.families.autoencoders import ImageAutoencoder
from mmrl.policies.diffusion.families.components import DiffusersPipeline, PipelineParts, TextEmbeddingCache
from mmrl.policies.diffusion.families.schedules import (
    SCHEDULE,
    SPACING,
    FlowSchedules,
    NoiseSchedules,
    SupportedSchedules,
)
from mmrl.policies.diffusion.family import Condition, ConditionInputs, ModelNotes, Resolution, Shape
from mmrl.policies.models import NetworkCall
from mmrl.samplers.settings import Space
from mmrl.samplers.sigmas import Grid, ddim_grid, dynamic_shift, shift_towards_noise

PACKED, UNPACKED = "n c (h p) (w q) -> n (h w) (c p q)", "n (h w) (c p q) -> n c (h p) (w q)"


class PipelineOptions(TypedDict, total=False):
    """Keyword arguments of `Pipeline`."""

    lora: bool
    text_tokens: int | None
    encoders_stay: bool


class Pipeline(ABC):
    """A family that wraps a diffusers pipeline. Implements `mmrl.policies.diffusion.family.Family`.

    The network runs in the dtype of its weights; latents, times and predictions are fp32. Text encoders and VAE are
    on the CPU, and on the network's device while they run.
    """

    space: Space
    trained: ClassVar[str]  # the component that is trained
    encoders: ClassVar[tuple[str, ...]]
    condition_parts: ClassVar[tuple[str, ...]] = ()  # further components that encode conditions: the VAE, for editing
    optional: ClassVar[tuple[str, ...]] = ()  # encoders that a folder may lack
    patch: ClassVar[int] = 2  # side of the network's patches; sides of latents are multiples of it
    packed: ClassVar[bool] = False  # the network takes patches [n, token, channel] in place of latents
    autoencoder_kind: ClassVar[type[ImageAutoencoder]] = ImageAutoencoder
    # The text encoder with the largest token limit, and its default limit; None: encoders have a fixed limit
    longest: ClassVar[tuple[str, int] | None] = None
    schedules: ClassVar[SupportedSchedules]
    pipeline_class: ClassVar[type[DiffusionPipeline] | None] = None  # None: the class in model_index.json
    norm_patch: int | None = None

    def __init__(
        self,
        pipe: DiffusersPipeline,
        base: str,
        *,
        lora: bool = False,
        text_tokens: int | None = None,
        encoders_stay: bool = False,
    ) -> None:
        """base: folder or hub name of the pipeline; it is saved beside a LoRA. lora: the network has a LoRA, and only
        that is trained and saved. text_tokens: token limit of prompts; None: the default. encoders_stay: text encoders
        stay on the device. Raises UserError for `text_tokens` if the token limit is fixed.
        """
        self.pipe = pipe
        self.base = base
        self.lora = lora
        self.encoders_stay = encoders_stay
        self.embeddings: Embeddings | None = None  # conditions from disk, in place of the encoders
        self.text_cache = TextEmbeddingCache(self._encode)
        self.parts = PipelineParts(pipe, self.trained)
        self.module = self.parts.module
        self.autoencoder = self.autoencoder_kind(self.parts)
        if text_tokens is not None and self.longest is None:
            raise UserError(
                f"model.text_tokens={text_tokens}: the token limit of {type(pipe).__name__} is fixed; leave it out"
            )
        # longest[1]: the default token limit; `longest` is None if the limit is fixed
        self.text_tokens = text_tokens if text_tokens is not None or self.longest is None else self.longest[1]

    @property
    def notes(self) -> ModelNotes:
        """Notes for the user; none by default."""
        return ModelNotes()

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.parts.device

    def latent_shape(self, resolution: Resolution, frames: int | None = None) -> Shape:
        """Returns [channel, height, width] of latents. Raises UserError unless `resolution` is a multiple of the VAE's
        compression times the network's patch size."""
        if frames is not None:
            raise UserError(f"denoising.frames={frames}, but {type(self.pipe).__name__} generates images; leave it out")
        scale = self.pipe.vae_scale_factor
        channels = self.module.config.in_channels // (self.patch**2 if self.packed else 1)
        side = self.default_side()
        height, width = checked_sides(resolution, (side, side), scale * self.patch)
        check_position_table(self.position_table(), (height, width), scale, type(self.pipe).__name__)
        return channels, height // scale, width // scale

    def position_table(self) -> int | None:
        """Returns the largest side of latents for which the network has position embeddings; None: there is no
        limit."""
        return None

    def default_side(self) -> int:
        """Returns the side of an image, in pixels, if denoising.resolution is not set."""
        side = self.pipe.default_sample_size if self.packed else self.module.config.sample_size
        return int(side * self.pipe.vae_scale_factor)

    @abstractmethod
    def grid(self, steps: int, shape: Shape) -> Grid: ...

    @abstractmethod
    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]: ...

    # --- conditions ---

    @torch.no_grad()
    def encode(self, inputs: Sequence[ConditionInputs], shape: Shape = ()) -> list[Condition]:
        """Encodes prompts one by one, so that an embedding does not depend on the batch; see `Family.encode`. Raises
        UserError for images if the model takes none, and for prompts that are missing in model.embeddings."""
        if self.embeddings is not None:
            conditions = self.embeddings.find(inputs, shape)
            return [{key: value.to(self.device) for key, value in condition.items()} for condition in conditions]
        with self.parts.visiting(*self.encoders, *self.condition_parts, stay=self.encoders_stay):
            encoded = (self._condition(item, shape) for item in inputs)
            return [{key: value[0].to(self.device) for key, value in condition.items()} for condition in encoded]

    def _condition(self, inputs: ConditionInputs, shape: Shape) -> dict[str, Tensor]:
        """Returns the condition of one prompt, with a batch dimension of 1."""
        if inputs.images:
            raise UserError(
                f"prompt {inputs.text!r} has an image, but {type(self.pipe).__name__} takes only text; take an editing "
                "model, such as FLUX.1-Kontext"
            )
        return self._encode(inputs.text)

    def meta_condition(self, shape: Shape) -> Condition:
        """Returns a condition of the largest size on the meta device, for memory estimates. shape: the shape of the
        latents."""
        condition = {name: torch.empty(size, device="meta") for name, size in self._sizes().items()}
        if self.condition_parts:  # an edit pipeline: the VAE encodes the source image to latents of the same shape
            condition["source"] = torch.empty(shape, device="meta")
        return condition

    @abstractmethod
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the largest shapes of the tensors of a condition by name, without the image to edit."""

    @abstractmethod
    def _encode(self, text: str) -> dict[str, Tensor]:
        """Returns the embeddings of one text by name, with a batch dimension of 1."""

    def truncated_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text beyond the largest token limit among the encoders, which are cut
        off."""
        if self.embeddings is not None:
            return 0  # mmrl embed has logged a warning
        if self.longest is None:
            limit, tokenizer = self.pipe.tokenizer.model_max_length, self.pipe.tokenizer
        else:
            # longest[0]: the text encoder with the largest limit
            tokenizer = self.pipe.components[self.longest[0].replace("text_encoder", "tokenizer")]
            limit = self.text_tokens
        if tokenizer is None:  # the pipeline lacks this optional encoder; the others have a fixed limit
            tokenizer = self.pipe.tokenizer
            limit = tokenizer.model_max_length
        return max(0, len(tokenizer(self._encoder_text(text), verbose=False).input_ids) - limit)

    def _encoder_text(self, text: str) -> str:
        """Returns the text that counts against the token limit: with a chat template, if the pipeline adds one."""
        return text

    @property
    def _limit(self) -> dict[str, int | None]:
        """Returns the keyword arguments of `encode_prompt` that set the token limit."""
        return {"max_sequence_length": self.text_tokens}

    # --- the network ---

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Predicts the velocity or noise of latents x; see `Family.predict`. Networks of packed models get patches as
        tokens; the patches of the image to edit, if there is one, come last."""
        dtype = next(self.module.parameters()).dtype
        texts = in_rows(conditions, lambda distinct: self._texts(distinct, x.device, dtype))
        height, width = x.shape[-2:]
        inputs = self._inputs(time, texts, (height, width), guidance)
        if not self.packed:
            (out,) = model(x.to(dtype), **inputs, return_dict=False)
            return out.float()
        sizes = {"h": height // self.patch, "p": self.patch, "q": self.patch}
        tokens = [rearrange(part, PACKED, **sizes) for part in (x, texts.get("source")) if part is not None]
        (out,) = model(torch.cat(tokens, 1).to(dtype), **inputs, return_dict=False)
        out = out[:, : tokens[0].shape[1]]  # without the outputs at the tokens of the image to edit
        return rearrange(out, UNPACKED, **sizes).float()

    def _texts(self, conditions: Sequence[Condition], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stacks conditions to inputs of the network, [condition, ...]."""
        texts = {key: torch.stack([c[key] for c in conditions]).to(device) for key in conditions[0]}
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in texts.items()}

    @abstractmethod
    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. texts: stacked conditions. size: height and width of
        the latents."""

    # --- images ---

    def decode(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents)

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode_with_gradient(latents)

    def to_latents(self, pixels: Tensor) -> Tensor:
        return self.autoencoder.encode(pixels)

    def _pixels(self, shape: Shape) -> tuple[int, int]:
        """Returns height and width, in pixels, of the image that latents of `shape` decode to."""
        return shape[-2] * self.pipe.vae_scale_factor, shape[-1] * self.pipe.vae_scale_factor

    def _source(self, inputs: ConditionInputs, shape: Shape) -> Tensor:
        """Encodes the image to edit to latents [1, ...]. Raises UserError unless the prompt has exactly one image, of
        the size that is generated."""
        height, width = self._pixels(shape)
        size = (width, height)  # the order of PIL
        if len(inputs.images) != 1:
            raise UserError(
                f"prompt {inputs.text!r} has {len(inputs.images)} images, but editing needs exactly one; name its "
                "column in task.data.image_field"
            )
        (image,) = inputs.images
        if image.size != size:
            raise UserError(
                f"prompt {inputs.text!r}: its image has {image.width} x {image.height} pixels, but "
                f"denoising.resolution is {size[0]} x {size[1]}; resize the image, or change the resolution"
            )
        mode = "L" if self.pipe.vae.config.get("in_channels", 3) == 1 else "RGB"
        pixels = torch.from_numpy(np.array(image.convert(mode))).float() / 255
        # a grey image gets a dimension for its one channel
        return self.to_latents(rearrange(pixels.view(*pixels.shape[:2], -1), "h w c -> 1 c h w"))

    # --- files ---

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the LoRA for `pipe.load_lora_weights(folder)`, or else the full pipeline for
        `DiffusionPipeline.from_pretrained(folder)`. state: the gathered state dict of `module`."""
        if self.lora:
            self.parts.save_adapter(folder, state, self.base)
        else:
            self.parts.save_whole(folder, state)


class FlowPipeline(Pipeline):
    """A rectified flow (arXiv 2209.03003): the network predicts noise - data."""

    space = "velocity"
    trained = "transformer"
    schedules = FlowSchedules()

    def grid(self, steps: int, shape: Shape) -> Grid:
        """Returns the noise levels of the scheduler for the sigmas 1, 1 - 1/steps, ..., 1/steps.

        The pipelines of FLUX and Qwen-Image use the same levels. The pipeline of Stable Diffusion 3 applies the shift
        twice, which nearly wastes its last step (from 0.009, with 10 steps and shift 3); here it is applied once.
        Raises UserError for too few steps.
        """
        config = self.pipe.scheduler.config
        if steps < 1 or (steps == 1 and config.shift_terminal):
            raise UserError(
                f"denoising.steps or denoising.evaluation_steps is {steps}, too few for the scheduler of model.path; "
                f"set it to at least {2 if config.shift_terminal else 1}"
            )
        tokens = math.prod(shape[1:]) // self.patch**2
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=self._mu(tokens, steps))
        return Grid(scheduler.sigmas, scheduler.timesteps)

    def _mu(self, tokens: int, steps: int) -> float:
        """Returns mu, the logarithm of the shift of a scheduler with dynamic shifting, for `tokens` image tokens."""
        config = self.pipe.scheduler.config
        return math.log(
            dynamic_shift(
                tokens,
                base_tokens=config.base_image_seq_len,
                max_tokens=config.max_image_seq_len,
                base_shift=config.base_shift,
                max_shift=config.max_shift,
            )
        )

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Maps uniform numbers [n] in (0, 1) to noise levels by the scheduler's shift if it is fixed; a shift that
        depends on the image size is not applied. Returns noise levels and timesteps, [n] each."""
        config = self.pipe.scheduler.config
        sigma = uniform if config.use_dynamic_shifting else shift_towards_noise(uniform, config.shift)
        return sigma, config.num_train_timesteps * sigma


class NoisePipeline(Pipeline):
    """A network that predicts noise at the timesteps of its training schedule; sampling is DDIM (arXiv 2010.02502)."""

    space = "noise"
    trained = "unet"
    patch = 1
    schedules = NoiseSchedules()

    def __init__(self, pipe: DiffusersPipeline, base: str, **options: Unpack[PipelineOptions]) -> None:
        """Builds the DDIM scheduler, which computes noise levels, from the settings of the pipeline's scheduler."""
        super().__init__(pipe, base, **options)
        # Not DDIMScheduler.from_config: for keys that the scheduler's file lacks it would take the defaults of DDIM,
        # not of the scheduler's own class
        config = pipe.scheduler.config
        # False for Stable Diffusion 1.5; a scheduler without the key ends at noise level 0
        set_alpha_to_one = config.get("set_alpha_to_one", True)
        schedule = {key: config[key] for key in (*SCHEDULE, *SPACING)}
        self._ddim: Any = DDIMScheduler(**schedule, set_alpha_to_one=set_alpha_to_one)

    def grid(self, steps: int, shape: Shape) -> Grid:
        """Returns the noise levels of DDIM with this pipeline's spacing and offset.

        The last level is 0 (data). With set_alpha_to_one=false in the scheduler it is the level of the first training
        timestep, as in DDPO (arXiv 2305.13301), except if DDIM's last timestep is already the first training timestep:
        the last step would then change nothing.
        """
        self._ddim.set_timesteps(steps)
        # alphas_cumprod of the last level; 1: no noise
        last = float(self._ddim.final_alpha_cumprod) if self._ddim.timesteps[-1] > 0 else 1.0
        return ddim_grid(self._ddim.alphas_cumprod, self._ddim.timesteps, last)

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Maps uniform numbers [n] in (0, 1) to timesteps of the network's training. Returns their noise levels, sqrt(1
        - alphas_cumprod), and the timesteps, [n] each."""
        alphas = self._ddim.alphas_cumprod.to(uniform.device)
        index = (uniform * len(alphas)).long().clamp(max=len(alphas) - 1)  # a number near 1 may round up to it
        return (1 - alphas.double()[index]).sqrt(), index.float()


def in_rows(
    conditions: Sequence[Condition], batch: Callable[[list[Condition]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Returns the inputs of the network for one condition per row. batch: stacks conditions; it gets each distinct
    object once. Rows that share a condition get the same values."""
    indices: dict[int, int] = {}
    distinct: list[Condition] = []
    for condition in conditions:
        if id(condition) not in indices:
            indices[id(condition)] = len(distinct)
            distinct.append(condition)
    texts = batch(distinct)
    if len(distinct) == len(conditions):
        return texts
    index = torch.tensor([indices[id(condition)] for condition in conditions])
    return {key: value[index.to(value.device)] for key, value in texts.items()}


def checked_sides(resolution: Resolution, default: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Returns height and width of `resolution`, in pixels. default: height and width for None. Raises UserError unless
    both are multiples of `multiple`."""
    sides = default if resolution is None else (resolution, resolution) if isinstance(resolution, int) else resolution
    for side in sides:
        if side < 1 or side % multiple:
            raise UserError(
                f"denoising.resolution: resolution {side} is not a multiple of {multiple}, as the model at model.path "
                f"needs; set it to {max(1, side // multiple) * multiple}, for example"
            )
    return sides


def check_position_table(max_positions: int | None, sides: tuple[int, int], pixels: int, name: str) -> None:
    """Raises UserError if sides (pixels) are larger than the position embeddings of the network allow.

    max_positions: largest number of positions along a side; None: no limit. pixels: number of pixels of one position,
    along a side. name: class of the pipeline, for the message.
    """
    if max_positions is not None and max(sides) > max_positions * pixels:
        raise UserError(
            f"denoising.resolution: resolution {max(sides)} is beyond the position embeddings of {name}, which end at "
            f"{max_positions * pixels} pixels per side; lower it"
        )
