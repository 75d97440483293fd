"""Preference pairs from the user's files: a chosen and a rejected image or video for each prompt."""

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
    """Preference pairs: rows with a `prompt` and the paths `chosen` and `rejected`, relative to the file's folder.

    Metadata of the prompts: `target` (the chosen one) and `rejected`, float32 tensors, 0 to 1. Raises ValueError if a
    row lacks such a path; reading a pair raises UserError if one of its files cannot be used.
    """

    media: str  # what the files hold, for error messages, such as "an image"

    def __init__(self, path: Path, *, max_bad_share: float, field: str = "prompt") -> None:
        """Reads the rows, and checks that their files exist. path, field, max_bad_share: see `load_prompts`."""
        self.root = path.parent.resolve()
        self.prompts = load_prompts(path, field=field, max_bad_share=max_bad_share)
        # For its errors only: raises ValueError for a path that cannot be used.
        for prompt in self.prompts:
            for key in SIDES:
                self._path(prompt, key)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Returns prompt `index` with the chosen and the rejected image or video in its metadata. Raises UserError if a
        file cannot be read, or the two differ in size."""
        prompt = self.prompts[index]
        target, rejected = (self.read(self._path(prompt, key), f"row {prompt.id}") for key in SIDES)
        if target.shape != rejected.shape:
            raise UserError(
                f"row {prompt.id}: chosen has the shape {list(target.shape)}, rejected {list(rejected.shape)}; "
                "give both the same size"
            )
        return replace(prompt, metadata=prompt.metadata | {"target": target, "rejected": rejected})

    @abstractmethod
    def read(self, path: Path, row: str) -> Tensor:
        """Returns the image or video of a file, float32, 0 to 1. Raises UserError, which names `row`, if the file
        cannot be read."""

    def _path(self, prompt: Prompt, key: str) -> Path:
        """Returns the path under `key` of a row. Raises ValueError if there is no such file, or it lies outside of the
        root."""
        reference = prompt.metadata.get(key)
        if not isinstance(reference, str):
            raise ValueError(
                f"row {prompt.id}: key {key!r} must be the path of {self.media}, not {type(reference).__name__}"
            )
        path = (self.root / reference).resolve()
        if not path.is_relative_to(self.root):
            raise ValueError(f"row {prompt.id}: {reference!r} lies outside of {self.root}; move the file into it")
        if not path.is_file():
            raise ValueError(f"row {prompt.id}: there is no file {path}")
        return path
