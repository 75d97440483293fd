"""Protocols of transformers' tokenizers and processors, with the members that policies use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

from torch import Tensor


class TokenIds(Protocol):
    """The output of a tokenizer for one text."""

    @property
    def input_ids(self) -> list[int]: ...


class TokenIdLists(Protocol):
    """The output of a tokenizer for several texts."""

    @property
    def input_ids(self) -> list[list[int]]: ...


class SpecialToken(Protocol):
    """A token that was added to a tokenizer's vocabulary. special: whether it is a control token, not text."""

    @property
    def special(self) -> bool: ...


class Tokenizer(Protocol):
    """A tokenizer of transformers: converts text to token ids and back."""

    pad_token_id: int | None
    mask_token: str | None

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def sep_token_id(self) -> int | None: ...

    @property
    def mask_token_id(self) -> int | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, SpecialToken]: ...

    @property
    def special_tokens_map(self) -> Mapping[str, object]: ...

    @property
    def chat_template(self) -> object: ...

    @property
    def name_or_path(self) -> str: ...

    def __len__(self) -> int: ...

    @overload
    def __call__(self, text: str, *, add_special_tokens: bool = True) -> TokenIds: ...

    @overload
    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> TokenIdLists: ...

    def get_vocab(self) -> dict[str, int]: ...

    def convert_tokens_to_ids(self, tokens: str, /) -> int: ...

    def convert_ids_to_tokens(self, ids: int, /) -> str | None: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool, **more: object
    ) -> str: ...

    def decode(self, ids: Tensor | Sequence[int], /, *, skip_special_tokens: bool = False) -> str: ...

    def batch_decode(self, ids: Sequence[Tensor], /, *, skip_special_tokens: bool = False) -> list[str]: ...

    def save_pretrained(self, folder: Path, /) -> object: ...


class Processor(Protocol):
    """A processor of transformers: applies the chat template, and converts text with images and videos to the inputs of
    a model."""

    tokenizer: Tokenizer

    def __hash__(self) -> int: ...

    @property
    def chat_template(self) -> object: ...

    @property
    def image_token(self) -> str: ...

    @property
    def video_token(self) -> str: ...

    def __call__(
        self, *, text: list[str], return_tensors: str, padding: bool, **more: object
    ) -> Mapping[str, Tensor]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool, **more: object
    ) -> str: ...

    def save_pretrained(self, folder: Path, /) -> object: ...
