"""Base classes of families that are diffusers pipelines. The pipeline's components encode prompts and decode latents;
its scheduler only provides the noise levels."""

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
from mmrl.policies.diffusion.families.schedules import SCHEDULE, SPACING, FlowSchedules, NoiseSchedules, ReadSchedules
from mmrl.policies.diffusion.family import Condition, ConditionInputs, Remarks, Resolution, Shape
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
    condition_parts: ClassVar[tuple[str, ...]] = ()  # further components that conditions need: the VAE of source images
    optional: ClassVar[tuple[str, ...]] = ()  # encoders that a folder may lack
    patch: ClassVar[int] = 2  # latent sides are multiples of it
    packed: ClassVar[bool] = False  # the network takes patches [n, token, channel] instead of an image
    autoencoder_kind: ClassVar[type[ImageAutoencoder]] = ImageAutoencoder
    longest: ClassVar[tuple[str, int] | None] = None  # the encoder that reads most of a string, and its usual limit
    schedules: ClassVar[ReadSchedules]
    pipeline_class: ClassVar[type[DiffusionPipeline] | None] = None  # where that of the folder is none of diffusers'
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
        """Raises UserError for `text_tokens` where the encoders read a fixed number of tokens."""
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
                f"model.text_tokens={text_tokens}: the text encoder of {type(pipe).__name__} reads a fixed number of "
                "tokens; leave it out"
            )
        self.text_tokens = text_tokens if text_tokens is not None or self.longest is None else self.longest[1]

    @property
    def remarks(self) -> Remarks:
        return Remarks()

    @property
    def device(self) -> torch.device:
        return self.parts.device

    def latent_shape(self, resolution: Resolution, frames: int | None = None) -> Shape:
        """Returns [channel, height, width] of latents. Raises UserError unless `resolution` is a multiple of the VAE's
        compression times the network's patch size."""
        if frames is not None:
            raise UserError(f"denoising.frames={frames}: {type(self.pipe).__name__} draws images; leave it out")
        scale = self.pipe.vae_scale_factor
        channels = self.module.config.in_channels // (self.patch**2 if self.packed else 1)
        side = self.default_side()
        height, width = checked_sides(resolution, (side, side), scale * self.patch)
        within_table(self.position_table(), (height, width), scale, type(self.pipe).__name__)
        return channels, height // scale, width // scale

    def position_table(self) -> int | None:
        """Returns the largest side of latents whose positions the network knows; None where there is no limit."""
        return None

    def default_side(self) -> int:
        """Returns the side of an image in pixels where denoising.resolution is not set."""
        side = self.pipe.default_sample_size if self.packed else self.module.config.sample_size
        return int(side * self.pipe.vae_scale_factor)

    @abstractmethod
    def grid(self, steps: int, shape: Shape) -> Grid: ...

    @abstractmethod
    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]: ...

    # --- conditions ---

    @torch.no_grad()
    def encode(self, inputs: Sequence[ConditionInputs], shape: Shape = ()) -> list[Condition]:
        """Encodes prompts one by one, so that an embedding does not depend on the batch. Raises UserError for images
        where the model takes none, and for prompts that are missing in `embeddings`."""
        if self.embeddings is not None:
            conditions = self.embeddings.find(inputs, shape)
            return [{key: value.to(self.device) for key, value in condition.items()} for condition in conditions]
        with self.parts.visiting(*self.encoders, *self.condition_parts, stay=self.encoders_stay):
            encoded = (self._condition(one, shape) for one in inputs)
            return [{key: value[0].to(self.device) for key, value in condition.items()} for condition in encoded]

    def _condition(self, inputs: ConditionInputs, shape: Shape) -> dict[str, Tensor]:
        """Returns the condition of one prompt, as a batch of one."""
        if inputs.images:
            raise UserError(
                f"prompt {inputs.text!r} has an image, but {type(self.pipe).__name__} draws from words alone; an "
                "editing model, such as FLUX.1-Kontext, takes images"
            )
        return self._encode(inputs.text)

    def meta_condition(self, shape: Shape) -> Condition:
        """Returns a condition of the largest size, for latents of `shape`, on the meta device: for memory estimates."""
        condition = {name: torch.empty(size, device="meta") for name, size in self._sizes().items()}
        return {**condition, "source": torch.empty(shape, device="meta")} if self.condition_parts else condition

    @abstractmethod
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the largest shapes of a condition's tensors by name, without the source image."""

    @abstractmethod
    def _encode(self, text: str) -> dict[str, Tensor]:
        """Returns the embeddings of one text, as a batch of one."""

    def truncated_tokens(self, text: str) -> int:
        if self.embeddings is not None:
            return 0  # mmrl embed warned of them
        if self.longest is None:
            limit, tokenizer = self.pipe.tokenizer.model_max_length, self.pipe.tokenizer
        else:
            tokenizer = self.pipe.components[self.longest[0].replace("text_encoder", "tokenizer")]
            limit = self.text_tokens
        if tokenizer is None:  # the folder lacks this optional encoder: the others have a fixed limit
            tokenizer = self.pipe.tokenizer
            limit = tokenizer.model_max_length
        return max(0, len(tokenizer(self._encoder_text(text), verbose=False).input_ids) - limit)

    def _encoder_text(self, text: str) -> str:
        """Returns the text with what the pipeline adds to it and counts against the limit, such as a chat template."""
        return text

    @property
    def _limit(self) -> dict[str, int | None]:
        """Returns the keyword arguments of `encode_prompt` that set the token limit."""
        return {"max_sequence_length": self.text_tokens}

    # --- the network ---

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
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
        out = out[:, : tokens[0].shape[1]]  # outputs at the source's tokens are not used
        return rearrange(out, UNPACKED, **sizes).float()

    def _texts(self, conditions: Sequence[Condition], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stacks conditions into the network's text inputs [condition, ...]."""
        texts = {key: torch.stack([c[key] for c in conditions]).to(device) for key in conditions[0]}
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in texts.items()}

    @abstractmethod
    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the network's inputs besides the latents, whose height and width are `size`."""

    # --- images ---

    def decode(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents)

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode_with_gradient(latents)

    def to_latents(self, pixels: Tensor) -> Tensor:
        return self.autoencoder.encode(pixels)

    def _pixels(self, shape: Shape) -> tuple[int, int]:
        """Returns the height and width in pixels that latents of `shape` decode to."""
        return shape[-2] * self.pipe.vae_scale_factor, shape[-1] * self.pipe.vae_scale_factor

    def _source(self, inputs: ConditionInputs, shape: Shape) -> Tensor:
        """Encodes the prompt's source image to latents [1, ...]. Raises UserError unless there is one image, of the
        size that is drawn."""
        height, width = self._pixels(shape)
        size = (width, height)  # as PIL has it
        if len(inputs.images) != 1:
            raise UserError(
                f"prompt {inputs.text!r} has {len(inputs.images)} images; an edit needs one to start from: name its "
                "column in task.data.image_field"
            )
        (image,) = inputs.images
        if image.size != size:
            raise UserError(
                f"prompt {inputs.text!r}: its image has {image.width} x {image.height} pixels, requested are "
                f"{size[0]} x {size[1]} (denoising.resolution); resize it"
            )
        mode = "L" if self.pipe.vae.config.get("in_channels", 3) == 1 else "RGB"
        pixels = torch.from_numpy(np.array(image.convert(mode))).float() / 255
        return self.to_latents(rearrange(pixels.view(*pixels.shape[:2], -1), "h w c -> 1 c h w"))

    # --- files ---

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Writes LoRA weights for `pipe.load_lora_weights(folder)` and the base's name, or else the whole pipeline for
        `DiffusionPipeline.from_pretrained(folder)`."""
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
        """Returns the scheduler's levels from 1, 1 - 1/steps, ..., 1/steps.

        These are what the pipelines of FLUX and Qwen-Image use. Stable Diffusion 3's own call shifts twice, the second
        time an already shifted range, so that its last step is nearly wasted (0.009 for 10 steps of shift 3); here the
        shift is applied once. Raises UserError where the scheduler has no such levels.
        """
        config = self.pipe.scheduler.config
        if steps < 1 or (steps == 1 and config.shift_terminal):
            raise UserError(f"a chain of {steps} steps is too short for this model's scheduler")
        tokens = math.prod(shape[1:]) // self.patch**2
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=self._mu(tokens, steps))
        return Grid(scheduler.sigmas, scheduler.timesteps)

    def _mu(self, tokens: int, steps: int) -> float:
        """Returns the logarithm of a dynamic scheduler's shift for `tokens` image tokens."""
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
        """Applies the scheduler's shift to the draws if it is fixed, not if it depends on the image's size."""
        config = self.pipe.scheduler.config
        sigma = uniform if config.use_dynamic_shifting else shift_towards_noise(uniform, config.shift)
        return sigma, config.num_train_timesteps * sigma


class NoisePipeline(Pipeline):
    """A network that predicts noise at timesteps of a training schedule; chains are DDIM's (arXiv 2010.02502)."""

    space = "noise"
    trained = "unet"
    patch = 1
    schedules = NoiseSchedules()

    def __init__(self, pipe: DiffusersPipeline, base: str, **options: Unpack[PipelineOptions]) -> None:
        super().__init__(pipe, base, **options)
        # By value: diffusers' from_config would take DDIM's defaults for what a file leaves to those of its own class.
        config = pipe.scheduler.config
        to_one = config.get("set_alpha_to_one", True)  # false for Stable Diffusion 1.5; without the key DDIM ends at 0
        read = {key: config[key] for key in (*SCHEDULE, *SPACING)}
        self._ddim: Any = DDIMScheduler(**read, set_alpha_to_one=to_one)

    def grid(self, steps: int, shape: Shape) -> Grid:
        """Returns the timesteps of diffusers' DDIM with this pipeline's spacing and offset, then the data, or where its
        scheduler has set_alpha_to_one=false the level of the first training step, as DDPO's chains do (arXiv
        2305.13301). The data too where the last timestep is that first step, from which DDIM's last step leads nowhere.
        """
        self._ddim.set_timesteps(steps)
        last = float(self._ddim.final_alpha_cumprod) if self._ddim.timesteps[-1] > 0 else 1.0
        return ddim_grid(self._ddim.alphas_cumprod, self._ddim.timesteps, last)

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        alphas = self._ddim.alphas_cumprod.to(uniform.device)
        index = (uniform * len(alphas)).long().clamp(max=len(alphas) - 1)  # a draw near 1 may round up to it
        return (1 - alphas.double()[index]).sqrt(), index.float()


def in_rows(
    conditions: Sequence[Condition], batch: Callable[[list[Condition]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Batches one condition a row with `batch`, which gets each distinct condition once. Returns the network's
    inputs."""
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
    """Returns height and width in pixels. Raises UserError unless both are multiples of `multiple`."""
    sides = default if resolution is None else (resolution, resolution) if isinstance(resolution, int) else resolution
    for side in sides:
        if side < 1 or side % multiple:
            raise UserError(f"resolution {side} is not a multiple of {multiple}, as this model needs")
    return sides


def within_table(table: int | None, sides: tuple[int, int], pixels: int, name: str) -> None:
    """Raises UserError for sides beyond a position table of `table` parts, of `pixels` a side, in pipeline `name`."""
    if table is not None and max(sides) > table * pixels:
        raise UserError(
            f"denoising.resolution: resolution {max(sides)} is beyond the position table of {name}, which ends at "
            f"{table * pixels} pixels a side; draw smaller ones"
        )
