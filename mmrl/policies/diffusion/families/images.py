"""Families that generate images: Stable Diffusion 3, FLUX.1, Qwen-Image, Z-Image, AuraFlow, Stable Diffusion 1.5 and
SDXL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.errors import UserError
from mmrl.policies.diffusion.families.autoencoders import OneFrameAutoencoder
from mmrl.policies.diffusion.families.components import DiffusersPipeline
from mmrl.policies.diffusion.families.pipeline import FlowPipeline, NoisePipeline
from mmrl.policies.diffusion.families.schedules import FlowSchedules, NoiseSchedules
from mmrl.policies.diffusion.family import Condition, ModelNotes
from mmrl.policies.models import NetworkCall
from mmrl.runtime.template_limits import render_template

CLIP_TOKENS = 77  # CLIP pads and truncates every text to this length


def shifted_once(pipe: DiffusersPipeline) -> ModelNotes:
    """Returns a note for pipelines whose own call in diffusers applies a fixed shift of the noise levels twice, while
    mmrl applies it once; an empty note if the scheduler has no fixed shift."""
    shift = pipe.scheduler.config.shift
    if shift == 1 or pipe.scheduler.config.use_dynamic_shifting:
        return ModelNotes()
    name = type(pipe).__name__
    return ModelNotes(
        (f"noise levels have the scheduler's shift={shift:g} once; {name} in diffusers applies it twice",)
    )


class StableDiffusion3(FlowPipeline):
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    optional = ("text_encoder_3",)
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder_3", 256)

    @property
    def notes(self) -> ModelNotes:
        return shifted_once(self.pipe)

    def position_table(self) -> int | None:
        return int(self.module.config.pos_embed_max_size * self.module.config.patch_size)

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the largest shapes of the tensors of a condition by name. `text_tokens`, the tokens of T5, is never
        None here, because `longest` has a default; `or 0` is for the type checker."""
        config = self.module.config
        tokens = CLIP_TOKENS + (self.text_tokens or 0)
        return {
            "encoder_hidden_states": (tokens, config.joint_attention_dim),
            "pooled_projections": (config.pooled_projection_dim,),
        }

    def _encode(self, text: str) -> dict[str, Tensor]:
        """Returns the embeddings of one text by name, with a batch dimension of 1. The two None are the prompts of the
        second and third encoder, which get the same text."""
        tokens, _, pooled, _ = self.pipe.encode_prompt(
            text, None, None, device=self.device, do_classifier_free_guidance=False, **self._limit
        )
        return {"encoder_hidden_states": tokens, "pooled_projections": pooled}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        return {"timestep": time, **texts}


class Flux(FlowPipeline):
    """FLUX.1 dev and schnell. dev is guidance-distilled: it takes the guidance scale as an input."""

    encoders = ("text_encoder", "text_encoder_2")
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder_2", 512)
    packed = True

    @property
    def notes(self) -> ModelNotes:
        key = "denoising.embedded_guidance" if self.module.config.guidance_embeds else "none"
        return ModelNotes(distilled_guidance=f"the network is distilled from a guided one (its guidance scale: {key})")

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the largest shapes of the tensors of a condition by name. `text_tokens` is never None here, because
        `longest` has a default; `or 0` is for the type checker."""
        config = self.module.config
        return {
            "encoder_hidden_states": (self.text_tokens or 0, config.joint_attention_dim),
            "pooled_projections": (config.pooled_projection_dim,),
        }

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, pooled, _ = self.pipe.encode_prompt(text, None, device=self.device, **self._limit)
        return {"encoder_hidden_states": tokens, "pooled_projections": pooled}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. size: height and width of the latents. Raises
        UserError if the network needs a guidance scale and `guidance` is None."""
        if self.module.config.guidance_embeds:
            if guidance is None:
                raise UserError(
                    "the FLUX model at model.path needs a guidance scale as an input; set "
                    "denoising.embedded_guidance, for example to 3.5"
                )
            texts = texts | {"guidance": torch.full_like(time, guidance)}
        return {
            "timestep": time / 1000,  # the scheduler counts to 1000, the network to 1
            "img_ids": self._image_ids(size, time.device),
            "txt_ids": torch.zeros(texts["encoder_hidden_states"].shape[1], 3, device=time.device),
            **texts,
        }

    def _image_ids(self, size: tuple[int, int], device: torch.device) -> Tensor:
        """Returns the position ids of the tokens of the image, [token, 3]: 0, row and column."""
        rows, columns = (torch.arange(side // self.patch, device=device) for side in size)
        return torch.cartesian_prod(rows.new_zeros(1), rows, columns)


class QwenImage(FlowPipeline):
    """Qwen-Image (arXiv 2508.02324). Text embeddings of a batch are padded, and masked if they differ in length."""

    encoders = ("text_encoder",)
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder", 1024)
    packed = True
    norm_patch = 2
    autoencoder_kind = OneFrameAutoencoder

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        # 2048: Qwen-Image-Edit, which has no limit, encodes the source too, as about 1024 tokens
        return {"encoder_hidden_states": (self.text_tokens or 2048, self.module.config.joint_attention_dim)}

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, _ = self.pipe.encode_prompt(text, device=self.device, **self._limit)
        return {"encoder_hidden_states": tokens}

    def _texts(self, conditions: Sequence[Condition], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Pads the text embeddings of conditions to one length: [condition, token, width], with a mask if lengths
        differ."""
        tokens = [c["encoder_hidden_states"] for c in conditions]
        texts = {"encoder_hidden_states": pad_sequence(tokens, batch_first=True).to(device, dtype)}
        lengths = torch.tensor([len(t) for t in tokens])
        if bool((lengths != lengths[0]).any()):  # attention is faster without a mask
            mask = torch.arange(int(lengths.max())) < rearrange(lengths, "n -> n 1")
            texts["encoder_hidden_states_mask"] = mask.to(device)
        return texts

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. `img_shapes` holds frames, rows and columns of
        patches."""
        height, width = size
        shapes = [[(1, height // self.patch, width // self.patch)]] * len(time)
        return {"timestep": time / 1000, "img_shapes": shapes, **texts}


class ZImage(FlowPipeline):
    """Z-Image and Z-Image-Turbo (arXiv 2511.22699). The network takes lists of images and texts and the time 1 - sigma,
    and predicts data - noise."""

    encoders = ("text_encoder",)
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder", 512)

    @property
    def notes(self) -> ModelNotes:
        return ModelNotes(("denoising.guidance is guidance_scale of ZImagePipeline plus 1, whose 0 means no guidance",))

    def default_side(self) -> int:
        return 1024

    def position_table(self) -> int | None:
        return int(min(self.module.config.axes_lens[1:])) * self.patch

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return {"text": (self.text_tokens or 0, self.module.config.cap_feat_dim)}

    def _encode(self, text: str) -> dict[str, Tensor]:
        """Returns the embedding of one text, [1, token, width]."""
        (tokens,), _ = self.pipe.encode_prompt(
            text, device=self.device, do_classifier_free_guidance=False, **self._limit
        )
        return {"text": tokens[None]}

    def _encoder_text(self, text: str) -> str:
        """Returns the text in the chat template that the pipeline adds."""
        messages = [{"role": "user", "content": text}]
        tokenizer = self.pipe.tokenizer
        return render_template(f"model.path={tokenizer.name_or_path}", tokenizer, messages, enable_thinking=True)

    def predict(
        self, model: NetworkCall, x: Tensor, time: Tensor, conditions: Sequence[Condition], guidance: float | None
    ) -> Tensor:
        """Predicts the velocity of latents x [n, channel, height, width]; see `Family.predict`. The network takes lists
        of images and texts, and the time (1000 - time) / 1000, which is 0 for noise and 1 for data."""
        dtype = next(self.module.parameters()).dtype
        texts = [condition["text"].to(x.device, dtype) for condition in conditions]
        images = list(rearrange(x.to(dtype), "n c h w -> n c 1 h w"))
        (out,) = model(images, (1000 - time) / 1000, texts, return_dict=False)
        # The network predicts data - noise, other flows noise - data
        return -rearrange(torch.stack([part.float() for part in out]), "n c 1 h w -> n c h w")

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        raise NotImplementedError("the network takes lists: see `predict`")


class AuraFlow(FlowPipeline):
    """AuraFlow (https://blog.fal.ai/auraflow/), with one text encoder and masked padding. The encoder may be any
    transformers model whose first output is the hidden states of tokens, such as BERT."""

    encoders = ("text_encoder",)
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder", 256)
    schedules = FlowSchedules(dynamic=False)

    @property
    def notes(self) -> ModelNotes:
        return shifted_once(self.pipe)

    def position_table(self) -> int | None:
        return math.isqrt(self.module.config.pos_embed_max_size) * int(self.module.config.patch_size)

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return {"encoder_hidden_states": (self.text_tokens or 0, self.module.config.joint_attention_dim)}

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, *_ = self.pipe.encode_prompt(text, device=self.device, do_classifier_free_guidance=False, **self._limit)
        return {"encoder_hidden_states": tokens}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        return {"timestep": time / 1000, **texts}


class StableDiffusion(NoisePipeline):
    """Stable Diffusion 1.x (arXiv 2112.10752)."""

    encoders = ("text_encoder",)

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return {"encoder_hidden_states": (CLIP_TOKENS, self.module.config.cross_attention_dim)}

    def _encode(self, text: str) -> dict[str, Tensor]:
        """Returns the embeddings of one text by name, with a batch dimension of 1."""
        tokens, _ = self.pipe.encode_prompt(
            text, self.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"encoder_hidden_states": tokens}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        return {"timestep": time, **texts}


class StableDiffusionXL(NoisePipeline):
    """SDXL (arXiv 2307.01952). Its size conditions are those of uncropped images of the generated size."""

    encoders = ("text_encoder", "text_encoder_2")
    schedules = NoiseSchedules(clips=True)

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        # 1280: the size of the pooled embedding of SDXL's second text encoder, OpenCLIP bigG
        width = self.module.config.cross_attention_dim
        return {"encoder_hidden_states": (CLIP_TOKENS, width), "text_embeds": (1280,)}

    def _encode(self, text: str) -> dict[str, Tensor]:
        """Returns the embeddings of a text; zeros for an empty text if force_zeros_for_empty_prompt is set in the
        pipeline."""
        tokens, _, pooled, _ = self.pipe.encode_prompt(text, device=self.device, do_classifier_free_guidance=False)
        if not text and self.pipe.config.force_zeros_for_empty_prompt:
            tokens, pooled = torch.zeros_like(tokens), torch.zeros_like(pooled)
        return {"encoder_hidden_states": tokens, "text_embeds": pooled}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. size: height and width of the latents."""
        height, width = (side * self.pipe.vae_scale_factor for side in size)
        sizes = time.new_tensor([height, width, 0, 0, height, width])  # original size, corner of the crop, target size
        added_conditions = {"text_embeds": texts["text_embeds"], "time_ids": repeat(sizes, "k -> n k", n=len(time))}
        return {
            "timestep": time,
            "encoder_hidden_states": texts["encoder_hidden_states"],
            "added_cond_kwargs": added_conditions,
        }
