"""Adapters for transformers models that generate images: hidden states and logits of text and image tokens, and the
conversion between image tokens and pixels.

Ids from `first` on are image tokens, those below are text tokens.
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

# Parts of Janus that encode images and decode image tokens, which are not used while it samples tokens.
UNTRAINED = {"vision_model", "aligner", "vqmodel"}
AT_ONCE = 8  # images that are decoded together
# Files of a Janus processor, which are saved beside the trained model
FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja", "chat_template.json")


class CacheOptions(TypedDict, total=False):
    """Arguments of a language model about its key-value cache."""

    past_key_values: Cache
    use_cache: bool


class ReadingOptions(CacheOptions, total=False):
    """Arguments of a language model besides tokens and mask."""

    position_ids: Tensor


class ImageTokenWriter:
    """The adapter for a language model that generates text and image tokens."""

    first: int  # id of the first image token
    count: int  # number of image tokens in the vocabulary
    tokens_per_image: int
    between: tuple[int, ...] = ()  # ids between text and image tokens, such as begin-of-image, which are not decisions

    def check(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Raises UserError if image tokens are not in the vocabulary of the model."""

    def content(self, text: str) -> str | list[dict[str, str]]:
        """Returns the content of a user message in the format of the chat template."""
        return text

    def hidden(self, model: nn.Module, ids: Tensor, mask: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        """Returns the last hidden states of `ids` [row, token], from which `text_logits` and `image_logits` compute
        logits: [row, token, ...]."""
        raise NotImplementedError

    def text_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns logits of tokens below `first`, [..., text token]."""
        raise NotImplementedError

    def image_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Returns logits of image tokens, [..., image token]."""
        raise NotImplementedError

    def unconditional(self, negative: Tensor, conditional: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Returns the tokens before the image in the unconditional pass of guidance, [token]. negative: the tokens of
        the negative prompt. conditional: the tokens before the image in the conditional pass."""
        raise NotImplementedError

    def image_input(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Returns the tokens by which the model gets an image as an input, [token]. tokens: its image tokens, [image
        token]."""
        raise NotImplementedError

    def hidden_with_images(
        self, model: nn.Module, ids: Tensor, mask: Tensor, images: Tensor, **options: Unpack[ReadingOptions]
    ) -> Tensor:
        """Returns the hidden states of rows with one input image each, whose tokens come from `image_input`. images:
        [row, channel, height, width]."""
        return self.hidden(model, ids, mask, **options)

    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Decodes image tokens [image, token] to images [image, channel, height, width] from 0 to 1, fp32 on the
        CPU."""
        raise NotImplementedError

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        """Encodes images [image, channel, height, width] from 0 to 1 as image tokens [image, token] int64. Raises
        UserError for images of another size than the model generates."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Saves the files of image tokens, such as a codebook, in the folder of the model."""


class CausalWriter(ImageTokenWriter):
    """The adapter for a causal language model with a codebook. Image tokens are part of its vocabulary."""

    def __init__(self, book: Codebook) -> None:
        self.codebook, self.first, self.count = book, book.first, len(book.patches)
        self.tokens_per_image = book.tokens_per_image

    def check(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        self.codebook.non_code_tokens(transformers_model(model).get_output_embeddings().weight.shape[0])

    def hidden(self, model: nn.Module, ids: Tensor, mask: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        """Returns the logits, in place of hidden states."""
        return model(input_ids=ids, attention_mask=mask, **options)[0]

    def text_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden[..., : self.first]

    def image_logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden[..., self.first : self.first + self.count]

    def unconditional(self, negative: Tensor, conditional: Tensor, tokenizer: Tokenizer) -> Tensor:
        return negative

    def image_input(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Returns the image tokens themselves."""
        return tokens

    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return self.codebook.decode(tokens)

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        return self.codebook.encode(images)

    def save(self, folder: Path) -> None:
        codebook.write(folder, self.codebook)


class JanusWriter(ImageTokenWriter):
    """The adapter for a Janus model of transformers. Image tokens have their own embeddings and output layer, and a VQ
    decoder makes the image."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, path: str) -> None:
        """path: folder or hub name of the model, whose processor files are saved with the trained model. Raises
        UserError if the tokenizer has no begin-of-image token."""
        config = transformers_model(model).config
        self.files = [file for name in FILES if (file := cached_path(path, name)) is not None]
        self.first, self.count = config.text_config.vocab_size, config.vq_config.num_embeddings
        self.side = config.vq_config.num_patches
        self.tokens_per_image = self.side**2
        self.placeholder = config.image_token_id  # stands for one feature of the vision tower in an input image
        self.patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        self.size = (config.vq_config.out_channels, *[config.vision_config.image_size] * 2)
        begin_token = tokenizer.special_tokens_map.get("boi_token")
        if begin_token is None:
            raise UserError(
                f"model.path={path}: its tokenizer has no boi_token, which begins an image; take the tokenizer that "
                "the Janus model was published with"
            )
        self.between = (tokenizer.convert_tokens_to_ids(str(begin_token)),)

    def hidden(self, model: nn.Module, ids: Tensor, mask: Tensor, **options: Unpack[ReadingOptions]) -> Tensor:
        """Returns the last hidden states of `ids` [row, token]. Text and image tokens have separate embedding tables.
        Each table embeds all tokens, with valid ids in place of ids that it does not have; then the embedding from its
        own table is selected for each token."""
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
        """Returns the conditional tokens with all text replaced by padding tokens, as in the training of Janus."""
        keep = (conditional == tokenizer.bos_token_id) | (conditional == self.between[0])
        return conditional.where(keep, torch.tensor(tokenizer.pad_token_id))

    def image_input(self, tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
        """Returns the tokens of an input image, [token]: the begin-of-text token, a begin-of-image token, a placeholder
        for each feature of the vision tower, with which Janus reads images, and an end-of-image token. The first and
        the last are left out if the tokenizer has none. tokens: not used."""
        end = tokenizer.special_tokens_map.get("eoi_token")
        last = [] if end is None else [tokenizer.convert_tokens_to_ids(str(end))]
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return torch.tensor([*first, self.between[0], *[self.placeholder] * self.patches, *last])

    def hidden_with_images(
        self, model: nn.Module, ids: Tensor, mask: Tensor, images: Tensor, **options: Unpack[ReadingOptions]
    ) -> Tensor:
        """Returns the last hidden states of rows with one input image each; see
        `ImageTokenWriter.hidden_with_images`."""
        core = core_of(model)
        weight = next(core.model.vision_model.parameters())
        outputs = core.model(
            input_ids=ids,
            attention_mask=mask,
            pixel_values=images.to(weight).clamp(0, 1) * 2 - 1,  # the range of Janus is -1 to 1
            **options,
        )
        return outputs.last_hidden_state

    @torch.no_grad()
    def images(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Decodes images as the base class does, AT_ONCE at a time: the decoder needs a hundred times the memory of an
        image."""
        decoder = core_of(model).model.vqmodel
        device = next(decoder.parameters()).device
        parts = [decoder.decode(part.to(device)).float().cpu() for part in (tokens - self.first).split(AT_ONCE)]
        return (torch.cat(parts) + 1) / 2  # the range of the decoder is -1 to 1

    @torch.no_grad()
    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        """Encodes images as image tokens with the VQ model; see `ImageTokenWriter.tokens`."""
        if tuple(images.shape[1:]) != self.size:
            raise UserError(
                f"images of {list(images.shape[1:])} (channels, height, width) do not fit the model at model.path, "
                f"which generates {list(self.size)}; resize them"
            )
        encoder = core_of(model).model.vqmodel
        weight = next(encoder.parameters())
        image_tokens = encoder.encode(images.to(weight) * 2 - 1).image_tokens  # the range of the encoder is -1 to 1
        return self.first + image_tokens.view(len(images), self.tokens_per_image).cpu()


def core_of(model: nn.Module) -> Any:
    """Returns the transformers model, without the PEFT wrapper, as Any: torch declares all attributes of modules as
    tensors."""
    return transformers_model(model)


def freeze_untrained(model: nn.Module) -> None:
    """Freezes the parts that encode images and decode image tokens (UNTRAINED). A trained decoder would change the
    meaning of tokens."""
    for name, parameter in model.named_parameters():
        if set(name.split(".")) & UNTRAINED:
            parameter.requires_grad_(False)


def cached_path(path: str, name: str) -> Path | None:
    """Returns the local path of a file of a model, which is downloaded if necessary; None if the model has no such file
    or the hub cannot be reached. path: folder or hub name."""
    file = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)
