"""Questions in a Parquet file. This module imports pyarrow, which is an optional dependency."""

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
from mmrl.tasks.data.bounds import GIBIBYTE, MAX_GROUP_BYTES, MAX_GROUP_ROWS, MAX_ROWS
from mmrl.tasks.visual_qa import verdicts

BATCH_BYTES = GIBIBYTE // 4  # rows are read in batches of about this size, and their decompressed size is checked
MIN_BATCH_ROWS, MAX_BATCH_ROWS = 64, 65536
log = logging.getLogger(__name__)


def open_parquet(path: Path, cache_bytes: int) -> ParquetRows:
    """Opens a file; cache_bytes: see `ParquetRows`. Raises ValueError if it is not a Parquet file, or too large."""
    try:
        return ParquetRows(path, cache_bytes)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file: {' '.join(str(error).split())}") from error


class ParquetRows:
    """Rows of a Parquet file. The row groups used last stay in memory, up to `cache_bytes` bytes of them."""

    unit = "row"

    def __init__(self, path: Path, cache_bytes: int):
        """Opens the file, whose row groups are read on access. cache_bytes: see the class. Raises ValueError if it has
        too many rows, or too large row groups."""
        self._path, self._file, self._cache_bytes = path, pq.ParquetFile(path), cache_bytes
        groups = [self._file.metadata.row_group(group) for group in range(self._file.metadata.num_row_groups)]
        self._starts = [0, *accumulate(group.num_rows for group in groups)]  # the first row of each group, and the end
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()  # the least recently used group comes first
        self._sizes: dict[int, int] = {}  # bytes of the groups in _tables; computing them is slow
        self._errors: dict[int, str] = {}  # groups that cannot be read, and why
        self._lock = threading.Lock()
        max_group_rows = max((group.num_rows for group in groups), default=0)
        if self._starts[-1] > MAX_ROWS or max_group_rows > MAX_GROUP_ROWS:
            raise ValueError(
                f"{path}: {self._starts[-1]} rows in row groups of up to {max_group_rows} rows; at most {MAX_ROWS} "
                f"rows in groups of {MAX_GROUP_ROWS} are read; split the file, or write smaller row groups"
            )
        self._warn_if_large([group.total_byte_size for group in groups])

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a process that reads the same file: it opens the file itself, with a cache of its
        own."""
        fields = ("_path", "_cache_bytes", "_starts", "_errors")
        return {name: vars(self)[name] for name in fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _file=pq.ParquetFile(state["_path"]), _tables=OrderedDict(), _sizes={})
        self._lock = threading.Lock()

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
        """Returns row `row` of the file as a mapping. Raises RowError if its row group cannot be read."""
        group = bisect_right(self._starts, row) - 1
        with self._lock:
            table = self._table(group)
        return table.slice(row - self._starts[group], 1).to_pylist()[0]

    def _table(self, group: int) -> pa.Table:
        """Returns a row group, from the cache if it is there. Raises RowError if it cannot be read or is too large; the
        error is remembered, so that later calls do not read it again."""
        if group in self._errors:
            raise RowError(self._errors[group])
        if group not in self._tables:
            try:
                self._tables[group], self._sizes[group] = self._read_group(group)
            except (pa.ArrowException, OSError, RowError) as error:
                self._errors[group] = f"row group {group}: {' '.join(str(error).split())}"
                raise RowError(self._errors[group]) from None
        self._tables.move_to_end(group)
        while len(self._tables) > 1 and sum(self._sizes.values()) > self._cache_bytes:
            dropped, _ = self._tables.popitem(last=False)
            del self._sizes[dropped]
        return self._tables[group]

    def _read_group(self, group: int) -> tuple[pa.Table, int]:
        """Returns a row group and its size in bytes. It is read in batches, and reading stops at MAX_GROUP_BYTES: a
        value that is stored once can fill any number of rows."""
        stored_bytes = self._file.metadata.row_group(group).total_byte_size
        # No value is longer than stored_bytes, so that a batch stays near BATCH_BYTES.
        batch_rows = min(max(BATCH_BYTES // max(stored_bytes, 1), MIN_BATCH_ROWS), MAX_BATCH_ROWS)
        batches, size = [], 0
        if stored_bytes <= MAX_GROUP_BYTES:
            for batch in self._file.iter_batches(batch_rows, row_groups=[group]):
                batches.append(batch)
                size += batch.nbytes
                if size > MAX_GROUP_BYTES:
                    break
        if max(stored_bytes, size) > MAX_GROUP_BYTES:
            raise RowError(f"it decompresses to more than {MAX_GROUP_BYTES / GIBIBYTE:g} GiB; write smaller row groups")
        return pa.Table.from_batches(batches, self._file.schema_arrow).combine_chunks(), size

    def _warn_if_large(self, sizes: list[int]) -> None:
        """Warns if the decompressed row groups, `sizes` in bytes, do not all fit into the cache."""
        if sum(sizes) > self._cache_bytes:
            log.warning(
                "%s decompresses to %.3g GiB, but task.data.parquet_gib keeps only %.3g GiB in memory, so each prompt "
                "may read a row group of up to %.3g GiB; raise parquet_gib, or write smaller row groups",
                self._path,
                sum(sizes) / GIBIBYTE,
                self._cache_bytes / GIBIBYTE,
                max(sizes) / GIBIBYTE,
            )
