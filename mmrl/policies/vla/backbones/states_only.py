"""The empty backbone of policies whose action head reads only the robot's state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.errors import UserError
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.heads.head import EncodedPrefix

CONFIG = "states_only.json"


class EmptyPrefix:
    """An `mmrl.policies.vla.heads.head.EncodedPrefix` of no tokens and width 0."""

    layers: tuple[Tensor, ...] = ()

    def __init__(self, rows: int, device: torch.device) -> None:
        self.hidden = torch.zeros(rows, 0, 0, device=device)
        self.mask = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        self.last = torch.zeros(rows, 0, device=device)

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError("a policy without a backbone encodes no tokens")


class StateBackbone(Backbone):
    """A backbone that encodes neither images nor instructions, for simulators that always give one instruction."""

    width, vocabulary = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.instruction: str | None = None

    @property
    def frozen(self) -> bool:
        """False, since there is nothing to cache."""
        return False

    def format_prompt(self, instruction: str) -> str:
        return instruction

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[Any]:
        """Returns n empty rows. Raises UserError if instructions differ, since the policy does not read them."""
        for text in texts:
            if self.instruction is None:
                self.instruction = text
            if text != self.instruction:
                raise UserError(
                    f"this policy reads the robot's state and no words, but the simulator's instructions are "
                    f"{self.instruction!r} and {text!r}; give it one task, or use a backbone that reads instructions"
                )
        return [None] * len(texts)

    def collate(self, rows: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
        """Returns one zero for each row: `encode` reads only their number and device."""
        return {"rows": torch.zeros(len(rows), device=device)}

    def encode(self, inputs: dict[str, Tensor], *, every_layer: bool) -> EncodedPrefix:
        return EmptyPrefix(len(inputs["rows"]), inputs["rows"].device)

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        create(folder)


def create(folder: str | Path) -> None:
    """Writes the file that marks `folder` as a policy without a backbone."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / CONFIG).write_text(json.dumps({"reads": "state"}))
