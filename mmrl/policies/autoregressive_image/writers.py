"""Transformers that write images as codes: how they read tokens of both kinds, and what their codes look like.

Text and codes share one line of numbers: tokens from `first` on are codes, those below are words.
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

# Parts of Janus that read images and make pixels of codes: they have no part in what is written.
UNTRAINED = {"vision_model", "aligner", "vqmodel"}
AT_ONCE = 8  # images that are decoded together
FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja", "chat_template.json")


class CacheOptions(TypedDict, total=False):
    """What a language model is told of keys and values."""

    past_key_values: Cache
    use_cache: bool


class ReadingOptions(CacheOptions, total=False):
    """What a language model is told besides tokens."""

    position_ids: Tensor


class ImageTokenWriter:
    """A language model that writes words and codes.

    first, count: the tokens that are codes. places: codes of an image. between: tokens that stand between text and
    codes, which nobody decides.
    """

    first: int
    count: int
    places: int
    between: tuple[int, ...] = ()

    def check(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Raises UserError where codes and words are no tokens of the model."""

    def content(self, text: str) -> str | list[dict[str, str]]:
        """A user's words as the chat template wants them."""
        return text

    def hidden(self, model: nn.Module, ids: Tensor, there: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        """What the model says behind each of the tokens `ids` [row, token]: something that `words` and `codes` read, of
        which places can be chosen as of a tensor [row, token, ...]."""
        raise NotImplementedError

    def words(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """[..., word] logits of tokens below `first`."""
        raise NotImplementedError

    def codes(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """[..., code] logits of the codes."""
        raise NotImplementedError

    def unconditional(self, negative: Tensor, told: Tensor, tokenizer: Tokenizer) -> Tensor:
        """[token] what stands before the codes where guidance leads away from it. negative: the tokens of the negative
        prompt; told: what stands there with the prompt."""
        raise NotImplementedError

    def seen(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """[token] how an image, [place], stands among words that ask about it."""
        raise NotImplementedError

    def reads(
        self, model: nn.Module, ids: Tensor, there: Tensor, images: Tensor, **options: Unpack[ReadingOptions]
    ) -> Tensor:
        """`hidden` of rows with an image each, as `seen` has it. images: [row, channel, height, width]."""
        return self.hidden(model, ids, there, **options)

    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """[image, channel, height, width] fp32 on the CPU of tokens [image, place]."""
        raise NotImplementedError

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        """[image, place] int64 of images [image, channel, height, width] of 0 to 1. Raises UserError for another
        size."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write what belongs to the model beside it."""


class CausalWriter(ImageTokenWriter):
    """A causal language model with a codebook beside it: codes are tokens of its vocabulary, images rows of them."""

    def __init__(self, book: Codebook) -> None:
        self.codebook, self.first, self.count, self.places = book, book.first, len(book.patches), book.places

    def check(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        self.codebook.outside(transformers_model(model).get_output_embeddings().weight.shape[0])

    def hidden(self, model: nn.Module, ids: Tensor, there: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        """The logits themselves."""
        return model(input_ids=ids, attention_mask=there, **options)[0]

    def words(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden[..., : self.first]

    def codes(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden[..., self.first : self.first + self.count]

    def unconditional(self, negative: Tensor, told: Tensor, tokenizer: Tokenizer) -> Tensor:
        return negative

    def seen(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """As it was drawn."""
        return tokens

    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return self.codebook.images(tokens)

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        return self.codebook.tokens(images)

    def save(self, folder: Path) -> None:
        codebook.write(folder, self.codebook)


class JanusWriter(ImageTokenWriter):
    """A model of transformers' Janus: codes have embeddings and a head of their own, a decoder makes the image."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, path: str) -> None:
        """path: where the files of the processor are, which are saved beside what is trained."""
        config = transformers_model(model).config
        self.files = [found for name in FILES if (found := cached(path, name)) is not None]
        self.first, self.count = config.text_config.vocab_size, config.vq_config.num_embeddings
        self.side = config.vq_config.num_patches
        self.places = self.side**2
        self.placeholder = config.image_token_id
        self.patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        self.size = (config.vq_config.out_channels, *[config.vision_config.image_size] * 2)
        begin = tokenizer.special_tokens_map.get("boi_token")
        if begin is None:
            raise UserError(
                "the tokenizer beside a Janus model has no boi_token, which stands before codes; take the one that the "
                "model was published with"
            )
        self.between = (tokenizer.convert_tokens_to_ids(str(begin)),)

    def hidden(self, model: nn.Module, ids: Tensor, there: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        core = core_of(model)
        code = ids >= self.first
        words = core.get_input_embeddings()(ids.masked_fill(code, 0))
        drawn = core.prepare_embeddings_for_image_generation((ids - self.first).clamp(min=0))
        read = drawn.to(words.dtype).where(code[..., None], words)
        return core.model.language_model(inputs_embeds=read, attention_mask=there, **options).last_hidden_state

    def words(self, model: nn.Module, hidden: Tensor) -> Tensor:
        core = core_of(model)
        return core.lm_head(hidden)

    def codes(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return core_of(model).model.generation_head(hidden)

    def content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    def save(self, folder: Path) -> None:
        for file in self.files:
            if not (folder / file.name).exists():
                shutil.copy(file, folder / file.name)

    def unconditional(self, negative: Tensor, told: Tensor, tokenizer: Tokenizer) -> Tensor:
        """As the model was trained: all words are padding, of as many tokens."""
        kept = (told == tokenizer.bos_token_id) | (told == self.between[0])
        return told.where(kept, torch.tensor(tokenizer.pad_token_id))

    def seen(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Places for what its vision tower says of the pixels: it reads images otherwise than it draws them."""
        end = tokenizer.special_tokens_map.get("eoi_token")
        last = [] if end is None else [tokenizer.convert_tokens_to_ids(str(end))]
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return torch.tensor([*first, self.between[0], *[self.placeholder] * self.patches, *last])

    def reads(
        self, model: nn.Module, ids: Tensor, there: Tensor, images: Tensor, **options: Unpack[ReadingOptions]
    ) -> Tensor:
        core = core_of(model)
        weight = next(core.model.vision_model.parameters())
        found = core.model(
            input_ids=ids, attention_mask=there, pixel_values=images.to(weight).clamp(0, 1) * 2 - 1, **options
        )
        return found.last_hidden_state

    @torch.no_grad()
    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """A few at a time: a decoder takes a hundred times the memory of its image."""
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
        found = encoder.encode(images.to(weight) * 2 - 1).image_tokens
        return self.first + found.view(len(images), self.places).cpu()


def core_of(model: nn.Module) -> Any:
    """The Janus model itself; torch's types take what it holds for tensors."""
    return transformers_model(model)


def freeze_readers(model: nn.Module) -> None:
    """What reads images and decodes codes is not trained: codes would come to mean something else."""
    for name, parameter in model.named_parameters():
        if set(name.split(".")) & UNTRAINED:
            parameter.requires_grad_(False)


def cached(path: str, name: str) -> Path | None:
    """A file of a model by folder or hub name, None where there is none."""
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
