"""Pairs from the user's files: which of two images or videos was preferred for a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.tasks.data.prompt_files import load_prompts

SIDES = ("chosen", "rejected")


class Pairs(ABC):
    """Rows of `prompt`, and `chosen` and `rejected`, paths below the file's folder.

    Metadata: `target` and `rejected`, float32, 0 to 1. Raises ValueError for a file without such rows; a file of a pair
    that can not be used raises UserError on access.
    """

    kind: str  # what a pair is made of

    def __init__(self, path: Path, *, max_bad_share: float, field: str = "prompt") -> None:
        self.root = path.parent.resolve()
        self.prompts = load_prompts(path, field=field, max_bad_share=max_bad_share)
        for prompt in self.prompts:
            for key in SIDES:
                self._path(prompt, key)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.prompts[index]
        target, rejected = (self.read(self._path(prompt, key), f"row {prompt.id}") for key in SIDES)
        if target.shape != rejected.shape:
            raise UserError(f"row {prompt.id}: chosen is {list(target.shape)}, rejected {list(rejected.shape)}")
        return replace(prompt, metadata=prompt.metadata | {"target": target, "rejected": rejected})

    @abstractmethod
    def read(self, path: Path, row: str) -> Tensor:
        """Returns the contents of a file. Raises UserError naming the row."""

    def _path(self, prompt: Prompt, key: str) -> Path:
        """Returns a path of a row. Raises ValueError where the row has no file there, or one outside of the root."""
        named = prompt.metadata.get(key)
        if not isinstance(named, str):
            raise ValueError(f"row {prompt.id}: key {key!r} must be the path of {self.kind}")
        path = (self.root / named).resolve()
        if not path.is_relative_to(self.root):
            raise ValueError(f"row {prompt.id}: {named!r} leads out of {self.root}")
        if not path.is_file():
            raise ValueError(f"row {prompt.id}: there is no file {path}")
        return path
