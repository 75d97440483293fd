"""ImageReward (Xu et al. 2023, arXiv:2304.05977): a BLIP model, whose text encoder attends to the image, and a head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.rewards.models.weights import linear_chain, read_weights, with_prefix
from mmrl.rewards.types import Score, as_pil, device_of, image_of, score_finite
from mmrl.rewards.visual.preprocessing import from_transformers
from mmrl.rollouts import Prompt, Sample

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # published normalisation of the head's outputs
MAX_TOKENS = 35  # of a prompt
HEAD_WIDTH = 64  # of each attention head of BERT and ViT
_PIXELS = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
_VISION = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)  # parameter names in the published file -> in transformers


class ImageReward:
    """The score (h(T(prompt, V(image))) - mean) / std, about -2 to 2. V is BLIP's image encoder, T its text encoder
    with attention to the image, and h linear layers on T's first token.

    weights: the published ImageReward.pt, or a file with its parameter names; sizes are read from it. tokenizer: a
    folder or hub name of BERT's tokenizer (bert-base-uncased). Prompts are cut at 35 tokens, as published. It is
    differentiable with respect to the image (ReFL). None for an image with NaN or inf. Raises ValueError for weights of
    another layout.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, weights: str, tokenizer: str = "google-bert/bert-base-uncased", device: str | None = None):
        from transformers import AutoTokenizer

        state = read_weights(weights)
        self.vision, self.text = _vision_encoder(with_prefix(state, "blip.visual_encoder.")), _text_encoder(state)
        self.head = linear_chain(with_prefix(state, "mlp.layers."), activation=None, label=f"{weights}: mlp.layers")
        self.processor, self.device = _processor(self.vision.config.image_size), device
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
        except OSError as error:
            raise ValueError(f"tokenizer {tokenizer!r} cannot be loaded: {' '.join(str(error).split()):.200}") from None
        self._preprocess = from_transformers(self.processor)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def differentiable(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Returns scores [rollout] of images [rollout, channel, height, width], with gradients; see
        `mmrl.rewards.visual.clip.ClipReward.differentiable`."""
        return self._forward(self._preprocess(images), prompts)

    @torch.no_grad()
    def _score(self, samples: list[Sample]) -> list[float]:
        images = [as_pil(image_of(sample)) for sample in samples]
        pixels = self.processor(images=images, return_tensors="pt").pixel_values.to(device_of(self.device))
        return self._forward(pixels, [sample.prompt for sample in samples]).tolist()

    def _forward(self, pixels: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Computes scores [rollout] from pixels [rollout, 3, size, size]."""
        for module in (self.vision, self.text, self.head):
            module.to(pixels.device)
        image_states = self.vision(pixel_values=pixels).last_hidden_state
        tokens = self.tokenizer(
            [prompt.text for prompt in prompts],
            padding="max_length",
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(pixels.device)
        outputs = self.text(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=image_states,
            encoder_attention_mask=torch.ones(image_states.shape[:2], dtype=torch.long, device=pixels.device),
        )
        first_token = outputs.last_hidden_state[:, 0]  # [CLS], which stands for the pair of prompt and image
        return (self.head(first_token).squeeze(-1) - MEAN) / STD


def _processor(size: int) -> Any:
    """Returns the image processor for inputs of size x size pixels."""
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=_PIXELS["mean"],
        image_std=_PIXELS["std"],
    )


def _vision_encoder(state: Mapping[str, Tensor]) -> Any:
    """Builds BLIP's image encoder from tensors with timm's parameter names. Raises ValueError if they have other
    names."""
    from transformers import BlipVisionConfig, BlipVisionModel

    if not {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"} <= state.keys():
        raise ValueError(
            "weights: no image encoder of BLIP in the file (blip.visual_encoder.*); give the published ImageReward.pt"
        )
    width, patch = state["cls_token"].shape[-1], state["patch_embed.proj.weight"].shape[-1]
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_num_layers(state, "blocks"),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=patch * round((state["pos_embed"].shape[1] - 1) ** 0.5),  # - 1: without the class token
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    renamed = {_transformers_name(name): value.float() for name, value in state.items()}
    return _load_weights(BlipVisionModel(config), renamed, "blip.visual_encoder")


def _text_encoder(state: Mapping[str, Tensor]) -> nn.Module:
    """Builds BLIP's text encoder without a pooler. Raises ValueError if the weights contain none."""
    from transformers import BlipTextConfig, BlipTextModel

    state = with_prefix(state, "blip.text_encoder.")
    if not {"embeddings.word_embeddings.weight", "encoder.layer.0.crossattention.self.key.weight"} <= state.keys():
        raise ValueError(
            "weights: no text encoder of BLIP in the file (blip.text_encoder.*); give the published ImageReward.pt"
        )
    words = state["embeddings.word_embeddings.weight"]
    config = BlipTextConfig(
        vocab_size=words.shape[0],
        hidden_size=words.shape[1],
        encoder_hidden_size=state["encoder.layer.0.crossattention.self.key.weight"].shape[1],
        intermediate_size=state["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_num_layers(state, "encoder.layer"),
        num_attention_heads=words.shape[1] // HEAD_WIDTH,
        max_position_embeddings=state["embeddings.position_embeddings.weight"].shape[0],
        bos_token_id=None,
        eos_token_id=None,
        sep_token_id=None,
        pad_token_id=0,
    )
    tensors = {name: value.float() for name, value in state.items() if name != "embeddings.position_ids"}
    return _load_weights(BlipTextModel(config, add_pooling_layer=False), tensors, "blip.text_encoder")


def _num_layers(state: Mapping[str, Tensor], prefix: str) -> int:
    """Returns the number of layers, from names such as prefix.11.weight."""
    numbers = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in state)
    return 1 + max(int(number[1]) for number in numbers if number)


def _transformers_name(name: str) -> str:
    """Converts a parameter name of the published image encoder to that of transformers."""
    for pattern, replacement in _VISION:
        name, count = re.subn(pattern, replacement, name)
        if count:
            break
    return name


def _load_weights(model: nn.Module, state: Mapping[str, Tensor], module_name: str) -> nn.Module:
    """Loads weights strictly and freezes the module. module_name: for the message. Raises ValueError if they do not
    fit."""
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ValueError(
            f"weights: {module_name} does not match BLIP; give the published ImageReward.pt: {text:.300}"
        ) from None
    return model.eval().requires_grad_(False)
