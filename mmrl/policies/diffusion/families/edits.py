"""Families that edit an image (the source): FLUX.1-Kontext, Qwen-Image-Edit and Qwen-Image-Edit-Plus, FLUX.2 klein.

The latents of the source are part of the condition of a prompt, and further tokens of the network's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as qwen_edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as qwen_edit_plus
from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.families.autoencoders import PatchedAutoencoder
from mmrl.policies.diffusion.families.images import Flux, QwenImage
from mmrl.policies.diffusion.families.pipeline import FlowPipeline, checked_sides
from mmrl.policies.diffusion.family import Condition, ConditionInputs, ModelNotes, Resolution, Shape
from mmrl.runtime.template_limits import render_template


class FluxKontext(Flux):
    """FLUX.1-Kontext (arXiv 2506.15742): tokens of the source have the first position id 1, those of the image 0."""

    condition_parts = ("vae",)

    def _condition(self, inputs: ConditionInputs, shape: Shape) -> dict[str, Tensor]:
        return {**self.text_cache.embed(inputs.text), "source": self._source(inputs, shape)}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. A token of the source image has the position id of the
        same token of the generated image, but with 1 in the first coordinate. The source's latents are removed here,
        since `predict` appends them to the generated image's latents."""
        inputs = super()._inputs(time, texts, size, guidance)
        positions = inputs["img_ids"]
        inputs["img_ids"] = torch.cat([positions, positions + positions.new_tensor([1, 0, 0])])
        del inputs["source"]
        return inputs


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit (arXiv 2508.02324): the text encoder, a vision-language model, gets the source too. Source and
    result have the same size."""

    module_of_sizes: ClassVar[ModuleType] = qwen_edit
    condition_parts = ("vae",)
    longest: ClassVar[tuple[str, int] | None] = None  # the pipeline truncates no text

    def truncated_tokens(self, text: str) -> int:
        return 0

    def _condition(self, inputs: ConditionInputs, shape: Shape) -> dict[str, Tensor]:
        """Returns the condition of one prompt: embeddings of its text and source image, and the source's latents."""
        source = self._source(inputs, shape)
        tokens, mask = self.pipe.encode_prompt(
            prompt=inputs.text, image=self._encoder_image(inputs), device=self.device
        )
        if mask is not None and not bool(mask.all()):
            raise UserError(f"prompt {inputs.text!r}: its embedding has padding, which a single prompt should not have")
        return {"encoder_hidden_states": tokens, "source": source}

    def _encoder_image(self, inputs: ConditionInputs) -> Image.Image | list[Image.Image]:
        """Returns the source as the pipeline passes it to the text encoder: resized, and in a list if it takes
        several."""
        return self._resized(inputs, 1024**2)

    def _resized(self, inputs: ConditionInputs, area: int) -> Image.Image:
        """Returns the source, resized by the pipeline to about `area` pixels."""
        image = inputs.images[0].convert("RGB")
        width, height, *_ = self.module_of_sizes.calculate_dimensions(area, image.width / image.height)
        return self.pipe.image_processor.resize(image, height, width)

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. `img_shapes` lists the shapes of the result and of the
        source, which are equal."""
        texts_only = {key: value for key, value in texts.items() if key != "source"}
        inputs = super()._inputs(time, texts_only, size, guidance)
        inputs["img_shapes"] = [[shape, shape] for (shape,) in inputs["img_shapes"]]
        return inputs

    def _texts(self, conditions: Sequence[Condition], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stacks text embeddings, as Qwen-Image does, and the latents of the sources, [condition, ...]."""
        texts = super()._texts(conditions, device, dtype)
        return texts | {"source": torch.stack([c["source"] for c in conditions]).to(device)}


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus (2509 and later), with a single source."""

    module_of_sizes: ClassVar[ModuleType] = qwen_edit_plus

    def _encoder_image(self, inputs: ConditionInputs) -> Image.Image | list[Image.Image]:
        return [self._resized(inputs, 384**2)]


class Flux2Klein(FlowPipeline):
    """FLUX.2 klein: generates an image from text, or edits one source. Latents are 2 x 2 patches of the VAE's,
    normalised by its running statistics."""

    encoders = ("text_encoder",)
    longest: ClassVar[tuple[str, int] | None] = ("text_encoder", 512)
    condition_parts = ("vae",)
    packed = True
    patch = 1
    autoencoder_kind = PatchedAutoencoder
    SOURCE_POSITION = 10  # first position id of the source's tokens; that of generated tokens is 0

    @property
    def notes(self) -> ModelNotes:
        note = "the pipeline is distilled (is_distilled) and ignores guidance"
        return ModelNotes(distilled_guidance=note if self.pipe.config.is_distilled else None)

    def latent_shape(self, resolution: Resolution, frames: int | None = None) -> Shape:
        """Returns [channel, height, width] of latents, where one latent is a patch of 2 x 2 latents of the VAE.
        Raises UserError unless `resolution` is a multiple of the patch's side in pixels."""
        if frames is not None:
            return super().latent_shape(resolution, frames)  # raises UserError
        scale = 2 * self.pipe.vae_scale_factor
        side = self.default_side()
        height, width = checked_sides(resolution, (side, side), scale)
        return self.module.config.in_channels, height // scale, width // scale

    def meta_condition(self, shape: Shape) -> Condition:
        condition = super().meta_condition(shape)
        del condition["source"]  # the estimate is for generation from text
        return condition

    def _mu(self, tokens: int, steps: int) -> float:
        return compute_empirical_mu(tokens, steps)

    def _condition(self, inputs: ConditionInputs, shape: Shape) -> dict[str, Tensor]:
        embeddings = self.text_cache.embed(inputs.text)
        return {**embeddings, "source": self._source(inputs, shape)} if inputs.images else embeddings

    def _pixels(self, shape: Shape) -> tuple[int, int]:
        height, width = (2 * side * self.pipe.vae_scale_factor for side in shape[-2:])
        return height, width

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return {"encoder_hidden_states": (self.text_tokens or 0, self.module.config.joint_attention_dim)}

    def _encode(self, text: str) -> dict[str, Tensor]:
        tokens, _ = self.pipe.encode_prompt(text, device=self.device, **self._limit)
        return {"encoder_hidden_states": tokens}

    def _encoder_text(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        tokenizer = self.pipe.tokenizer
        return render_template(f"model.path={tokenizer.name_or_path}", tokenizer, messages, enable_thinking=False)

    def _texts(self, conditions: Sequence[Condition], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stacks conditions to inputs of the network, [condition, ...]. Raises UserError if only some have a source."""
        if len({"source" in condition for condition in conditions}) > 1:
            raise UserError(
                "some prompts of a batch have an image to edit and some have none; give an image to all prompts of the "
                "task, or to none"
            )
        return super()._texts(conditions, device, dtype)

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        """Returns the inputs of the network besides the latents. Position ids have four coordinates: image (0: the
        generated one, SOURCE_POSITION: the source), row, column, and index in the text. size: height and width of the
        latents. Raises UserError if the network needs a guidance scale and `guidance` is None."""
        rows, columns = (torch.arange(side, device=time.device) for side in size)
        zero, tokens = rows.new_zeros(1), texts["encoder_hidden_states"]
        positions = torch.cartesian_prod(zero, rows, columns, zero)
        if "source" in texts:
            positions = torch.cat([positions, positions + positions.new_tensor([self.SOURCE_POSITION, 0, 0, 0])])
        token_index = torch.arange(tokens.shape[1], device=time.device)
        if self.module.config.guidance_embeds and guidance is None:
            raise UserError(
                "the FLUX.2 model at model.path needs a guidance scale as an input; set denoising.embedded_guidance"
            )
        return {
            "timestep": time / 1000,
            "encoder_hidden_states": tokens,
            "txt_ids": torch.cartesian_prod(zero, zero, zero, token_index),
            "img_ids": positions,
            "guidance": torch.full_like(time, guidance or 0.0) if self.module.config.guidance_embeds else None,
        }
