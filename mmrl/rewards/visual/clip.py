"""Rewards from the cosine of the CLIP embeddings of an image and its prompt, and from a head on the image's
embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.rewards.models.weights import linear_chain, read_weights
from mmrl.rewards.types import Score, as_pil, device_of, image_of, score_finite
from mmrl.rewards.visual.preprocessing import from_open_clip, from_transformers
from mmrl.rollouts import Prompt, Sample


class Encoder(Protocol):
    """A CLIP model with embeddings of length 1. temperature: exp(logit_scale).

    images, texts: embed PIL images or strings, [item, width]. pixels: embeds images [image, channel, height, width] on
    the model's device, with gradients to them.
    """

    model: nn.Module
    temperature: float

    def images(self, images: list[Image.Image], device: torch.device) -> Tensor: ...
    def pixels(self, images: Tensor) -> Tensor: ...
    def texts(self, texts: list[str], device: torch.device) -> Tensor: ...


class OpenClip:
    """A CLIP model of open_clip. name: such as 'ViT-B-32', with weights `pretrained` (a tag or a file); or
    'hf-hub:ORG/NAME' or 'local-dir:PATH'. Raises ValueError if the model or its weights cannot be loaded."""

    def __init__(self, name: str, pretrained: str | None):
        try:
            import open_clip

            model, self._prepare = open_clip.create_model_from_pretrained(name, pretrained)
            self._tokenize: Callable[[list[str]], Tensor] = open_clip.get_tokenizer(name)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"open_clip cannot load model {name!r} with weights {pretrained!r}: {error}") from error
        self.model: Any = model.eval().requires_grad_(False)
        self.temperature = float(self.model.logit_scale.exp())

    def images(self, images: list[Image.Image], device: torch.device) -> Tensor:
        return self.model.encode_image(torch.stack([self._prepare(p) for p in images]).to(device), normalize=True)

    def pixels(self, images: Tensor) -> Tensor:
        """Embeds image tensors; see `Encoder`. Raises ValueError if the model's preprocessing has no differentiable
        version here."""
        inputs = from_open_clip(self.model.visual.preprocess_cfg)(images)
        return self.model.encode_image(inputs, normalize=True)

    def texts(self, texts: list[str], device: torch.device) -> Tensor:
        return self.model.encode_text(self._tokenize(texts).to(device), normalize=True)


class TransformersClip:
    """A CLIPModel of transformers from a folder or a hub name. processor: another folder for the preprocessing. Raises
    ValueError if either cannot be loaded."""

    def __init__(self, path: str, processor: str | None = None):
        from transformers import CLIPModel, CLIPProcessor

        try:
            model = CLIPModel.from_pretrained(path, dtype=torch.float32)
            self._processor = CLIPProcessor.from_pretrained(processor or path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"CLIP model {path!r} cannot be loaded by transformers (set pretrained for open_clip): {error}"
            ) from error
        self.model: Any = model.eval().requires_grad_(False)
        self.temperature = float(self.model.logit_scale.exp())

    def images(self, images: list[Image.Image], device: torch.device) -> Tensor:
        inputs = self._processor(images=images, return_tensors="pt").to(device)
        return nn.functional.normalize(self.model.get_image_features(**inputs).pooler_output, dim=-1)

    def pixels(self, images: Tensor) -> Tensor:
        """Embeds image tensors; see `Encoder`. Raises ValueError if the model's preprocessing has no differentiable
        version here."""
        inputs = from_transformers(self._processor.image_processor)(images)
        return nn.functional.normalize(self.model.get_image_features(pixel_values=inputs).pooler_output, dim=-1)

    def texts(self, texts: list[str], device: torch.device) -> Tensor:
        """Returns the embeddings of texts, [text, width], of length 1."""
        length = self.model.config.text_config.max_position_embeddings
        inputs = self._processor(text=texts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(
            device
        )
        return nn.functional.normalize(self.model.get_text_features(**inputs).pooler_output, dim=-1)


def encoder(model: str, pretrained: str | None = None) -> Encoder:
    """Loads a CLIP model: by open_clip if `pretrained` is given or the name begins with hf-hub: or local-dir:, else by
    transformers. Raises ValueError, before anything is downloaded, for a `model` that only open_clip knows."""
    if pretrained is not None or model.startswith(("hf-hub:", "local-dir:")):
        return OpenClip(model, pretrained)
    if not Path(model).exists() and "/" not in model:
        raise ValueError(
            f"CLIP model {model!r}: there is no such folder; for a model of open_clip set pretrained to a tag or "
            "a file of weights"
        )
    return TransformersClip(model)


class ClipReward:
    """A reward of factor x cosine(image, prompt text). None for an image with NaN or inf."""

    scope: Literal["sample"] = "sample"

    def __init__(self, encoder: Encoder, factor: float, device: str | None):
        self.encoder, self.factor, self.device = encoder, factor, device

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def differentiable(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Returns scores [rollout] of images [rollout, channel, height, width], with gradients to them.

        The model's preprocessing is done in torch. So scores differ from `score` by the rounding of resized pixels to 8
        bits.
        """
        self.encoder.model.to(images.device)
        return self._cosine(self.encoder.pixels(images), prompts)

    @torch.no_grad()
    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns factor x cosine of image and prompt for each sample, without a gradient."""
        device = device_of(self.device)
        self.encoder.model.to(device)
        images = self.encoder.images([as_pil(image_of(sample)) for sample in samples], device)
        return self._cosine(images, [sample.prompt for sample in samples]).tolist()

    def _cosine(self, embeddings: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Returns factor x cosine of the image embeddings [rollout, width] and the text embeddings of the prompts,
        [rollout]."""
        # A group shares its prompt, so each text is encoded once.
        texts = list(dict.fromkeys(prompt.text for prompt in prompts))
        indices = [texts.index(prompt.text) for prompt in prompts]
        with torch.no_grad():
            text_embeddings = self.encoder.texts(texts, embeddings.device)
        return self.factor * (embeddings * text_embeddings[indices]).sum(-1)


def clip_similarity(*, model: str, pretrained: str | None = None, device: str | None = None) -> ClipReward:
    """Builds a reward: the cosine of the CLIP embeddings of image and prompt, -1 to 1 (Radford et al. 2021,
    arXiv:2103.00020).

    model, pretrained: a model of open_clip with a tag or file of weights; or `model` alone, a folder or hub name that
    transformers' CLIPModel loads.
    """
    return ClipReward(encoder(model, pretrained), 1.0, device)


def pickscore(*, model: str, processor: str | None = None, scale: float = 1.0, device: str | None = None) -> ClipReward:
    """Builds the PickScore reward, exp(logit_scale) cos(E_image(image), E_text(prompt)) / scale (Kirstain et al. 2023,
    arXiv:2305.01569).

    model: a folder or hub name for transformers, such as yuvalkirstain/PickScore_v1. processor: the folder or hub name
    of the preprocessing, if `model` has none, such as laion/CLIP-ViT-H-14-laion2B-s32B-b79K. scale: divisor of
    the score; Flow-GRPO uses 26, for scores near 1.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    clip_model = TransformersClip(model, processor)
    return ClipReward(clip_model, clip_model.temperature / scale, device)


def hpsv2(*, weights: str, model: str = "ViT-H-14", device: str | None = None) -> ClipReward:
    """Builds the HPS v2 reward: the cosine of image and prompt under the fine-tuned CLIP of Wu et al. 2023
    (arXiv:2306.09341).

    weights: the published checkpoint (HPS_v2_compressed.pt, HPS_v2.1_compressed.pt) for open_clip's `model`. Images
    that are not square are cropped to their centre.
    """
    return ClipReward(OpenClip(model, weights), 1.0, device)


class Aesthetic:
    """LAION's aesthetic predictor, w . E(image) + b with an embedding E of length 1: about 1 to 10 on real images.

    head: a file (.safetensors, .pth) of linear layers on embeddings of OpenAI's CLIP ViT-L/14: LAION's single layer, or
    its improved stack, which is linear as well. model, pretrained: as for `clip_similarity`. None for an image with NaN
    or inf. Raises ValueError if the layers do not fit.
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
        # the embedding of a black image shows the width of embeddings
        probe = self.encoder.images([Image.new("RGB", (8, 8))], torch.device("cpu"))
        if probe.shape[1] != self.head[0].in_features:
            raise ValueError(
                f"head {head} takes {self.head[0].in_features} features, but {model} has embeddings of "
                f"{probe.shape[1]}; choose the model that the head was trained for"
            )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def differentiable(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Returns scores [rollout] of images [rollout, channel, height, width], with gradients; see
        `ClipReward.differentiable`."""
        self.encoder.model.to(images.device)
        return self.head.to(images.device)(self.encoder.pixels(images)).squeeze(-1)

    @torch.no_grad()
    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns the head's score of the embedding of each sample's image, without a gradient."""
        device = device_of(self.device)
        self.encoder.model.to(device)
        embeddings = self.encoder.images([as_pil(image_of(sample)) for sample in samples], device)
        return self.head.to(device)(embeddings).squeeze(-1).tolist()


def _head(path: str) -> nn.Sequential:
    """Reads the linear layers of a file. Raises ValueError if a layer has no bias, or the last one not exactly one
    output."""
    state = read_weights(path)
    names = [name for name in state if name.endswith("weight")]
    if missing := [name for name in names if name.removesuffix("weight") + "bias" not in state]:
        raise ValueError(
            f"head {path} has no bias for {', '.join(missing)}; choose a file of linear layers with biases"
        )
    layers = linear_chain(state, None, f"head {path}")
    if (outputs := layers[-1].out_features) != 1:
        raise ValueError(f"head {path} has {outputs} outputs, not one")
    return layers
