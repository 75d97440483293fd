"""Families that edit a picture: FLUX.1-Kontext, Qwen-Image-Edit and its Plus. The source's latents are tokens beside
those that are drawn, and belong to the prompt's condition."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.diffusion.families.pictures import Flux, QwenImage
from mmrl.policies.diffusion.family import Asked, Shape


class FluxKontext(Flux):
    """FLUX.1-Kontext (arXiv 2506.15742): the source's tokens have 1 as the first of their places."""

    condition_parts = ("vae",)

    def _condition(self, asked: Asked, shape: Shape) -> dict[str, Tensor]:
        return {**self._words(asked.text), "source": self._source(asked, shape)}

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        inputs = super()._inputs(time, texts, size, guidance)
        places = inputs["img_ids"]
        inputs["img_ids"] = torch.cat([places, places + places.new_tensor([1, 0, 0])])
        del inputs["source"]
        return inputs


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit (arXiv 2508.02324): the language model sees the source too. Both pictures have one size."""

    condition_parts = ("vae",)
    longest = None  # the pipeline reads all of a text

    def cut(self, text: str) -> int:
        return 0

    def _condition(self, asked: Asked, shape: Shape) -> dict[str, Tensor]:
        source = self._source(asked, shape)
        tokens, mask = self.pipe.encode_prompt(prompt=asked.text, image=self._seen(asked), device=self.device)
        if mask is not None and not bool(mask.all()):
            raise UserError(f"prompt {asked.text!r}: its embedding is padded, which one prompt's never is")
        return {"encoder_hidden_states": tokens, "source": source}

    def _seen(self, asked: Asked) -> Any:
        """The picture as the language model gets it."""
        return self._resized(asked, 1024**2)

    def _resized(self, asked: Asked, area: int) -> Any:
        """The picture at about `area` pixels, as the pipeline resizes it."""
        image = asked.images[0].convert("RGB")
        width, height, *_ = calculate_dimensions(area, image.width / image.height)
        return self.pipe.image_processor.resize(image, height, width)

    def _inputs(
        self, time: Tensor, texts: dict[str, Tensor], size: tuple[int, int], guidance: float | None
    ) -> dict[str, Any]:
        own = {key: value for key, value in texts.items() if key != "source"}
        inputs = super()._inputs(time, own, size, guidance)
        inputs["img_shapes"] = [[shape, shape] for (shape,) in inputs["img_shapes"]]
        return inputs

    def _texts(self, conditions: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        texts = super()._texts(conditions, device, dtype)
        return texts | {"source": torch.stack([c["source"] for c in conditions]).to(device)}


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus (2509 and later), with one source."""

    def _seen(self, asked: Asked) -> Any:
        return [self._resized(asked, 384**2)]


