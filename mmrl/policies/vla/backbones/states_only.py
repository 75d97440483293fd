"""No backbone: for policies whose head reads nothing but the robot's state."""

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
from mmrl.policies.vla.heads.head import Reading

CONFIG = "states_only.json"


class NothingRead:
    """An empty reading, of width 0; see `mmrl.policies.vla.heads.head.Reading`."""

    layers: tuple[Tensor, ...] = ()

    def __init__(self, rows: int, device: torch.device) -> None:
        self.hidden = torch.zeros(rows, 0, 0, device=device)
        self.mask = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        self.last = torch.zeros(rows, 0, device=device)

    def extend(self, tokens: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError("an empty reading can not be extended")


class StateBackbone(Backbone):
    """A backbone that reads neither images nor words, for simulators with one instruction."""

    width, vocabulary = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.instruction: str | None = None

    @property
    def frozen(self) -> bool:
        """False: there is no reading to cache."""
        return False

    def ask(self, instruction: str) -> str:
        return instruction

    def prepare(
        self, images: Sequence[NDArray[np.uint8]], texts: Sequence[str], state: NDArray[np.float32]
    ) -> list[Any]:
        """Prepares nothing. Raises UserError for a second instruction."""
        for text in texts:
            if self.instruction is None:
                self.instruction = text
            if text != self.instruction:
                raise UserError(
                    f"this policy reads the robot's state and no words, but the simulator's instructions are "
                    f"{self.instruction!r} and {text!r}; give it one task, or use a backbone that reads"
                )
        return [None] * len(texts)

    def collate(self, rows: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
        return {"rows": torch.zeros(len(rows), device=device)}

    def read(self, inputs: dict[str, Tensor], *, every_layer: bool) -> Reading:
        return NothingRead(len(inputs["rows"]), inputs["rows"].device)

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        create(folder)


def create(folder: str | Path) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / CONFIG).write_text(json.dumps({"reads": "state"}))
