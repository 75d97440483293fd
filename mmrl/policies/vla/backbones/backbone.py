"""What reads the image and the instruction, seen from the action head. It imports no transformers, which policies of
states do without."""

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
from mmrl.policies.vla.settings import PROMPT, Actions, FlowActions, L1Actions, TaughtFlow


class CachedReading:
    """The last layer of prompts that a frozen backbone has read before."""

    layers: tuple[Tensor, ...] = ()

    def __init__(self, hidden: Tensor, mask: Tensor) -> None:
        self.hidden, self.mask = hidden, mask
        end = mask.long().cumsum(1).argmax(1)
        self.last = hidden[torch.arange(len(hidden), device=hidden.device), end]

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError("only the prompt was kept")


class Backbone(nn.Module):
    """Reads observations. `width` of its hidden states; `vocabulary`: ids below it may be action tokens; `units` of the
    actions that its own action head makes, if it has one; `reads_state`: whether it takes the robot's state itself, so
    that a head of ours need not."""

    width: int
    vocabulary: int
    units: Units | None = None
    reads_state: bool = False

    @property
    def frozen(self) -> bool:
        """Whether training changes nothing of what `read` makes."""
        return not any(p.requires_grad for p in self.parameters())

    @property
    def input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    @property
    def output_weight(self) -> Tensor:
        """[id, width]"""
        raise NotImplementedError

    def ask(self, instruction: str) -> str:
        """The prompt it is used to; OpenVLA has its own."""
        return PROMPT.format(instruction)

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[Any]:
        """images: of each camera [n, height, width, 3] RGB, n prompts and the robot's state [n, state], which heads
        of our own read instead -> what is kept of each, and what `collate` takes."""
        raise NotImplementedError

    def collate(self, rows: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
        raise NotImplementedError

    def read(self, inputs: dict[str, Tensor], *, every_layer: bool) -> Reading:
        raise NotImplementedError

    def keep(self, reading: Reading) -> list[Any]:
        """What is kept of each row of a reading that is not to be made again."""
        lengths = reading.mask.sum(1).tolist()
        return [hidden[:length].cpu() for hidden, length in zip(reading.hidden, lengths, strict=True)]

    def collate_kept(self, rows: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
        """What `recall` takes; "hidden" among it."""
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
        return {"hidden": nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device), "mask": mask.to(device)}

    def recall(self, inputs: dict[str, Tensor]) -> Reading:
        return CachedReading(inputs["hidden"], inputs["mask"])

    def flow_head(
        self, settings: FlowActions | TaughtFlow, action: Actions, action_dim: int, state_dim: int
    ) -> FlowHead:
        """Raises UserError for a window that can not be, and where the backbone's own expert does not fit."""
        return ExpertHead(settings, action, action_dim, state_dim, self.width)

    def l1_head(self, settings: L1Actions, action: Actions, action_dim: int) -> Head:
        """OpenVLA-OFT's, with its weights; no other backbone has one."""
        raise NotImplementedError

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Into `folder`, in the format it was loaded from. state: of this module."""
        raise NotImplementedError
