"""Backbones from transformers: any of its image-text models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedConfig

from mmrl.errors import UserError
from mmrl.generation.transformers import Prefix
from mmrl.policies.models import write_model
from mmrl.policies.tokenizers import Processor
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.heads.head import EncodedPrefix
from mmrl.policies.vla.settings import VisionLanguageActionModel
from mmrl.policies.vlm import loading
from mmrl.policies.vlm import scorer as vlm
from mmrl.policies.vlm.prompts import RolloutTokens, collate, encode, save_processor
from mmrl.rollouts import Prompt


class VisionLanguageBackbone(Backbone):
    """A vision-language model of `mmrl.policies.vlm`. It encodes the prompt once; heads then append embeddings to
    it."""

    def __init__(self, model: nn.Module, processor: Processor, max_prompt_length: int) -> None:
        """max_prompt_length: in tokens. Raises UserError if the tokenizer has no token that can pad prompts."""
        super().__init__()
        self.model, self.processor, self.max_prompt_length = model, processor, max_prompt_length
        tokenizer = processor.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if pad is None:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} has neither pad_token nor eos_token; set one in its files"
            )
        self.pad = pad
        self.width: int = vlm.transformers_model(model).config.get_text_config().hidden_size
        self.vocabulary: int = tokenizer.vocab_size

    @property
    def input_embeddings(self) -> nn.Module:
        return vlm.transformers_model(self.model).get_input_embeddings()

    @property
    def output_weight(self) -> Tensor:
        return vlm.transformers_model(self.model).get_output_embeddings().weight  # type: ignore[return-value]

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[RolloutTokens]:
        """Tokenizes observations. Raises UserError for a prompt longer than `max_prompt_length`."""
        prompts = [
            Prompt(str(i), text, tuple(Image.fromarray(image) for image in cameras))
            for i, (text, *cameras) in enumerate(zip(texts, *images, strict=True))
        ]
        return encode(self.processor, prompts, self.max_prompt_length)

    def collate(self, rows: Sequence[RolloutTokens], device: torch.device) -> dict[str, Tensor]:
        return collate(rows, pad=self.pad, padding_side="right", device=device)

    def encode(self, inputs: dict[str, Tensor], *, every_layer: bool) -> EncodedPrefix:
        return Prefix(vlm.transformers_model(self.model), inputs, every_layer=every_layer)

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        write_model(self.model, folder, state)
        save_processor(self.processor, folder)


def load(path: str, model: VisionLanguageActionModel, max_prompt_length: int) -> VisionLanguageBackbone:
    """Loads the image-text model at `path`, a folder or a hub name, with the options of `model`."""
    network, processor = loading.load_model(path, model)
    return VisionLanguageBackbone(network, processor, max_prompt_length)


def read_config(path: str) -> dict[str, Any]:
    """Returns the config.json of the model at `path`, or of its base model if `path` is a LoRA. Returns {} if there is
    none; `load` then raises an error."""
    try:
        return PreTrainedConfig.get_config_dict(loading.base_of(path))[0]
    except (OSError, ValueError):
        return {}
