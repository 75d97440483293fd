"""Questions about bar and line charts that matplotlib draws of real tables, with exact answers.

The tables are files of the package vega_datasets (extra `charts`): nothing is fetched, and none is shipped here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from io import BytesIO
from typing import Any, Literal

import numpy as np
from PIL import Image

from mmrl.rollouts import Prompt
from mmrl.runtime.installation import extra_command
from mmrl.tasks.visual_qa.data.kinds import ChartQuestion, ChartShape, ChartTable

SPLITS = ("train", "heldout")
SIZE = (4.48, 3.36)  # inches of a chart
DPI = 100
FEWEST, MOST = 4, 8  # values of a chart
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


@dataclass(frozen=True)
class ChartColumn:
    """Numbers of a table: one series for each value of the column `apart`, or one in all.

    labels: the column that names each value; of a date its first `letters` are kept. decimals: values are rounded to
    them before they are drawn and questions are written.
    """

    table: ChartTable
    labels: str
    values: str
    title: str  # of a chart; {} is the value of `apart`
    unit: str
    decimals: int
    apart: tuple[str, ...] = ()
    letters: int | None = None


COLUMNS = (
    ChartColumn("barley", "variety", "yield", "Barley at {} in {}", "bushels per acre", 1, ("site", "year")),
    ChartColumn(
        "iowa-electricity", "year", "net_generation", "Electricity in Iowa: {}", "thousand MWh", 0, ("source",), 4
    ),
    ChartColumn("stocks", "date", "price", "Price of {}", "US dollars", 0, ("symbol",), 7),
    ChartColumn("us-employment", "month", "manufacturing", "Jobs in manufacturing", "thousands", 0, (), 7),
    ChartColumn("us-employment", "month", "construction", "Jobs in construction", "thousands", 0, (), 7),
    ChartColumn("us-employment", "month", "government", "Jobs in government", "thousands", 0, (), 7),
    ChartColumn("wheat", "year", "wheat", "Price of wheat", "shillings per quarter", 0),
    ChartColumn("wheat", "year", "wages", "Weekly wages", "shillings", 1),
    ChartColumn("driving", "year", "miles", "Miles driven by each person", "miles", 0),
    ChartColumn("driving", "year", "gas", "Price of gasoline", "dollars per gallon", 2),
    ChartColumn("crimea", "date", "disease", "Deaths from disease in the Crimea", "deaths", 0, (), 7),
    ChartColumn("crimea", "date", "wounds", "Deaths from wounds in the Crimea", "deaths", 0, (), 7),
)


@dataclass(frozen=True)
class ChartSeries:
    """The numbers of a chart: `values` are rounded, one for each of `labels`, in the order of the table."""

    title: str
    unit: str
    decimals: int
    labels: tuple[str, ...]
    values: tuple[float, ...]

    def part(self, start: int, length: int) -> ChartSeries:
        span = slice(start, start + length)
        return ChartSeries(self.title, self.unit, self.decimals, self.labels[span], self.values[span])

    def formatted(self, value: float) -> str:
        return f"{value:.{self.decimals}f}"


def check_packages() -> None:
    """Raises ValueError where a package that charts need is not installed."""
    missing = [name for name in ("vega_datasets", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ValueError(f"charts need {' and '.join(missing)}: {extra_command('charts')}")


@lru_cache(maxsize=1)
def every_series() -> dict[str, tuple[ChartSeries, ...]]:
    """Returns the series of each table that have at least `FEWEST` values."""
    series: dict[str, tuple[ChartSeries, ...]] = {}
    for column in COLUMNS:
        series[column.table] = series.get(column.table, ()) + tuple(s for s in _read(column) if len(s.values) >= FEWEST)
    return series


def _read(column: ChartColumn) -> list[ChartSeries]:
    """Returns the series of labels and values of a table of vega_datasets; one by group where `apart` names columns."""
    from vega_datasets import local_data

    frame = local_data(column.table).dropna(subset=[column.values])
    parts = [((), frame)] if not column.apart else frame.groupby(list(column.apart), sort=True)
    return [
        ChartSeries(
            column.title.format(*apart),
            column.unit,
            column.decimals,
            tuple(str(label)[: column.letters] for label in part[column.labels]),
            tuple(round(float(value), column.decimals) for value in part[column.values]),
        )
        for apart, part in parts
    ]


def draw(series: ChartSeries, shape: ChartShape, colour: str, *, written: bool) -> Image.Image:
    """Draws a chart whose values start from 0, of 448 x 336 pixels. written: each value stands beside its bar or
    point."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    positions, buffer = range(len(series.values)), BytesIO()
    with matplotlib.style.context("default"):  # whatever the user's own settings are
        figure = Figure(SIZE, DPI, layout="constrained")
        axes = figure.add_subplot()
        if shape == "bar":
            axes.bar(positions, series.values, color=colour)
        else:
            axes.plot(positions, series.values, color=colour, marker="o")
        axes.set_xticks(positions, series.labels, rotation=45, ha="right")
        axes.set_ylim(0, 1.15 * max(series.values))
        axes.set_title(series.title)
        axes.set_ylabel(series.unit)
        if written:
            annotation: dict[str, Any] = {
                "xytext": (0, 4),
                "textcoords": "offset points",
                "ha": "center",
                "fontsize": 8,
            }
            for position, value in zip(positions, series.values, strict=True):
                axes.annotate(series.formatted(value), (position, value), **annotation)
        FigureCanvasAgg(figure).print_png(buffer)
    with Image.open(buffer) as image:
        return image.convert("RGB")


@dataclass(frozen=True)
class ChartItem:
    text: str
    answer: str


def _largest(series: ChartSeries, rng: np.random.Generator) -> ChartItem | None:
    top = max(series.values)
    if series.values.count(top) > 1:
        return None
    return ChartItem("Which has the largest value?", series.labels[series.values.index(top)])


def _value(series: ChartSeries, rng: np.random.Generator) -> ChartItem | None:
    index = int(rng.integers(len(series.values)))
    return ChartItem(f"What is the value of {series.labels[index]}?", series.formatted(series.values[index]))


def _above(series: ChartSeries, rng: np.random.Generator) -> ChartItem | None:
    """Asks how many values exceed a limit between two neighbours; None where no number with as many decimals fits."""
    ordered = sorted(series.values)
    below = int(rng.integers(len(ordered) - 1))
    limit = round((ordered[below] + ordered[below + 1]) / 2, series.decimals)
    if not ordered[below] < limit < ordered[below + 1]:
        return None
    return ChartItem(f"How many values are above {series.formatted(limit)}?", str(len(ordered) - below - 1))


def _difference(series: ChartSeries, rng: np.random.Generator) -> ChartItem | None:
    """Asks for the difference of two drawn values."""
    one, other = (int(index) for index in rng.choice(len(series.values), 2, replace=False))
    if series.values[one] < series.values[other]:
        one, other = other, one
    answer = series.formatted(series.values[one] - series.values[other])
    return ChartItem(f"By how much is {series.labels[one]} above {series.labels[other]}?", answer)


QUESTIONS: dict[ChartQuestion, Callable[[ChartSeries, np.random.Generator], ChartItem | None]] = {
    "largest": _largest,
    "value": _value,
    "above": _above,
    "difference": _difference,
}


class ChartsSource:
    """`size` questions about charts; item i depends on (split, seed, i) and the options alone.

    Item i is of kind `kinds[i % len(kinds)]`; tables, the series of a table, where its part begins, how long that is,
    the chart's shape and its colour are drawn by chance. A question whose answer would be ambiguous is never asked.
    Metadata: `kind`, `table`, `title`, `labels`, `values` and `shape`. Raises ValueError where a package is missing.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"],
        *,
        size: int,
        seed: int,
        tables: Sequence[ChartTable],
        kinds: Sequence[ChartQuestion],
        shapes: Sequence[ChartShape],
        written: bool = True,
    ) -> None:
        check_packages()
        self.split, self.size, self.seed = split, size, seed
        self.tables, self.kinds, self.shapes, self.written = tuple(tables), tuple(kinds), tuple(shapes), written

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind, item = self.kinds[index % len(self.kinds)], None
        while item is None:
            table = self.tables[rng.integers(len(self.tables))]
            table_series = every_series()[table]
            whole = table_series[rng.integers(len(table_series))]
            length = int(rng.integers(FEWEST, min(MOST, len(whole.values)) + 1))
            series = whole.part(int(rng.integers(len(whole.values) - length + 1)), length)
            item = QUESTIONS[kind](series, rng) if max(series.values) > 0 else None  # else there is nothing to see
        shape, colour = self.shapes[rng.integers(len(self.shapes))], COLOURS[rng.integers(len(COLOURS))]
        return Prompt(
            id=f"charts-{self.split}-{self.seed}-{index}",
            text=item.text,
            images=(draw(series, shape, colour, written=self.written),),
            answer=item.answer,
            metadata={
                "kind": kind,
                "table": table,
                "title": series.title,
                "labels": list(series.labels),
                "values": list(series.values),
                "shape": shape,
            },
        )
