"""Families that generate videos: Wan 2.1 and 2.2 (with one transformer), LTX-Video and HunyuanVideo.

Latents are [channel, frame, height, width].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from einops import rearrange
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.families.autoencoders import (
    ImageAutoencoder,
    LTXAutoencoder,
    VideoAutoencoder,
    WanAutoencoder,
)
from mmrl.policies.diffusion.families.components import DiffusersPipeline
from mmrl.policies.diffusion.families.pipeline import (
    FlowPipeline,
    PipelineOptions,
    check_position_table,
    checked_sides,
    in_rows,
)
from mmrl.policies.diffusion.families.schedules import FLOW, FLOW_SOLVERS, FlowSchedules
from mmrl.policies.diffusion.family import Condition, ModelNotes, Resolution, Shape
from mmrl.policies.models import NetworkCall
from mmrl.samplers.sigmas import Grid, shift_towards_noise


class VideoPipeline(FlowPipeline):
    """A family that generates videos. Its VAE compresses time: the first frame has a latent frame of its own, and later
    frames share one."""

    autoencoder_kind: ClassVar[type[ImageAutoencoder]] = VideoAutoencoder

    @property
    def patches(self) -> tuple[int, int, int]:
        """Frames, rows and columns of latents that form one token."""
        frames, height, width = self.module.config.patch_size
        return frames, height, width

    @property
    def compression(self) -> tuple[int, int]:
        """The compression factors of the VAE: frames per latent frame, and pixels per latent pixel along a side."""
        return self.pipe.vae_scale_factor_temporal, self.pipe.vae_scale_factor_spatial

    def default_size(self) -> tuple[int, int, int]:
        """Returns frames, height and width (pixels) of a video if `denoising` sets none."""
        return 81, 480, 832

    def latent_shape(self, resolution: Resolution, frames: int | None = None) -> Shape:
        """Returns [channel, frame, height, width] of latents. Raises UserError for sides and frames that compression
        and patch size do not divide."""
        # factors of the VAE's compression, and sides of the network's patches
        (in_time, in_space), (t, h, w) = self.compression, self.patches
        default_frames, *default_sides = self.default_size()
        num_frames = default_frames if frames is None else frames
        height, width = checked_sides(resolution, (default_sides[0], default_sides[1]), in_space * math.lcm(h, w))
        check_position_table(self.position_table(), (height, width), in_space * max(h, w), type(self.pipe).__name__)
        latent_frames = (num_frames - 1) // in_time + 1
        if num_frames < 1 or (num_frames - 1) % in_time or latent_frames % t:
            first = (t - 1) * in_time + 1
            raise UserError(
                f"denoising.frames={num_frames}, but the model at model.path generates videos of {first}, "
                f"{first + t * in_time}, {first + 2 * t * in_time}, ... frames; set one of these"
            )
        return self.module.config.in_channels, latent_frames, height // in_space, width // in_space

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Predicts the velocity of latents x [n, channel, frame, height, width]; see `Family.predict`."""
        dtype = next(self.module.parameters()).dtype
        texts = in_rows(conditions, lambda distinct: self._texts(distinct, x.device, dtype))
        inputs = self._video_inputs(time, texts, tuple(x.shape[2:]), guidance)
        (out,) = model(x.to(dtype), **inputs, return_dict=False)
        return out.float()

    def _video_inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, ...], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. size: frames, height and width of the latents."""
        return {"timestep": time, **texts}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        raise NotImplementedError("families of videos implement `_video_inputs`")


class Wan(VideoPipeline):
    """Wan 2.1 and the 5B model of Wan 2.2 (arXiv 2503.20314)."""

    encoders = ("text_encoder",)
    autoencoder_kind = WanAutoencoder
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder", 512)
    schedules = FlowSchedules((*FLOW, *FLOW_SOLVERS), shift_alone=True)

    def __init__(self, pipe: DiffusersPipeline, base: str, **options: Unpack[PipelineOptions]) -> None:
        """Raises UserError for a model with two transformers."""
        super().__init__(pipe, base, **options)
        if pipe.components.get("transformer_2") is not None:
            raise UserError(
                f"model.path={base} has two transformers, for high and low noise, which is not supported; take a Wan "
                "model with one, such as Wan2.1-T2V-1.3B or Wan2.2-TI2V-5B"
            )

    def position_table(self) -> int | None:
        return int(self.module.config.rope_max_seq_len)

    def default_size(self) -> tuple[int, int, int]:
        return (121, 704, 1280) if self.compression[1] == 16 else (81, 480, 832)  # 16: the 5B model

    def grid(self, steps: int, shape: Shape) -> Grid:
        """Returns the sigmas 1, 1 - 1/steps, ..., 1/steps, shifted towards noise, then 0: the noise levels of
        FlowMatchEulerDiscreteScheduler, whatever the class of the scheduler."""
        scheduler: Any = FlowMatchEulerDiscreteScheduler(num_train_timesteps=self._train_steps, shift=self._shift)
        scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
        return Grid(scheduler.sigmas, scheduler.timesteps)

    def levels(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        sigma = shift_towards_noise(uniform, self._shift)
        return sigma, self._train_steps * sigma

    @property
    def _shift(self) -> float:
        config = self.pipe.scheduler.config
        return float(config["flow_shift"] if "flow_shift" in config else config["shift"])

    @property
    def _train_steps(self) -> int:
        return int(self.pipe.scheduler.config.num_train_timesteps)

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return {"encoder_hidden_states": (self.text_tokens or 0, self.module.config.text_dim)}

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, _ = self.pipe.encode_prompt(text, do_classifier_free_guidance=False, device=self.device, **self._limit)
        return {"encoder_hidden_states": tokens}

    def _video_inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, ...], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. size: frames, height and width of the latents."""
        if self.pipe.config.expand_timesteps:  # Wan 2.2's 5B model takes a time per token
            tokens = math.prod(side // patch for side, patch in zip(size, self.patches, strict=True))
            time = time[:, None].expand(-1, tokens)
        return {"timestep": time, **texts}


class LTXVideo(VideoPipeline):
    """LTX-Video (arXiv 2501.00103), at 25 frames per second. Every latent pixel is a token."""

    encoders = ("text_encoder",)
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder", 128)
    patch = 1  # the scheduler counts latent pixels
    autoencoder_kind = LTXAutoencoder
    FRAME_RATE = 25

    def __init__(self, pipe: DiffusersPipeline, base: str, **options: Unpack[PipelineOptions]) -> None:
        """Raises UserError for a VAE that denoises, and for patches larger than 1."""
        super().__init__(pipe, base, **options)
        config = pipe.transformer.config
        if pipe.vae.config.timestep_conditioning or (config.patch_size, config.patch_size_t) != (1, 1):
            raise UserError(
                f"model.path={base} is an LTX-Video model with a VAE that denoises, or with patches larger than 1, "
                "which is not supported; take LTX-Video 0.9.0"
            )

    @property
    def patches(self) -> tuple[int, int, int]:
        return 1, 1, 1

    @property
    def compression(self) -> tuple[int, int]:
        return self.pipe.vae_temporal_compression_ratio, self.pipe.vae_spatial_compression_ratio

    def default_size(self) -> tuple[int, int, int]:
        return 161, 512, 704

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the largest shapes of the tensors of a condition by name. `text_tokens` is never None here, because
        `longest` has a default; `or 0` is for the type checker."""
        tokens = self.text_tokens or 0
        return {
            "encoder_hidden_states": (tokens, self.module.config.caption_channels),
            "encoder_attention_mask": (tokens,),
        }

    def _encode(self, text: str) -> dict[str, Tensor]:
        """Returns the embeddings of one text and their mask by name, with a batch dimension of 1."""
        tokens, mask, _, _ = self.pipe.encode_prompt(
            text, do_classifier_free_guidance=False, device=self.device, **self._limit
        )
        return {"encoder_hidden_states": tokens, "encoder_attention_mask": mask}

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Predicts the velocity of latents x [n, channel, frame, height, width]; see `Family.predict`. Every latent
        pixel is a token of the network. Its position embedding is scaled by how many seconds and pixels of the video a
        latent frame and a latent pixel span."""
        frames, height, width = x.shape[2:]
        sizes = {"f": frames, "h": height, "w": width}
        in_time, in_space = self.compression
        dtype = next(self.module.parameters()).dtype
        (out,) = model(
            rearrange(x, "n c f h w -> n (f h w) c").to(dtype),
            timestep=time,
            **in_rows(conditions, lambda distinct: self._texts(distinct, x.device, dtype)),
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(in_time / self.FRAME_RATE, in_space, in_space),
            return_dict=False,
        )
        return rearrange(out, "n (f h w) c -> n c f h w", **sizes).float()


class HunyuanVideo(VideoPipeline):
    """HunyuanVideo (arXiv 2412.03603). It is guidance-distilled: it takes the guidance scale as an input."""

    encoders = ("text_encoder", "text_encoder_2")
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder", 256)
    schedules = FlowSchedules(dynamic=False)

    @property
    def notes(self) -> ModelNotes:
        embeds = self.module.config.guidance_embeds
        return ModelNotes(distilled_guidance="its guidance scale is denoising.embedded_guidance" if embeds else None)

    @property
    def patches(self) -> tuple[int, int, int]:
        config = self.module.config
        return config.patch_size_t, config.patch_size, config.patch_size

    def default_size(self) -> tuple[int, int, int]:
        return 129, 720, 1280

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the largest shapes of the tensors of a condition by name. `text_tokens` is never None here, because
        `longest` has a default; `or 0` is for the type checker."""
        tokens, config = self.text_tokens or 0, self.module.config
        return {
            "encoder_hidden_states": (tokens, config.text_embed_dim),
            "pooled_projections": (config.pooled_projection_dim,),
            "encoder_attention_mask": (tokens,),
        }

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, pooled, mask = self.pipe.encode_prompt(text, device=self.device, **self._limit)
        return {"encoder_hidden_states": tokens, "pooled_projections": pooled, "encoder_attention_mask": mask}

    def truncated_tokens(self, text: str) -> int:
        limit = self.text_tokens
        assert limit is not None
        return max(0, len(self.pipe.tokenizer(text, verbose=False).input_ids) - limit)

    def _video_inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, ...], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. Raises UserError if the network needs a guidance scale
        and `guidance` is None."""
        inputs: dict[str, Any] = {"timestep": time, **texts}
        if self.module.config.guidance_embeds:
            if guidance is None:
                raise UserError(
                    "HunyuanVideo needs a guidance scale as an input; set denoising.embedded_guidance, for example to 6"
                )
            inputs["guidance"] = torch.full_like(time, guidance * 1000)  # as its pipeline scales it
        return inputs
