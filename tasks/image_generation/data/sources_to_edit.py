"""Images to edit, to which the rows of a file of prompts refer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.rollouts import Prompt
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.image_files import ImageFiles

MASK = "mask"  # the column of an image that marks the region that may change, for the reward `source_similarity`


@dataclass(frozen=True)
class ImagesToEdit:
    """Reads the images to edit that a row refers to, and its mask. The column `field` holds a path below `root`,
    data:image/png;base64,..., or a list of these."""

    root: Path
    field: str

    @property
    def files(self) -> ImageFiles:
        """The reader of image files below `root`."""
        return ImageFiles(self.root)

    def check(self, row: Mapping[str, Any]) -> None:
        """Reads the headers of a row's images and mask. Raises RowError if an image is missing, or its header shows
        that it cannot be read."""
        images = self.references(row)
        if not images:
            columns = ", ".join(map(str, row)) or "none"
            raise RowError(
                f"key {self.field!r} is missing or empty; set task.data.image_field to the column of the image to "
                f"edit (keys: {columns})"
            )
        for image in (*images, *_mask(row)):
            self.files.check(image)

    def references(self, row: Mapping[str, Any]) -> list[Any]:
        """Returns the paths or data URLs of a row's images, whose column holds one, a list or nothing."""
        value = row.get(self.field)
        if not value:
            return []
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def open(self, prompt: Prompt) -> Prompt:
        """Returns a prompt with its images, and with its mask as an image. Raises RowError if one cannot be read."""
        images = tuple(self.files.decode(image) for image in self.references(prompt.metadata))
        metadata = dict(prompt.metadata)
        for mask in _mask(metadata):
            metadata[MASK] = self.files.decode(mask)
        return replace(prompt, images=images, metadata=metadata)


def _mask(row: Mapping[str, Any]) -> list[Any]:
    """Returns the path or data URL of a row's mask, in a list; empty if it has none."""
    return [] if row.get(MASK) is None else [row[MASK]]


class PromptsToEdit:
    """Prompts whose images are decoded on access, which raises UserError if one cannot be decoded."""

    def __init__(self, prompts: Sequence[Prompt], images: ImagesToEdit) -> None:
        self.prompts, self.images = prompts, images

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Returns prompt `index` with its decoded images. Raises UserError if one cannot be decoded."""
        prompt = self.prompts[index]
        try:
            return self.images.open(prompt)
        except RowError as error:
            raise UserError(f"row {prompt.id}: {error}") from None
