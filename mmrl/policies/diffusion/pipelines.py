"""Diffusers pipelines as families, by class: Stable Diffusion 3, FLUX.1, Qwen-Image, Stable Diffusion 1.5 and SDXL.

Prompts are encoded and latents decoded by the pipeline's own parts; its scheduler is only read for the noise levels.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from einops import rearrange, repeat
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.errors import UserError
from mmrl.policies.diffusion.family import Condition, Shape
from mmrl.policies.diffusion.settings import DiffusionModel
from mmrl.policies.settings import LoRA
from mmrl.samplers.settings import Space
from mmrl.samplers.sigmas import Grid, ddim_grid, dynamic_shift, shift_towards_noise

BASE_FILE = "mmrl_base.json"  # beside saved LoRA weights: the pipeline that they belong to


class Pipeline(ABC):
    """What the classes share. Implements `mmrl.policies.diffusion.family.Family`.

    The network runs in the dtype of its weights; latents, times and predictions are fp32. Text encoders and VAE wait
    on the CPU and visit the network's device while they are needed.
    """

    space: Space
    trained: ClassVar[str]  # the component that is trained
    encoders: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()  # encoders that a folder may lack
    patch: ClassVar[int] = 2  # latent sides are multiples of it
    packed: ClassVar[bool] = False  # the network takes patches [n, token, channel] instead of a picture

    def __init__(self, pipe: Any, base: str, *, lora: bool = False) -> None:
        self.pipe = pipe
        self.base = base
        self.lora = lora
        self.module: Any = pipe.components[self.trained]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def latent_shape(self, resolution: int | None) -> tuple[int, int, int]:
        """Raises UserError unless `resolution` is a multiple of what the VAE and the network's patches shrink it by."""
        scale = self.pipe.vae_scale_factor
        own = self.pipe.default_sample_size if self.packed else self.module.config.sample_size
        pixels = own * scale if resolution is None else resolution
        if pixels < 1 or pixels % (scale * self.patch):
            raise UserError(f"resolution {pixels} is not a multiple of {scale * self.patch}, as this model needs")
        channels = self.module.config.in_channels // (self.patch**2 if self.packed else 1)
        return channels, pixels // scale, pixels // scale

    @abstractmethod
    def grid(self, steps: int, shape: Shape) -> Grid: ...

    @abstractmethod
    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]: ...

    # --- text ---

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> list[Condition]:
        """Texts are encoded one by one, so that an embedding does not depend on what else is asked for."""
        with self._visiting(*self.encoders):
            return [{key: value[0].cpu() for key, value in self._encode(text).items()} for text in texts]

    @abstractmethod
    def _encode(self, text: str) -> dict[str, Tensor]:
        """A batch of one."""

    # --- the network ---

    def predict(
        self, model: Any, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        dtype = next(self.module.parameters()).dtype
        texts = self._texts(conditions, x.device, dtype)
        _, _, height, width = x.shape
        sizes = {"h": height // self.patch, "p": self.patch, "q": self.patch}
        packed = rearrange(x, "n c (h p) (w q) -> n (h w) (c p q)", **sizes) if self.packed else x
        inputs = self._inputs(time, texts, (height, width), guidance)
        (out,) = model(packed.to(dtype), **inputs, return_dict=False)
        return (rearrange(out, "n (h w) (c p q) -> n c (h p) (w q)", **sizes) if self.packed else out).float()

    def _texts(self, conditions: Sequence[Condition], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The conditions as one batch, under the names of the network's inputs."""
        return {key: torch.stack([c[key] for c in conditions]).to(device, dtype) for key in conditions[0]}

    @abstractmethod
    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """What the network takes besides the latents, whose height and width are `size`."""

    # --- pictures ---

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        scale, shift = self._latent_scale()
        with self._visiting("vae"):
            return self._decode(latents.float().to(self.device) * scale + shift) / 2 + 0.5

    @torch.no_grad()
    def to_latents(self, pixels: Tensor) -> Tensor:
        scale, shift = self._latent_scale()
        with self._visiting("vae"):
            return (self._to_z(pixels.float().to(self.device) * 2 - 1) - shift) / scale

    def _latent_scale(self) -> tuple[Tensor, Tensor]:
        """What latents are multiplied by and what is added before the VAE decodes them, [channel or 1, 1, 1]."""
        config = self.pipe.vae.config
        scale = torch.tensor(config.latents_std or 1.0) / config.get("scaling_factor", 1.0)
        shift = torch.tensor(config.latents_mean or config.get("shift_factor") or 0.0)
        return scale.reshape(-1, 1, 1).to(self.device), shift.reshape(-1, 1, 1).to(self.device)

    def _decode(self, z: Tensor) -> Tensor:
        return self.pipe.vae.decode(z, return_dict=False)[0]

    def _to_z(self, pixels: Tensor) -> Tensor:
        return self.pipe.vae.encode(pixels).latent_dist.mode()  # the mean: a demonstration is the same every time

    @contextmanager
    def _visiting(self, *names: str) -> Iterator[None]:
        """The named components on the network's device, and back on the CPU afterwards, also after an error."""
        parts = [self.pipe.components[name] for name in names if self.pipe.components[name] is not None]
        try:
            for part in parts:
                part.to(self.device)
            yield
        finally:
            for part in parts:
                part.to("cpu")

    # --- files ---

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """With LoRA what `pipe.load_lora_weights(folder)` takes, and the name of the base beside it; else the whole
        pipeline, as `DiffusionPipeline.from_pretrained(folder)` takes it."""
        if self.lora:
            layers = get_peft_model_state_dict(self.module, state_dict=state)
            settings = self.module.peft_config["default"].to_dict()
            self.pipe.save_lora_weights(
                folder,
                **{f"{self.trained}_lora_layers": layers, f"{self.trained}_lora_adapter_metadata": settings},
            )
            (folder / BASE_FILE).write_text(json.dumps({"base": self.base}))
            return
        with torch.device("meta"):  # `module` itself may hold only a shard
            whole = type(self.module).from_config(self.module.config)
        whole.load_state_dict(state, assign=True)
        self.pipe.register_modules(**{self.trained: whole})
        try:
            self.pipe.save_pretrained(folder)
        finally:
            self.pipe.register_modules(**{self.trained: self.module})


class FlowPipeline(Pipeline):
    """Rectified flow (arXiv 2209.03003): the network predicts noise - data."""

    space = "velocity"
    trained = "transformer"

    def grid(self, steps: int, shape: Shape) -> Grid:
        """The scheduler's levels from 1, 1 - 1/steps, ..., 1/steps.

        These are what the pipelines of FLUX and Qwen-Image use. Stable Diffusion 3's own call shifts twice, the second
        time an already shifted range, so that its last step is nearly wasted (0.009 for 10 steps of shift 3); here the
        shift is applied once. Raises UserError where the scheduler has no such levels.
        """
        config = self.pipe.scheduler.config
        if steps < 1 or (steps == 1 and config.shift_terminal):
            raise UserError(f"a chain of {steps} steps is too short for this model's scheduler")
        tokens = shape[1] * shape[2] // self.patch**2
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        mu = math.log(
            dynamic_shift(
                tokens,
                base_tokens=config.base_image_seq_len,
                max_tokens=config.max_image_seq_len,
                base=config.base_shift,
                largest=config.max_shift,
            )
        )
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=mu)
        return Grid(scheduler.sigmas, scheduler.timesteps)

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """A fixed shift is applied to the draws, one that depends on the picture's size is not."""
        config = self.pipe.scheduler.config
        sigma = uniform if config.use_dynamic_shifting else shift_towards_noise(uniform, config.shift)
        return sigma, config.num_train_timesteps * sigma


class StableDiffusion3(FlowPipeline):
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    optional = ("text_encoder_3",)

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, _, pooled, _ = self.pipe.encode_prompt(
            text, None, None, device=self.device, do_classifier_free_guidance=False
        )
        return {"encoder_hidden_states": tokens, "pooled_projections": pooled}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        return {"timestep": time, **texts}


class Flux(FlowPipeline):
    """FLUX.1 dev and schnell. dev takes its guidance scale as an input."""

    encoders = ("text_encoder", "text_encoder_2")
    packed = True

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, pooled, _ = self.pipe.encode_prompt(text, device=self.device)
        return {"encoder_hidden_states": tokens, "pooled_projections": pooled}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        if self.module.config.guidance_embeds:
            if guidance is None:
                raise UserError(
                    "this FLUX model takes an embedded guidance scale: set denoising.embedded_guidance, for example 3.5"
                )
            texts = texts | {"guidance": torch.full_like(time, guidance)}
        rows, columns = (torch.arange(side // self.patch, device=time.device) for side in size)
        return {
            "timestep": time / 1000,
            "img_ids": torch.cartesian_prod(rows.new_zeros(1), rows, columns),
            "txt_ids": rows.new_zeros(texts["encoder_hidden_states"].shape[1], 3),
            **texts,
        }


class QwenImage(FlowPipeline):
    """Qwen-Image (arXiv 2508.02324). Texts differ in length; a batch is padded and masked."""

    encoders = ("text_encoder",)
    packed = True

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, _ = self.pipe.encode_prompt(text, device=self.device)
        return {"encoder_hidden_states": tokens}

    def _texts(self, conditions: Sequence[Condition], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        tokens = [c["encoder_hidden_states"] for c in conditions]
        texts = {"encoder_hidden_states": pad_sequence(tokens, batch_first=True).to(device, dtype)}
        lengths = torch.tensor([len(t) for t in tokens])
        if bool((lengths != lengths[0]).any()):  # without a mask attention has faster kernels
            mask = torch.arange(int(lengths.max())) < rearrange(lengths, "n -> n 1")
            texts["encoder_hidden_states_mask"] = mask.to(device)
        return texts

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        height, width = size
        shapes = [[(1, height // self.patch, width // self.patch)]] * len(time)
        return {"timestep": time / 1000, "img_shapes": shapes, **texts}

    def _decode(self, z: Tensor) -> Tensor:
        return super()._decode(rearrange(z, "n c h w -> n c 1 h w")).squeeze(2)

    def _to_z(self, pixels: Tensor) -> Tensor:
        return super()._to_z(rearrange(pixels, "n c h w -> n c 1 h w")).squeeze(2)


class NoisePipeline(Pipeline):
    """The network predicts the noise, at timesteps of a training schedule; chains are DDIM's (arXiv 2010.02502)."""

    space = "noise"
    trained = "unet"
    patch = 1

    def __init__(self, pipe: Any, base: str, **options: Any) -> None:
        super().__init__(pipe, base, **options)
        self._ddim = DDIMScheduler.from_config(pipe.scheduler.config)
        if self._ddim.config.prediction_type != "epsilon":
            raise UserError(
                f"model.path={base}: its network predicts {self._ddim.config.prediction_type}; of Stable Diffusion's "
                "pipelines those that predict the noise (epsilon) are supported"
            )

    def grid(self, steps: int, shape: Shape) -> Grid:
        """The training timesteps that diffusers' DDIM visits with this pipeline's spacing and offset, then the data."""
        self._ddim.set_timesteps(steps)
        return ddim_grid(self._ddim.alphas_cumprod, self._ddim.timesteps)

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        alphas = self._ddim.alphas_cumprod.to(uniform.device)
        index = (uniform * len(alphas)).long().clamp(max=len(alphas) - 1)  # a draw near 1 may round up to it
        return (1 - alphas.double()[index]).sqrt(), index.float()


class StableDiffusion(NoisePipeline):
    """Stable Diffusion 1.x (arXiv 2112.10752)."""

    encoders = ("text_encoder",)

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, _ = self.pipe.encode_prompt(text, self.device, 1, False)
        return {"encoder_hidden_states": tokens}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        return {"timestep": time, **texts}


class StableDiffusionXL(NoisePipeline):
    """SDXL (arXiv 2307.01952), told that its pictures are whole and of their own size."""

    encoders = ("text_encoder", "text_encoder_2")

    def _encode(self, text: str) -> dict[str, Tensor]:
        """Where the pipeline says so, an empty prompt is zeros instead of what the encoders make of it."""
        tokens, _, pooled, _ = self.pipe.encode_prompt(text, device=self.device, do_classifier_free_guidance=False)
        if not text and self.pipe.config.force_zeros_for_empty_prompt:
            tokens, pooled = torch.zeros_like(tokens), torch.zeros_like(pooled)
        return {"encoder_hidden_states": tokens, "text_embeds": pooled}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        height, width = (side * self.pipe.vae_scale_factor for side in size)
        sizes = time.new_tensor([height, width, 0, 0, height, width])  # original, crop's corner, target
        added = {"text_embeds": texts["text_embeds"], "time_ids": repeat(sizes, "k -> n k", n=len(time))}
        return {
            "timestep": time,
            "encoder_hidden_states": texts["encoder_hidden_states"],
            "added_cond_kwargs": added,
        }


CLASSES: dict[str, type[Pipeline]] = {
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "QwenImagePipeline": QwenImage,
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
}


def load(path: str, model: DiffusionModel) -> Pipeline:
    """A family from a pipeline's folder or hub name, or from a folder with LoRA weights that `save` wrote.

    Only the transformer or U-Net is trained: all of it, or with model.lora adapters on it, which have its dtype. The
    VAE runs in fp32.

    Raises UserError if there is no usable pipeline at `path`, or a setting does not apply to it.
    """
    if model.attention != "sdpa":
        raise UserError(f"model.attention={model.attention}: diffusion pipelines run with sdpa")
    base, adapter = _base_of(path)
    pipe, family = _pipeline(path, base, model.dtype)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()  # dropout would make replay differ from sampling
    pipe.vae.enable_slicing()
    network = pipe.components[family.trained]
    adapted = adapter or model.lora is not None
    if adapter:
        pipe.load_lora_weights(path, adapter_name="default")
        _same_adapter(path, network.peft_config["default"], model.lora)
    elif model.lora is not None:
        _add_lora(network, model.lora)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name or not adapted)
    if model.activation_checkpointing:
        network.enable_gradient_checkpointing()
    return family(pipe, base, lora=adapted)


def _base_of(path: str) -> tuple[str, bool]:
    """The pipeline to load for `path`, absolute if it is a folder, and whether `path` holds an adapter for it."""
    file = Path(path) / BASE_FILE
    base = json.loads(file.read_text())["base"] if file.is_file() else path
    return (str(Path(base).resolve()) if Path(base).is_dir() else base), file.is_file()


def _pipeline(path: str, base: str, dtype: str) -> tuple[Any, type[Pipeline]]:
    where = f"model.path={path}" if path == base else f"model.path={path}, whose base is {base}"
    try:
        index = DiffusionPipeline.load_config(base)
    except OSError as error:
        raise UserError(f"{where}: no diffusers pipeline there ({_first_line(error)})") from None
    name = index["_class_name"]
    if name not in CLASSES:
        raise UserError(f"{where} is a {name}; supported are {', '.join(CLASSES)}")
    family = CLASSES[name]
    absent: dict[str, None] = {part: None for part, source in index.items() if source == [None, None]}
    tokenizers = [encoder.replace("text_encoder", "tokenizer") for encoder in family.encoders]
    for part in (family.trained, "vae", "scheduler", *family.encoders, *tokenizers):
        there = part in index and part not in absent and (not Path(base).is_dir() or (Path(base) / part).is_dir())
        if not there and part.replace("tokenizer", "text_encoder") not in family.optional:
            raise UserError(f"{where} has no {part}, which {name} needs")
    kind = getattr(torch, dtype)
    try:
        pipe = DiffusionPipeline.from_pretrained(
            base, dtype={"default": kind, "vae": torch.float32}, use_safetensors=True, **absent
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{where} can not be loaded: {_first_line(error)}") from None
    return pipe, family


def _add_lora(network: Any, lora: LoRA) -> None:
    targets = lora.targets
    if targets == "all-linear":
        targets = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    try:
        network.add_adapter(
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]
                target_modules=targets,
            )
        )
    except ValueError as error:
        raise UserError(f"model.lora.targets={targets}: {_first_line(error)}") from None


def _same_adapter(path: str, saved: LoraConfig, lora: LoRA | None) -> None:
    if lora is not None and (lora.rank, lora.alpha) != (saved.r, saved.lora_alpha):
        raise UserError(
            f"model.path={path} holds an adapter of rank {saved.r} and alpha {saved.lora_alpha}; set model.lora to "
            "these or leave it out"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
