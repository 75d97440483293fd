"""Images to edit, which the rows of a file of prompts name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.image_files import ImageFiles

MASK = "mask"  # the column of what may change, for `source_similarity`


@dataclass(frozen=True)
class ImagesToEdit:
    """Reads a row's images: a path below `root`, data:image/png;base64,..., or a list of these, in the column `field`;
    and the path of its mask."""

    root: Path
    field: str

    @property
    def files(self) -> ImageFiles:
        return ImageFiles(self.root)

    def check(self, row: Mapping[str, Any]) -> None:
        """Raises RowError for an image or a mask that is missing or can not be read, as far as its header tells."""
        images = self.references(row)
        if not images:
            columns = ", ".join(map(str, row)) or "none"
            raise RowError(
                f"key {self.field!r} (task.data.image_field) does not name an image to edit (keys: {columns})"
            )
        for image in (*images, *_mask(row)):
            self.files.check(image)

    def references(self, row: Mapping[str, Any]) -> list[Any]:
        """Returns what stands for the images of a row."""
        value = row.get(self.field)
        return [] if not value else [*value] if isinstance(value, (list, tuple)) else [value]

    def opened(self, prompt: Prompt) -> Prompt:
        """Returns a prompt with its images, and its mask as an image. Raises RowError."""
        images = tuple(self.files.decoded(image) for image in self.references(prompt.metadata))
        metadata = dict(prompt.metadata)
        for mask in _mask(metadata):
            metadata[MASK] = self.files.decoded(mask)
        return replace(prompt, images=images, metadata=metadata)


def _mask(row: Mapping[str, Any]) -> list[Any]:
    return [] if row.get(MASK) is None else [row[MASK]]


class PromptsToEdit:
    """Prompts whose images are opened on access. Raises UserError for one that turns out damaged then."""

    def __init__(self, prompts: Sequence[Prompt], images: ImagesToEdit) -> None:
        self.prompts, self.images = prompts, images

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.prompts[index]
        try:
            return self.images.opened(prompt)
        except RowError as error:
            raise UserError(f"row {prompt.id}: {error}") from None
