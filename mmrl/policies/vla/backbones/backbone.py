"""The interface of backbones, which encode images and instructions. This module does not import transformers, which
policies that read only the robot's state do not need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmrl.policies.vla.heads.codec import ActionNormalizer
from mmrl.policies.vla.heads.flow import ExpertHead, FlowHead
from mmrl.policies.vla.heads.head import EncodedPrefix, Head
from mmrl.policies.vla.settings import PROMPT, Actions, FlowActions, FrozenFlow, NormalActions, TaughtFlow


class CachedPrefix:
    """An `EncodedPrefix` from cached last hidden states of a frozen backbone."""

    layers: tuple[Tensor, ...] = ()

    def __init__(self, hidden: Tensor, mask: Tensor) -> None:
        """hidden: [n, token, width]; mask: [n, token] bool, False at padding."""
        self.hidden, self.mask = hidden, mask
        # index of the last token: the first position at which the count of tokens is highest
        end = mask.long().cumsum(1).argmax(1)
        self.last = hidden[torch.arange(len(hidden), device=hidden.device), end]

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError("the cache holds no keys and values to extend the prefix with")


class Backbone(nn.Module):
    """A network that encodes observations: camera images, an instruction and perhaps the robot's state."""

    width: int  # size of hidden states
    vocabulary: int  # token ids below it may be action tokens
    action_normalizer: ActionNormalizer | None = None  # of the checkpoint's own action head, if it has one
    reads_state: bool = False  # True: the backbone encodes the robot's state, and the head does not get it

    @property
    def frozen(self) -> bool:
        """True if no parameter is trained, so that encoded prefixes can be cached."""
        return not any(p.requires_grad for p in self.parameters())

    @property
    def input_embeddings(self) -> nn.Module:
        """The embedding layer of token ids."""
        raise NotImplementedError

    @property
    def output_weight(self) -> Tensor:
        """The weight of the language model head, [token id, width]."""
        raise NotImplementedError

    def format_prompt(self, instruction: str) -> str:
        """Returns the prompt for an instruction."""
        return PROMPT.format(instruction)

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[Any]:
        """Preprocesses n observations to a list of n rows for `collate`. images: one array [n, height, width, 3] RGB
        per camera; texts: n prompts; state: the robot's state [n, state], which most backbones leave to the head."""
        raise NotImplementedError

    def collate(self, rows: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
        """Collates rows of `prepare` to the inputs of `encode`."""
        raise NotImplementedError

    def encode(self, inputs: dict[str, Tensor], *, every_layer: bool) -> EncodedPrefix:
        """Encodes a batch. every_layer: whether `EncodedPrefix.layers` holds all layers, or the last one only."""
        raise NotImplementedError

    def cache_rows(self, prefix: EncodedPrefix) -> list[Any]:
        """Splits an encoded batch of n prefixes into n rows on the CPU, without padding, for `collate_cached`."""
        lengths = prefix.mask.sum(1).tolist()
        return [hidden[:length].cpu() for hidden, length in zip(prefix.hidden, lengths, strict=True)]

    def collate_cached(self, rows: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
        """Collates rows of `cache_rows` to the inputs of `cached_prefix`. Among these is "hidden", by which
        `Network.encode` tells cached inputs from those of `collate`."""
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
        return {"hidden": nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device), "mask": mask.to(device)}

    def cached_prefix(self, inputs: dict[str, Tensor]) -> EncodedPrefix:
        """Restores the encoded prefix from cached inputs."""
        return CachedPrefix(inputs["hidden"], inputs["mask"])

    def flow_head(
        self, settings: FlowActions | TaughtFlow | FrozenFlow, action: Actions, action_dim: int, state_dim: int
    ) -> FlowHead:
        """Builds a flow head: a new action expert, or the checkpoint's own if it has one. Raises UserError if the
        window of scored steps does not fit the sampler, or the checkpoint's expert does not fit the robot."""
        return ExpertHead(settings, action, action_dim, state_dim, self.width)

    def l1_head(self, settings: NormalActions, action: Actions, action_dim: int) -> Head:
        """Loads OpenVLA-OFT's L1 regression head; no other backbone has one."""
        raise NotImplementedError

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the backbone in `folder`, in the format from which it was loaded. state: state dict of this module."""
        raise NotImplementedError
