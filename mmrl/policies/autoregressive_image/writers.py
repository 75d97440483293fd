"""Adapters of transformers models that write images: how they read text and image tokens, and how tokens become pixels.

Both kinds of tokens share one range of ids: ids from `first` on are image tokens, those below are text.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.utils import cached_file

from mmrl.errors import UserError
from mmrl.policies import codebook
from mmrl.policies.codebook import Codebook
from mmrl.policies.tokenizers import Tokenizer
from mmrl.policies.vlm.scorer import transformers_model

# Parts of Janus that read images and decode image tokens: none of them takes part in writing.
UNTRAINED = {"vision_model", "aligner", "vqmodel"}
AT_ONCE = 8  # images that are decoded together
FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja", "chat_template.json")


class CacheOptions(TypedDict, total=False):
    """Arguments of a language model about its key-value cache."""

    past_key_values: Cache
    use_cache: bool


class ReadingOptions(CacheOptions, total=False):
    """Arguments of a language model besides tokens and mask."""

    position_ids: Tensor


class ImageTokenWriter:
    """A language model that writes text and image tokens.

    first, count: the range of image tokens. tokens_per_image: image tokens of an image. between: tokens between text
    and image tokens, which are not decisions.
    """

    first: int
    count: int
    tokens_per_image: int
    between: tuple[int, ...] = ()

    def check(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Raises UserError where image tokens are not tokens of the model."""

    def content(self, text: str) -> str | list[dict[str, str]]:
        """Returns a user's text as the chat template takes it."""
        return text

    def hidden(self, model: nn.Module, ids: Tensor, mask: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        """Returns what `text_logits` and `image_logits` read behind each of the tokens `ids` [row, token]; it can be
        indexed as a tensor [row, token, ...]."""
        raise NotImplementedError

    def text_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns logits of tokens below `first`, [..., text token]."""
        raise NotImplementedError

    def image_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns logits of image tokens, [..., image token]."""
        raise NotImplementedError

    def unconditional(self, negative: Tensor, conditional: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Returns the tokens before an unconditional image, [token]. negative: the tokens of the negative prompt;
        conditional: the tokens before the image with the prompt."""
        raise NotImplementedError

    def image_input(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Returns the tokens with which an image, [position], stands as an input among text, [token]."""
        raise NotImplementedError

    def hidden_with_images(
        self, model: nn.Module, ids: Tensor, mask: Tensor, images: Tensor, **options: Unpack[ReadingOptions]
    ) -> Tensor:
        """Returns `hidden` of rows with one image each, laid out as by `image_input`. images: [row, channel, height,
        width]."""
        return self.hidden(model, ids, mask, **options)

    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Decodes tokens [image, position] to images [image, channel, height, width], fp32 on the CPU."""
        raise NotImplementedError

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        """Encodes images [image, channel, height, width] in [0, 1] as tokens [image, position] int64. Raises UserError
        for images of another size."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Saves the files that belong to image tokens beside the model."""


class CausalWriter(ImageTokenWriter):
    """A causal language model with a codebook beside it: image tokens are tokens of its vocabulary."""

    def __init__(self, book: Codebook) -> None:
        self.codebook, self.first, self.count = book, book.first, len(book.patches)
        self.tokens_per_image = book.tokens_per_image

    def check(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        self.codebook.other_tokens(transformers_model(model).get_output_embeddings().weight.shape[0])

    def hidden(self, model: nn.Module, ids: Tensor, mask: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        """Returns the logits themselves."""
        return model(input_ids=ids, attention_mask=mask, **options)[0]

    def text_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden[..., : self.first]

    def image_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden[..., self.first : self.first + self.count]

    def unconditional(self, negative: Tensor, conditional: Tensor, tokenizer: Tokenizer) -> Tensor:
        return negative

    def image_input(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Returns the image's own tokens."""
        return tokens

    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return self.codebook.decode(tokens)

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        return self.codebook.encode(images)

    def save(self, folder: Path) -> None:
        codebook.write(folder, self.codebook)


class JanusWriter(ImageTokenWriter):
    """A Janus model of transformers: image tokens have embeddings and a head of their own, and a decoder makes the
    image."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, path: str) -> None:
        """path: the folder or hub name of the processor's files, which are saved beside the model."""
        config = transformers_model(model).config
        self.files = [file for name in FILES if (file := cached(path, name)) is not None]
        self.first, self.count = config.text_config.vocab_size, config.vq_config.num_embeddings
        self.side = config.vq_config.num_patches
        self.tokens_per_image = self.side**2
        self.placeholder = config.image_token_id
        self.patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        self.size = (config.vq_config.out_channels, *[config.vision_config.image_size] * 2)
        begin = tokenizer.special_tokens_map.get("boi_token")
        if begin is None:
            raise UserError(
                "the tokenizer beside a Janus model has no boi_token, which stands before image tokens; take the "
                "one that the model was published with"
            )
        self.between = (tokenizer.convert_tokens_to_ids(str(begin)),)

    def hidden(self, model: nn.Module, ids: Tensor, mask: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        core = core_of(model)
        is_image = ids >= self.first
        text_embeddings = core.get_input_embeddings()(ids.masked_fill(is_image, 0))
        image_embeddings = core.prepare_embeddings_for_image_generation((ids - self.first).clamp(min=0))
        embeddings = image_embeddings.to(text_embeddings.dtype).where(is_image[..., None], text_embeddings)
        return core.model.language_model(inputs_embeds=embeddings, attention_mask=mask, **options).last_hidden_state

    def text_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        core = core_of(model)
        return core.lm_head(hidden)

    def image_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return core_of(model).model.generation_head(hidden)

    def content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    def save(self, folder: Path) -> None:
        for file in self.files:
            if not (folder / file.name).exists():
                shutil.copy(file, folder / file.name)

    def unconditional(self, negative: Tensor, conditional: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Replaces all text by as many padding tokens, as in the model's training."""
        keep = (conditional == tokenizer.bos_token_id) | (conditional == self.between[0])
        return conditional.where(keep, torch.tensor(tokenizer.pad_token_id))

    def image_input(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Returns placeholders of the vision tower's features: the model reads images in another way than it writes
        them."""
        end = tokenizer.special_tokens_map.get("eoi_token")
        last = [] if end is None else [tokenizer.convert_tokens_to_ids(str(end))]
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return torch.tensor([*first, self.between[0], *[self.placeholder] * self.patches, *last])

    def hidden_with_images(
        self, model: nn.Module, ids: Tensor, mask: Tensor, images: Tensor, **options: Unpack[ReadingOptions]
    ) -> Tensor:
        core = core_of(model)
        weight = next(core.model.vision_model.parameters())
        outputs = core.model(
            input_ids=ids, attention_mask=mask, pixel_values=images.to(weight).clamp(0, 1) * 2 - 1, **options
        )
        return outputs.last_hidden_state

    @torch.no_grad()
    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Decodes AT_ONCE images at a time: the decoder takes a hundred times the memory of its image."""
        decoder = core_of(model).model.vqmodel
        device = next(decoder.parameters()).device
        parts = [decoder.decode(part.to(device)).float().cpu() for part in (tokens - self.first).split(AT_ONCE)]
        return (torch.cat(parts) + 1) / 2

    @torch.no_grad()
    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        if tuple(images.shape[1:]) != self.size:
            raise UserError(f"images of {list(images.shape[1:])} do not fit a model that draws {list(self.size)}")
        encoder = core_of(model).model.vqmodel
        weight = next(encoder.parameters())
        image_tokens = encoder.encode(images.to(weight) * 2 - 1).image_tokens
        return self.first + image_tokens.view(len(images), self.tokens_per_image).cpu()


def core_of(model: nn.Module) -> Any:
    """Returns the Janus model itself, untyped: torch's types take what it holds for tensors."""
    return transformers_model(model)


def freeze_readers(model: nn.Module) -> None:
    """Freezes the parts that read images and decode tokens: a trained decoder would change what tokens mean."""
    for name, parameter in model.named_parameters():
        if set(name.split(".")) & UNTRAINED:
            parameter.requires_grad_(False)


def cached(path: str, name: str) -> Path | None:
    """Returns a file of a model by folder or hub name, None where there is none."""
    file = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)
