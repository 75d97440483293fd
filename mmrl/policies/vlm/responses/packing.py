"""Packing: rows of a batch lie one behind the other in the decoder, so that no padding is computed."""

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

from mmrl.generation.decoding import PACKED

WORTHWHILE = 0.9  # share of real tokens in a padded batch above which padding costs less than it does to pack
# `packed_attention` of a vision tower. To implementations with flash in their name towers give the ends of all windows
# at once, in place of a call for each: several hundred a picture in Qwen2.5-VL.
PACKED_IMAGES = "mmrl_flash_packed"
WINDOWED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # model types of vision towers that do
FLASH_WIDTH = 256  # numbers of a head that flash attention takes at most


@dataclass(frozen=True)
class RowTokens:
    """The tokens of padded rows. index: [token] int64, in the flattened rows; ends: [sequence + 1] int32, of
    sequences among the tokens; shape: rows and length."""

    index: Tensor
    ends: Tensor
    shape: tuple[int, int]
    mask: Tensor  # [row, length] bool

    @classmethod
    def of(cls, mask: Tensor) -> RowTokens:
        """Finds the tokens of a mask [row, length]; the one time that the host waits for a GPU."""
        mask = mask.bool()
        ends = F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        return cls(mask.flatten().nonzero().flatten(), ends, (mask.shape[0], mask.shape[1]), mask)

    def packed(self, values: Tensor) -> Tensor:
        """Takes the tokens out of padded rows: [..., row, length] to [..., token]."""
        return values.flatten(-2)[..., self.index]


_row_tokens: ContextVar[RowTokens | None] = ContextVar("tokens of packed rows", default=None)


def pack_images(model: Any) -> None:
    """Has the vision tower of a model attend to all images and windows in one call, where it can. Its blocks get a
    configuration of their own: transformers refuses to build another model by one that names this attention."""
    tower_config = model.config.vision_config
    if model.config.model_type not in WINDOWED or tower_config._attn_implementation != "sdpa":
        return
    own = copy(tower_config)
    own._attn_implementation = PACKED_IMAGES
    for block in model.base_model.visual.blocks:
        block.attn.config = own


def pack_rows(decoder: nn.Module) -> None:
    """Has a decoder of transformers take the padding out of its inputs within `packed_rows`, and put it into the last
    hidden states. What is outside the decoder, images and embeddings, sees padded rows.

    decoder: with causal attention to all earlier tokens, by SDPA. Its attention stays `packed_attention`, which is SDPA
    where rows are padded: layers that are computed again in a backward pass look it up by its name.
    """
    config: Any = decoder.config
    config._attn_implementation = PACKED
    decoder.register_forward_pre_hook(_pack, with_kwargs=True, prepend=True)
    decoder.register_forward_hook(_unpack)


@contextmanager
def packed_rows(mask: Tensor) -> Iterator[None]:
    """Context in which decoders that `pack_rows` changed compute no padding. mask: [row, length], true for tokens."""
    token = _row_tokens.set(RowTokens.of(mask))
    try:
        yield
    finally:
        _row_tokens.reset(token)


def worthwhile(lengths: list[int]) -> bool:
    """Returns whether a tenth or more of rows of these lengths would be padding."""
    return sum(lengths) < WORTHWHILE * len(lengths) * max(lengths)


def _pack(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replaces padded inputs of a decoder by packed ones: embeddings [row, length, hidden] by [1, token, hidden]."""
    tokens = _row_tokens.get()
    if tokens is None or kwargs.get("cu_seq_lens_q") is not None:  # two policies may share a decoder
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
    if kwargs.get("visual_pos_masks") is not None:  # where Qwen3-VL adds features of images to deeper layers
        packed["visual_pos_masks"] = tokens.packed(kwargs["visual_pos_masks"])[None]
    ends, longest = tokens.ends, tokens.shape[1]
    spans = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return args, kwargs | packed | spans


def _unpack(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Hooks a decoder's output: scatters packed hidden states [1, token, width] back to [row, length, width]."""
    tokens = _row_tokens.get()
    if tokens is not None and output.last_hidden_state.shape[:2] != tokens.shape:
        states = output.last_hidden_state[0]
        rows, length = tokens.shape
        padded = states.new_zeros(rows * length, states.shape[-1]).index_copy(0, tokens.index, states)
        output.last_hidden_state = padded.view(rows, length, -1)
    return output


def takes_flash(query: Tensor) -> bool:
    """Returns whether flash attention computes this: on a GPU of Ampere's generation or newer, in half precision."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    width = query.shape[-1]
    return width <= FLASH_WIDTH and width % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0)


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
    """Computes attention within each of the sequences that lie between `cu_seq_lens_q` [sequence + 1], causal unless
    is_causal is False; without them transformers' attention by SDPA. query: [1, head, token, number], key and value
    with as many heads or fewer. Returns [1, token, head, number]."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **options)
    scale, causal = options.get("scaling"), is_causal is not False
    repeated = query.shape[1] // key.shape[1]
    if takes_flash(query):
        key, value = (t.repeat_interleave(repeated, 1) for t in (key, value))
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        ends, window = cu_seq_lens_q, (-1, 0 if causal else -1)
        attended = varlen_attn(q, k, v, ends, ends, max_length_q, max_length_q, scale=scale, window_size=window)
        assert isinstance(attended, Tensor)
        return attended.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    pieces = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=repeated > 1)
        for q, k, v in pieces
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


def _mask_of(*args: Any, **kwargs: Any) -> Tensor | None:
    """Returns the mask of SDPA, none for packed rows."""
    return sdpa_mask(*args, **kwargs) if _row_tokens.get() is None else None


for _name in (PACKED, PACKED_IMAGES):
    AttentionInterface.register(_name, packed_attention)
AttentionMaskInterface.register(PACKED, _mask_of)
