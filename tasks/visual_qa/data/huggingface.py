"""Questions from a dataset of the Hugging Face hub, or from a local folder in one of its formats."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mmrl.errors import describe_error
from mmrl.runtime.installation import extra_command
from mmrl.tasks.data.bounds import MAX_FRAMES, MAX_PIXELS
from mmrl.tasks.data.image_files import ImageFiles
from mmrl.tasks.visual_qa import verdicts
from mmrl.tasks.visual_qa.data.rows import Rows, RowSource
from mmrl.tasks.visual_qa.reading.fields import Fields
from mmrl.tasks.visual_qa.reading.shapes import shaped

log = logging.getLogger(__name__)


class HuggingFaceSource(RowSource):
    """Questions of `split` of the dataset `name`, fields mapped and rows checked as by `FileSource`.

    name: what `datasets.load_dataset` takes (a hub name, or 'parquet' with `options={"data_files": ...}`), or a folder
    written by `save_to_disk`. `bad` and the prompt ids, '<name>:<row>', count rows from 0 as `datasets` does. Images
    that are files are opened below `image_root` only, also by the absolute paths that `datasets` writes.

    Raises ModuleNotFoundError where `datasets` is not installed, ValueError as `RowSource`, and what `datasets` raises.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        *,
        image_field: str | Sequence[str] = "images",
        problem_field: str = "problem",
        answer_field: str = "answer",
        video_field: str = "videos",
        options_field: str | None = None,
        max_frames: int = MAX_FRAMES,
        image_root: str | Path | None = None,
        max_pixels: int = MAX_PIXELS,
        max_bad_share: float = 0.01,
        validate: bool = True,
        options: Mapping[str, Any] | None = None,
        stream: int | None = None,
    ):
        root = None if image_root is None else Path(image_root)
        image_files = ImageFiles(root, max_pixels)
        rows, title = split_rows(name, split, options or {}, stream), f"{name} ({split})"
        fields = Fields.named(
            image_field, problem_field, answer_field, video_field, options_field, image_files, max_frames
        )
        super().__init__(
            rows,
            shaped(fields, rows, title),
            name=title,
            prefix=name,
            max_bad_share=max_bad_share,
            validate=validate,
        )


def split_rows(name: str, split: str, options: Mapping[str, Any], stream: int | None = None) -> Rows:
    """Returns the rows of a split of a dataset of the hub, or of a folder that `save_to_disk` wrote. stream: how many
    of its first rows are read without a download of the whole, and held in memory; None: all are downloaded.

    Raises ValueError for a stream without a number of rows, which has no end that a run could know.
    """
    if stream is not None:
        return _StreamedRows(name, split, _load(name, split, dict(options) | {"streaming": True}), stream)
    if options.get("streaming"):
        raise ValueError(
            f"{name}: streaming=true in task.data.options has no rows by number; set task.data.stream to how many "
            "of its first rows are to be read and held in memory"
        )
    return _Rows(_load(name, split, dict(options)))


class _Rows:
    """Rows as Arrow holds them: `datasets` would decode images itself, and one bad image would end the pass."""

    unit = "row"

    def __init__(self, dataset: Any):
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> object:
        return self._dataset[row : row + 1].to_pylist()[0]

    def number(self, row: int) -> int:
        return row

    def columns(self) -> Sequence[str]:
        names: list[str] = self._dataset.column_names
        return names

    def stamp(self) -> list[Any] | None:
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        return [verdicts.stamp(file) for file in files] if files else None  # none: it lies in memory


class _StreamedRows:
    """The first rows of a stream, in memory, with images as the bytes of their files."""

    unit = "row"

    def __init__(self, name: str, split: str, dataset: Any, count: int):
        try:
            self._rows = list(islice(dataset.decode(False), count))
        except (OSError, ValueError) as error:
            raise ValueError(f"{name} ({split}): its stream ended in an error: {describe_error(error)}") from None
        if len(self._rows) < count:
            log.info("%s (%s): its stream ended after %d rows", name, split, len(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> object:
        return self._rows[row]

    def number(self, row: int) -> int:
        return row

    def columns(self) -> Sequence[str]:
        return list(self._rows[0]) if self._rows else []

    def stamp(self) -> list[Any] | None:
        return None


def _load(name: str, split: str, options: dict[str, Any]) -> Any:
    """Loads a split with the package datasets: of the hub, or saved by it to a folder. Raises ModuleNotFoundError
    without it, ValueError for an unknown split."""
    if importlib.util.find_spec("datasets") is None:
        raise ModuleNotFoundError(
            f"task.data.type=huggingface needs the package datasets: {extra_command('huggingface')}"
        )
    import datasets

    folder = Path(name)
    if options.get("streaming"):
        return datasets.load_dataset(name, split=split, **options)
    if not any((folder / marker).is_file() for marker in ("dataset_dict.json", "dataset_info.json")):
        return datasets.load_dataset(name, split=split, **options)
    saved = datasets.load_from_disk(name, **options)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise ValueError(f"{name}: no split {split!r}; it has {', '.join(saved)}")
    return saved[split]
