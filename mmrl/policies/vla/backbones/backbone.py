"""The interface of backbones, which read images and instructions. It does not import transformers, which policies of
states do not need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmrl.policies.vla.heads.codec import Units
from mmrl.policies.vla.heads.flow import ExpertHead, FlowHead
from mmrl.policies.vla.heads.head import Head, Reading
from mmrl.policies.vla.settings import PROMPT, Actions, FlowActions, FrozenFlow, L1Actions, TaughtFlow


class CachedReading:
    """A reading from the cached last layer of a frozen backbone."""

    layers: tuple[Tensor, ...] = ()

    def __init__(self, hidden: Tensor, mask: Tensor) -> None:
        self.hidden, self.mask = hidden, mask
        end = mask.long().cumsum(1).argmax(1)
        self.last = hidden[torch.arange(len(hidden), device=hidden.device), end]

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError("only the prompt was cached")


class Backbone(nn.Module):
    """A network that reads observations. `width`: of its hidden states; `vocabulary`: ids below it may be action
    tokens;
    `units`: of the actions of its own action head, if it has one; `reads_state`: whether it reads the robot's state
    itself, so that the head need not."""

    width: int
    vocabulary: int
    units: Units | None = None
    reads_state: bool = False

    @property
    def frozen(self) -> bool:
        """True where no parameter is trained, so that readings can be cached."""
        return not any(p.requires_grad for p in self.parameters())

    @property
    def input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    @property
    def output_weight(self) -> Tensor:
        """Weight of the language model head [id, width]."""
        raise NotImplementedError

    def ask(self, instruction: str) -> str:
        """Returns the prompt with an instruction; OpenVLA has its own."""
        return PROMPT.format(instruction)

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[Any]:
        """Prepares n observations for `collate`. images: of each camera [n, height, width, 3] RGB; texts: n prompts;
        state: the robot's state [n, state], which most backbones leave to the head."""
        raise NotImplementedError

    def collate(self, rows: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
        raise NotImplementedError

    def read(self, inputs: dict[str, Tensor], *, every_layer: bool) -> Reading:
        raise NotImplementedError

    def cache_rows(self, reading: Reading) -> list[Any]:
        """Returns for each row of a reading what `collate_cached` needs to restore it."""
        lengths = reading.mask.sum(1).tolist()
        return [hidden[:length].cpu() for hidden, length in zip(reading.hidden, lengths, strict=True)]

    def collate_cached(self, rows: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
        """Collates cached rows to the inputs of `cached_reading`, with the key "hidden"."""
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
        return {"hidden": nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device), "mask": mask.to(device)}

    def cached_reading(self, inputs: dict[str, Tensor]) -> Reading:
        return CachedReading(inputs["hidden"], inputs["mask"])

    def flow_head(
        self, settings: FlowActions | TaughtFlow | FrozenFlow, action: Actions, action_dim: int, state_dim: int
    ) -> FlowHead:
        """Builds a flow head. Raises UserError for an impossible window, and where the backbone's own expert does not
        fit."""
        return ExpertHead(settings, action, action_dim, state_dim, self.width)

    def l1_head(self, settings: L1Actions, action: Actions, action_dim: int) -> Head:
        """Builds OpenVLA-OFT's L1 head with its weights; no other backbone has one."""
        raise NotImplementedError

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves into `folder`, in the format it was loaded from. state: state dict of this module."""
        raise NotImplementedError
