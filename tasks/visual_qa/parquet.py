"""Questions in a Parquet file. This module alone imports pyarrow, which is an extra."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.bounds import GIBIBYTE, MAX_GROUP, MAX_GROUP_ROWS, MAX_ROWS
from mmrl.tasks.visual_qa import verdicts

PART = GIBIBYTE // 4  # bytes that rows may unpack to before they are counted
LEAST_AT_ONCE, MOST_AT_ONCE = 64, 65536  # rows
log = logging.getLogger(__name__)


def opened(path: Path, keep: int) -> ParquetRows:
    """Opens a file; keep: bytes of row groups that stay in memory. Raises ValueError for a file that is not a Parquet
    file, or too large."""
    try:
        return ParquetRows(path, keep)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file: {' '.join(str(error).split())}") from error


class ParquetRows:
    """Rows of a Parquet file; the row groups used last are kept as Arrow memory, up to `keep` bytes of them."""

    unit = "row"

    def __init__(self, path: Path, keep: int):
        self._path, self._file, self._keep = path, pq.ParquetFile(path), keep
        groups = [self._file.metadata.row_group(group) for group in range(self._file.metadata.num_row_groups)]
        self._starts = [0, *accumulate(group.num_rows for group in groups)]
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._sizes: dict[int, int] = {}  # bytes of those that are kept; to ask Arrow takes long
        self._refused: dict[int, str] = {}
        self._reading = threading.Lock()
        most = max((group.num_rows for group in groups), default=0)
        if self._starts[-1] > MAX_ROWS or most > MAX_GROUP_ROWS:
            raise ValueError(
                f"{path}: {self._starts[-1]} rows in row groups of up to {most}; {MAX_ROWS} in groups of "
                f"{MAX_GROUP_ROWS} are read at most"
            )
        self._advise([group.total_byte_size for group in groups])

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a process that reads the same file: it opens it anew and keeps row groups of its
        own."""
        fields = ("_path", "_keep", "_starts", "_refused")
        return {name: vars(self)[name] for name in fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _file=pq.ParquetFile(state["_path"]), _tables=OrderedDict(), _sizes={})
        self._reading = threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def number(self, row: int) -> int:
        return row + 1

    def columns(self) -> Sequence[str]:
        names: list[str] = self._file.schema_arrow.names
        return names

    def stamp(self) -> list[Any]:
        return verdicts.stamp(self._path)

    def __getitem__(self, row: int) -> object:
        group = bisect_right(self._starts, row) - 1
        with self._reading:
            table = self._table(group)
        return table.slice(row - self._starts[group], 1).to_pylist()[0]

    def _table(self, group: int) -> pa.Table:
        """Raises RowError, the second time at once, for a row group that cannot be unpacked or would be too large."""
        if group in self._refused:
            raise RowError(self._refused[group])
        if group not in self._tables:
            try:
                self._tables[group], self._sizes[group] = self._unpacked(group)
            except (pa.ArrowException, OSError, RowError) as error:
                self._refused[group] = f"row group {group}: {' '.join(str(error).split())}"
                raise RowError(self._refused[group]) from None
        self._tables.move_to_end(group)
        while len(self._tables) > 1 and sum(self._sizes.values()) > self._keep:
            dropped, _ = self._tables.popitem(last=False)
            del self._sizes[dropped]
        return self._tables[group]

    def _unpacked(self, group: int) -> tuple[pa.Table, int]:
        """Returns a row group and its bytes; read in parts, since one value that is stored once may fill any number of
        rows. No value is longer than all that is stored."""
        stored = self._file.metadata.row_group(group).total_byte_size
        at_once = min(max(PART // max(stored, 1), LEAST_AT_ONCE), MOST_AT_ONCE)
        parts, size = [], 0
        if stored <= MAX_GROUP:
            for part in self._file.iter_batches(at_once, row_groups=[group]):
                parts.append(part)
                size += part.nbytes
                if size > MAX_GROUP:
                    break
        if max(stored, size) > MAX_GROUP:
            raise RowError(f"it unpacks to more than {MAX_GROUP / GIBIBYTE:g} GiB")
        return pa.Table.from_batches(parts, self._file.schema_arrow).combine_chunks(), size

    def _advise(self, sizes: list[int]) -> None:
        """Warns where the unpacked row groups, `sizes` in bytes, do not fit the memory that is kept for them."""
        if sum(sizes) > self._keep:
            log.warning(
                "%s unpacks to %.3g GiB, of which parquet_gib=%.3g are kept, in row groups of up to %.3g GiB: each "
                "prompt may read one; raise parquet_gib, or write it with smaller row groups",
                self._path,
                sum(sizes) / GIBIBYTE,
                self._keep / GIBIBYTE,
                max(sizes) / GIBIBYTE,
            )
