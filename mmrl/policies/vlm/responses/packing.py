"""Packing: the decoder computes the rows of a batch as one long sequence, without padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from mmrl.engine.compilation import apart
from mmrl.generation.decoding import PACKED

MAX_FILL = 0.9  # packing saves time if the share of tokens in a padded batch that are not padding is below this
# Name of `packed_attention` for vision towers. With "flash" in the name, towers pass all their attention windows in one
# call, instead of one call per window: several hundred per image in Qwen2.5-VL.
PACKED_IMAGES = "mmrl_flash_packed"
# `model_type` of models whose towers pass their windows in this way.
WINDOWED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
MAX_FLASH_HEAD_DIM = 256  # largest head dimension of flash attention


@dataclass(frozen=True)
class RowTokens:
    """Positions of the tokens of padded rows."""

    index: Tensor  # [token] int64, positions in the flattened rows
    ends: Tensor  # [row + 1] int32, cumulative lengths of the rows, beginning with 0 (cu_seqlens of flash attention)
    shape: tuple[int, int]  # rows and padded length
    mask: Tensor  # [row, length] bool

    @classmethod
    def from_mask(cls, mask: Tensor) -> RowTokens:
        """Returns the positions of the tokens in a mask [row, length], true for tokens. It waits for the GPU."""
        mask = mask.bool()
        ends = F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        return cls(mask.flatten().nonzero().flatten(), ends, (mask.shape[0], mask.shape[1]), mask)

    def packed(self, values: Tensor) -> Tensor:
        """Takes the tokens out of padded rows: [..., row, length] becomes [..., token]."""
        return values.flatten(-2)[..., self.index]


_row_tokens: ContextVar[RowTokens | None] = ContextVar("tokens of packed rows", default=None)


def pack_images(model: Any) -> None:
    """Makes the vision tower of a model compute attention over all images and windows in one call, if the tower is of
    a family in WINDOWED.

    The blocks of the tower get a copy of the configuration: transformers could not build another model from a
    configuration that names this attention.
    """
    tower_config = model.config.vision_config
    if model.config.model_type not in WINDOWED or tower_config._attn_implementation != "sdpa":
        return
    block_config = copy(tower_config)
    block_config._attn_implementation = PACKED_IMAGES
    for block in model.base_model.visual.blocks:
        block.attn.config = block_config


def pack_rows(decoder: nn.Module) -> None:
    """Adds hooks to a transformers decoder that, inside `packed_rows`, remove padding from its inputs and put it back
    into its last hidden states. Modules outside the decoder, such as embeddings, see padded rows.

    decoder: with causal attention to all earlier tokens, by SDPA. Its attention is set to `packed_attention`, which is
    plain SDPA for padded rows. It stays set, because gradient checkpointing looks it up again in the backward pass.
    """
    config: Any = decoder.config
    config._attn_implementation = PACKED
    decoder.register_forward_pre_hook(_pack, with_kwargs=True, prepend=True)
    decoder.register_forward_hook(_unpack)


@contextmanager
def packed_rows(mask: Tensor) -> Iterator[None]:
    """Makes decoders with the hooks of `pack_rows` skip padding inside the context. mask: [row, length], true for
    tokens."""
    token = _row_tokens.set(RowTokens.from_mask(mask))
    try:
        yield
    finally:
        _row_tokens.reset(token)


def worthwhile(lengths: list[int]) -> bool:
    """Returns whether packing saves time: more than a tenth of a padded batch of these lengths would be padding."""
    return sum(lengths) < MAX_FILL * len(lengths) * max(lengths)


def _pack(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a decoder: packs its inputs, embeddings [row, length, hidden] become [1, token, hidden]."""
    tokens = _row_tokens.get()
    # A decoder that two policies share has this hook twice; the first call has packed already.
    if tokens is None or kwargs.get("cu_seq_lens_q") is not None:
        return None
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = (tokens.mask.cumsum(1) - 1).clamp_min(0)
    elif positions.shape[-2] == 1:  # the same for all rows
        positions = positions.expand(*positions.shape[:-2], *tokens.shape)
    packed = {
        "inputs_embeds": kwargs["inputs_embeds"].flatten(0, 1)[tokens.index].unsqueeze(0),
        "position_ids": tokens.packed(positions).unsqueeze(-2),
        "attention_mask": None,
    }
    if kwargs.get("visual_pos_masks") is not None:  # the tokens to which Qwen3-VL adds image features in deeper layers
        packed["visual_pos_masks"] = tokens.packed(kwargs["visual_pos_masks"])[None]
    ends, max_length = tokens.ends, tokens.shape[1]
    spans = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max_length, "max_length_k": max_length}
    return args, kwargs | packed | spans


def _unpack(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of a decoder: puts packed hidden states [1, token, width] back into padded rows [row, length,
    width]."""
    tokens = _row_tokens.get()
    if tokens is not None and output.last_hidden_state.shape[:2] != tokens.shape:
        states = output.last_hidden_state[0]
        rows, length = tokens.shape
        padded = states.new_zeros(rows * length, states.shape[-1]).index_copy(0, tokens.index, states)
        output.last_hidden_state = padded.view(rows, length, -1)
    return output


def can_use_flash(query: Tensor) -> bool:
    """Returns whether flash attention can be used: in half precision, on a GPU of compute capability 8.0 or higher.

    query: [..., head dimension].
    """
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    head_dim = query.shape[-1]
    return (
        head_dim <= MAX_FLASH_HEAD_DIM
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes attention within each of several packed sequences, as an attention function of transformers.

    query: [1, head, token, head dimension]; key, value: the same, with fewer heads under grouped-query attention.
    cu_seq_lens_q: cumulative lengths of the sequences, [sequence + 1]; None: rows are padded, and transformers' SDPA
    attention is used. max_length_q: length of the longest sequence. is_causal: None means True. Returns [1, token,
    head, head dimension].
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **options)
    scale, causal = options.get("scaling"), is_causal is not False
    groups = query.shape[1] // key.shape[1]
    if can_use_flash(query):
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        ends, window = cu_seq_lens_q, (-1, 0 if causal else -1)
        attended = varlen_attn(q, k, v, ends, ends, max_length_q, max_length_q, scale=scale, window_size=window)
        assert isinstance(attended, Tensor)
        return attended.unsqueeze(0), None
    return by_sequence(query, key, value, cu_seq_lens_q, causal, scale), None


@apart
def by_sequence(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Computes attention sequence by sequence; arguments and result as in `packed_attention`. ends: the argument
    cu_seq_lens_q there; scale: factor of the attention scores, None for the default."""
    lengths, shared = ends.diff().tolist(), query.shape[1] > key.shape[1]
    sequences = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    attended = [
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=shared)
        for q, k, v in sequences
    ]
    return torch.cat(attended, 2).transpose(1, 2)


def _mask_of(*args: Any, **kwargs: Any) -> Tensor | None:
    """Returns the attention mask of SDPA for padded rows, None for packed ones."""
    return sdpa_mask(*args, **kwargs) if _row_tokens.get() is None else None


for _name in (PACKED, PACKED_IMAGES):
    AttentionInterface.register(_name, packed_attention)
AttentionMaskInterface.register(PACKED, _mask_of)
