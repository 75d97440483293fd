"""Efficient decoding with transformers: a key-value cache that is not copied for each token, and attention that does
not repeat keys and values for the query heads that share them."""

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

PACKED = "mmrl_packed"  # SDPA that also takes packed rows: see policies.vlm.responses.packing
SHARED_HEADS = "mmrl_shared_heads"  # the name under which transformers knows `shared_heads`


class GrowingLayer(DynamicLayer):
    """The key-value cache of one layer, [row, head, token, channel], with spare memory for further tokens.

    When it is full, its memory is doubled, up to `max_tokens`, so that copying costs each token a constant time on
    average. Tokens are written in place, so it is only for passes without gradients.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self._memory: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values of further tokens, [row, head, token, channel]. Returns keys and values of all
        tokens so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, length = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if self._memory is None or length > self._memory[0].shape[-2]:
            self._allocate(key_states, value_states, max(length, min(2 * length, self.max_tokens)))
        assert self._memory is not None
        for memory, new in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, before:length] = new
        self.keys, self.values = (memory[:, :, :length] for memory in self._memory)
        return self.keys, self.values

    def _allocate(self, key_states: Tensor, value_states: Tensor, tokens: int) -> None:
        """Copies keys and values into new memory for `tokens` tokens, with the shape and dtype of the new states."""
        length, allocated = self.get_seq_length(), []
        for old, like in ((self.keys, key_states), (self.values, value_states)):
            memory = like.new_empty(*like.shape[:2], tokens, like.shape[3])
            if length:
                assert old is not None
                memory[:, :, :length] = old
            allocated.append(memory)
        self._memory = (allocated[0], allocated[1])

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._memory = None  # allocated again for the next token

    def reset(self) -> None:
        super().reset()
        self._memory = None


def growing_cache(config: PreTrainedConfig, max_tokens: int) -> DynamicCache:
    """Returns an empty cache with GrowingLayers for sequences of at most `max_tokens` tokens.

    config: the language model's. Layers that do not keep all keys and values (such as sliding windows) stay
    transformers' own.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(max_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def shared_heads(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Computes attention by SDPA for one new token without repeating keys and values for the query heads that share
    them (grouped-query attention): these heads are passed to SDPA as tokens.

    query: [row, head, token, channel], heads with common keys side by side. For several tokens, and with other options,
    it calls transformers' own function. Returns the output [row, token, head, channel] and None.
    """
    heads, shared = query.shape[1], key.shape[1]
    is_plain = query.shape[2] == 1 and heads != shared and not options.get("output_attentions", False)
    if not is_plain or options.get("position_bias") is not None or options.get("cache") is not None:
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
    """Context in which a model computes attention by `shared_heads`, if it uses SDPA. config: the
    configuration of its language model."""
    original = config._attn_implementation
    if original in ("sdpa", PACKED):
        config._attn_implementation = SHARED_HEADS
    try:
        yield
    finally:
        config._attn_implementation = original
