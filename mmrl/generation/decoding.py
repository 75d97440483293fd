"""Cheap decoding: keys and values are neither copied for one more token nor repeated for the heads that share them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

PACKED = "mmrl_packed"  # SDPA, of rows one behind the other where they are packed: policies.vlm.responses.packing
SHARED_HEADS = "mmrl_shared_heads"  # `shared_heads`, among the implementations of attention that transformers knows


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, [row, head, token, number], at the front of memory for more tokens. Where that is
    full it is doubled, up to `longest` tokens, so that a token costs its own copy and, on average, two others.

    It is written in place: only for passes without gradient.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, length = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if self._room is None or length > self._room[0].shape[-2]:
            self._move(key_states, value_states, max(length, min(2 * length, self.longest)))
        assert self._room is not None
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, before:length] = new
        self.keys, self.values = (room[:, :, :length] for room in self._room)
        return self.keys, self.values

    def _move(self, key_states: Tensor, value_states: Tensor, tokens: int) -> None:
        """Moves keys and values into memory for so many tokens, of the shape of the new ones."""
        length, moved = self.get_seq_length(), []
        for old, like in ((self.keys, key_states), (self.values, value_states)):
            room = like.new_empty(*like.shape[:2], tokens, like.shape[3])
            if length:
                assert old is not None
                room[:, :, :length] = old
            moved.append(room)
        self._room = (moved[0], moved[1])

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._room = None  # the next token moves them

    def reset(self) -> None:
        super().reset()
        self._room = None


def growing_cache(config: PreTrainedConfig, longest: int) -> DynamicCache:
    """An empty cache for a model with this configuration of its text half, and sequences of at most `longest` tokens.
    Layers that keep something else than all keys and values are transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(longest) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def shared_heads(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention by SDPA, in which the heads of one new token that share keys and values take the place of
    as many tokens: nothing is repeated for them. query: [row, head, token, number], heads that share side by side.

    With more than one token, or with any other option of an attention, it is transformers' own.
    """
    heads, shared = query.shape[1], key.shape[1]
    plain = query.shape[2] == 1 and heads != shared and not options.get("output_attentions", False)
    if not plain or options.get("position_bias") is not None or options.get("cache") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, _, _, size = query.shape
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, shared, heads // shared, size),
        key,
        value,
        attn_mask=None if attention_mask is None else attention_mask.expand(-1, -1, heads // shared, -1),
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(SHARED_HEADS, shared_heads)
AttentionMaskInterface.register(SHARED_HEADS, sdpa_mask)


@contextmanager
def decoding(config: PreTrainedConfig) -> Iterator[None]:
    """Context in which a model with this configuration of its text half computes attention by `shared_heads`, if it
    does by SDPA, packed or not."""
    usual = config._attn_implementation
    if usual in ("sdpa", PACKED):
        config._attn_implementation = SHARED_HEADS
    try:
        yield
    finally:
        config._attn_implementation = usual
