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
from mmrl.tasks.visual_qa.reading.formats import detect_format

log = logging.getLogger(__name__)


class HuggingFaceSource(RowSource):
    """Questions of the split `split` of the dataset `name`. Fields are mapped and rows are checked as by `FileSource`.

    name: what `datasets.load_dataset` takes (a hub name, or 'parquet' with `options={"data_files": ...}`), or a folder
    written by `save_to_disk`. stream: see `split_rows`. `bad` and the prompt ids, '<name>:<row>', count rows from 0 as
    `datasets` does. Image files must lie below `image_root`, even if `datasets` gives absolute paths.

    Raises ModuleNotFoundError if `datasets` is not installed, ValueError as `RowSource`, and what `datasets` raises.
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
        inverted: float = 0.0,
        max_frames: int = MAX_FRAMES,
        image_root: str | Path | None = None,
        max_pixels: int = MAX_PIXELS,
        max_bad_share: float = 0.01,
        validate: bool = True,
        options: Mapping[str, Any] | None = None,
        stream: int | None = None,
    ):
        """Loads the split and detects its format; see `RowSource` for the check of its rows."""
        root = None if image_root is None else Path(image_root)
        image_files = ImageFiles(root, max_pixels)
        rows, title = split_rows(name, split, options or {}, stream), f"{name} ({split})"
        fields = Fields.from_columns(
            image_field, problem_field, answer_field, video_field, options_field, image_files, max_frames, inverted
        )
        super().__init__(
            rows,
            detect_format(fields, rows, title),
            name=title,
            prefix=name,
            max_bad_share=max_bad_share,
            validate=validate,
        )


def split_rows(name: str, split: str, options: Mapping[str, Any], stream: int | None = None) -> Rows:
    """Returns the rows of a dataset's split, from the hub or from a folder that `save_to_disk` wrote.

    stream: the number of first rows to stream and hold in memory; None: the whole dataset is downloaded. Raises
    ValueError if `options` ask for streaming but `stream` is None, since the number of rows must be known.
    """
    if stream is not None:
        return _StreamedRows(name, split, _load(name, split, dict(options) | {"streaming": True}), stream)
    if options.get("streaming"):
        raise ValueError(
            f"{name}: task.data.options has streaming=true; leave that out, and set task.data.stream to the number of "
            "first rows to read and hold in memory"
        )
    return _ArrowRows(_load(name, split, dict(options)))


class _ArrowRows:
    """Rows of a dataset in Arrow's format, where images are bytes. `datasets` would decode the images itself, so that
    one bad image would stop the check of all rows."""

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
        return [verdicts.stamp(file) for file in files] if files else None  # without files the dataset is in memory


class _StreamedRows:
    """The first rows of a streamed dataset, held in memory, with images as the bytes of their files."""

    unit = "row"

    def __init__(self, name: str, split: str, dataset: Any, num_rows: int):
        """Reads the first `num_rows` rows into memory; images stay encoded. Raises ValueError if streaming fails."""
        try:
            self._rows = list(islice(dataset.decode(False), num_rows))
        except (OSError, ValueError) as error:
            raise ValueError(f"{name} ({split}): streaming failed: {describe_error(error)}") from None
        if len(self._rows) < num_rows:
            log.info("%s (%s): the stream ended after %d rows", name, split, len(self._rows))

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
    """Loads a split with the package datasets, from the hub or from a folder that `save_to_disk` wrote. Raises
    ModuleNotFoundError if it is not installed, ConnectionError if the hub cannot be reached, ValueError for an unknown
    split."""
    if importlib.util.find_spec("datasets") is None:
        raise ModuleNotFoundError(
            f"task.data.type=huggingface needs the package datasets: {extra_command('huggingface')}"
        )
    import datasets

    folder = Path(name)
    is_saved = any((folder / marker).is_file() for marker in ("dataset_dict.json", "dataset_info.json"))
    if options.get("streaming") or not is_saved:
        try:
            return datasets.load_dataset(name, split=split, **options)
        except ConnectionError as error:
            raise ConnectionError(
                f"task.data.name={name} cannot be downloaded ({error}); check the network, or set task.data.name to a "
                "folder that `save_to_disk` wrote"
            ) from None
    saved = datasets.load_from_disk(name, **options)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise ValueError(
            f"{name}: no split {split!r}; it has {', '.join(saved)}; correct task.data.train_split or "
            "task.data.eval_split"
        )
    return saved[split]
