"""Rewards from the cosine of an image's and a prompt's CLIP embeddings, and from a head on the image's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.rewards.models.weights import linear_chain, read_weights
from mmrl.rewards.types import Score, as_pil, device_of, image_of, score_finite
from mmrl.rewards.visual.preprocessing import of_open_clip, of_transformers
from mmrl.rollouts import Prompt, Sample


class Encoder(Protocol):
    """A CLIP model whose embeddings have length 1. `temperature` is exp(logit_scale). `pixels` embeds images [image,
    channel, height, width] on the model's device, with their gradient."""

    model: nn.Module
    temperature: float

    def images(self, images: list[Image.Image], device: torch.device) -> Tensor: ...
    def pixels(self, images: Tensor) -> Tensor: ...
    def texts(self, texts: list[str], device: torch.device) -> Tensor: ...


class OpenClip:
    """A model of open_clip: 'ViT-B-32' with weights `pretrained` (tag or file), 'hf-hub:ORG/NAME', 'local-dir:PATH'.

    Raises ValueError where it or its weights can not be had.
    """

    def __init__(self, name: str, pretrained: str | None):
        try:
            import open_clip

            model, self._prepare = open_clip.create_model_from_pretrained(name, pretrained)
            self._tokenize: Callable[[list[str]], Tensor] = open_clip.get_tokenizer(name)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"open_clip model {name!r}, weights {pretrained!r}: {error}") from error
        self.model: Any = model.eval().requires_grad_(False)
        self.temperature = float(self.model.logit_scale.exp())

    def images(self, images: list[Image.Image], device: torch.device) -> Tensor:
        return self.model.encode_image(torch.stack([self._prepare(p) for p in images]).to(device), normalize=True)

    def pixels(self, images: Tensor) -> Tensor:
        """Raises ValueError for a model whose preprocessing has no gradient here."""
        inputs = of_open_clip(self.model.visual.preprocess_cfg)(images)
        return self.model.encode_image(inputs, normalize=True)

    def texts(self, texts: list[str], device: torch.device) -> Tensor:
        return self.model.encode_text(self._tokenize(texts).to(device), normalize=True)


class TransformersClip:
    """A CLIPModel of transformers from a folder or a hub name; `processor` names another folder for the preprocessing.

    Raises ValueError where either can not be loaded.
    """

    def __init__(self, path: str, processor: str | None = None):
        from transformers import CLIPModel, CLIPProcessor

        try:
            model = CLIPModel.from_pretrained(path, dtype=torch.float32)
            self._processor = CLIPProcessor.from_pretrained(processor or path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"CLIP model {path!r} of transformers (one of open_clip needs weights): {error}"
            ) from error
        self.model: Any = model.eval().requires_grad_(False)
        self.temperature = float(self.model.logit_scale.exp())

    def images(self, images: list[Image.Image], device: torch.device) -> Tensor:
        inputs = self._processor(images=images, return_tensors="pt").to(device)
        return nn.functional.normalize(self.model.get_image_features(**inputs).pooler_output, dim=-1)

    def pixels(self, images: Tensor) -> Tensor:
        """Raises ValueError for a model whose preprocessing has no gradient here."""
        inputs = of_transformers(self._processor.image_processor)(images)
        return nn.functional.normalize(self.model.get_image_features(pixel_values=inputs).pooler_output, dim=-1)

    def texts(self, texts: list[str], device: torch.device) -> Tensor:
        """Returns normalised embeddings of texts, [text, width]."""
        length = self.model.config.text_config.max_position_embeddings
        inputs = self._processor(text=texts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(
            device
        )
        return nn.functional.normalize(self.model.get_text_features(**inputs).pooler_output, dim=-1)


def encoder(model: str, pretrained: str | None = None) -> Encoder:
    """open_clip's where `pretrained` or a schema (hf-hub:, local-dir:) says so, else transformers' folder or name."""
    if pretrained is not None or model.startswith(("hf-hub:", "local-dir:")):
        return OpenClip(model, pretrained)
    return TransformersClip(model)


class ClipReward:
    """factor x cosine(image, prompt.text). None for an image that holds NaN or inf."""

    scope: Literal["sample"] = "sample"

    def __init__(self, encoder: Encoder, factor: float, device: str | None):
        self.encoder, self.factor, self.device = encoder, factor, device

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def differentiable(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Computes scores [rollout] with the gradient by images [rollout, channel, height, width], through the model's
        own preprocessing in torch; they differ from `score` by the rounding of resized pixels to 8 bits."""
        self.encoder.model.to(images.device)
        return self._against(self.encoder.pixels(images), prompts)

    @torch.no_grad()
    def _score(self, samples: list[Sample]) -> list[float]:
        device = device_of(self.device)
        self.encoder.model.to(device)
        images = self.encoder.images([as_pil(image_of(sample)) for sample in samples], device)
        return self._against(images, [sample.prompt for sample in samples]).tolist()

    def _against(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Computes factor x cosine of embeddings [rollout, number] and those of the prompts; [rollout]."""
        # A group shares its prompt, so each text is encoded once.
        texts = list(dict.fromkeys(prompt.text for prompt in prompts))
        row = [texts.index(prompt.text) for prompt in prompts]
        with torch.no_grad():
            embedded = self.encoder.texts(texts, images.device)
        return self.factor * (images * embedded[row]).sum(-1)


def clip_similarity(*, model: str, pretrained: str | None = None, device: str | None = None) -> ClipReward:
    """cos(E_image(image), E_text(prompt)), -1 to 1 (Radford et al. 2021, arXiv:2103.00020).

    `model` and `pretrained` name a model of open_clip with a tag or a file of weights, or `model` alone a folder or hub
    name that transformers' CLIPModel loads.
    """
    return ClipReward(encoder(model, pretrained), 1.0, device)


def pickscore(*, model: str, processor: str | None = None, scale: float = 1.0, device: str | None = None) -> ClipReward:
    """exp(logit_scale) cos(E_image(image), E_text(prompt)) / scale (Kirstain et al. 2023, arXiv:2305.01569).

    `model`: a folder or hub name for transformers, as yuvalkirstain/PickScore_v1; `processor` where the preprocessing
    lies elsewhere, as laion/CLIP-ViT-H-14-laion2B-s32B-b79K. Flow-GRPO divides by scale = 26, to near 1.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    clip_model = TransformersClip(model, processor)
    return ClipReward(clip_model, clip_model.temperature / scale, device)


def hpsv2(*, weights: str, model: str = "ViT-H-14", device: str | None = None) -> ClipReward:
    """cos(E_image(image), E_text(prompt)) of the fine-tuned CLIP of Wu et al. 2023 (HPS v2, arXiv:2306.09341).

    `weights`: the published checkpoint (HPS_v2_compressed.pt, HPS_v2.1_compressed.pt) for open_clip's `model`. Images
    that are not square lose their margins.
    """
    return ClipReward(OpenClip(model, weights), 1.0, device)


class Aesthetic:
    """w . E(image) + b, with E of length 1: LAION's aesthetic predictor, about 1 to 10 on real images.

    `head`: a file (.safetensors, .pth) of linear layers, LAION's single one or its improved stack, which has nothing
    but linear layers either; they belong to the embeddings of OpenAI's CLIP ViT-L/14. `model` and `pretrained` as in
    `clip_similarity`. None for an image that holds NaN or inf. Raises ValueError where the layers do not fit.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        head: str,
        model: str = "openai/clip-vit-large-patch14",
        pretrained: str | None = None,
        device: str | None = None,
    ):
        self.head, self.encoder, self.device = _head(head), encoder(model, pretrained), device
        probe = self.encoder.images([Image.new("RGB", (8, 8))], torch.device("cpu"))
        if probe.shape[1] != self.head[0].in_features:
            raise ValueError(
                f"head {head} takes {self.head[0].in_features} features, and {model} embeds in {probe.shape[1]}"
            )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def differentiable(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Computes scores [rollout] with the gradient by images [rollout, channel, height, width]; see
        `ClipReward.differentiable`."""
        self.encoder.model.to(images.device)
        return self.head.to(images.device)(self.encoder.pixels(images)).squeeze(-1)

    @torch.no_grad()
    def _score(self, samples: list[Sample]) -> list[float]:
        device = device_of(self.device)
        self.encoder.model.to(device)
        embeddings = self.encoder.images([as_pil(image_of(sample)) for sample in samples], device)
        return self.head.to(device)(embeddings).squeeze(-1).tolist()


def _head(path: str) -> nn.Sequential:
    """Returns the linear layers of a file. Raises ValueError where they have no bias, or more than one output."""
    state = read_weights(path)
    names = [name for name in state if name.endswith("weight")]
    if missing := [name for name in names if name.removesuffix("weight") + "bias" not in state]:
        raise ValueError(f"head {path} has no bias for {', '.join(missing)}")
    layers = linear_chain(state, None, f"head {path}")
    if (outputs := layers[-1].out_features) != 1:
        raise ValueError(f"head {path} has {outputs} outputs, not one")
    return layers
