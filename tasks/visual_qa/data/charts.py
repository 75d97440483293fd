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
SIZE = (4.48, 3.36)  # width and height of a chart in inches
DPI = 100
MIN_VALUES, MAX_VALUES = 4, 8  # bars or points of a chart
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


@dataclass(frozen=True)
class ChartColumn:
    """A column of numbers of a table: one series of values for each group of `group_by`, or one series in all.

    Values are rounded before they are drawn and before questions are written.
    """

    table: ChartTable
    labels: str  # the column with a label for each value
    values: str  # the column with the values
    title: str  # of the chart; each {} is filled with the group's value of a column of `group_by`
    unit: str
    decimals: int
    group_by: tuple[str, ...] = ()
    label_length: int | None = None  # labels are cut to so many characters, which makes a year or month of a date


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
    """The values of a chart, rounded to `decimals`, with a label each, in the order of the table."""

    title: str
    unit: str
    decimals: int
    labels: tuple[str, ...]
    values: tuple[float, ...]

    def crop(self, start: int, length: int) -> ChartSeries:
        """Returns `length` consecutive values from index `start` on."""
        span = slice(start, start + length)
        return ChartSeries(self.title, self.unit, self.decimals, self.labels[span], self.values[span])

    def formatted(self, value: float) -> str:
        return f"{value:.{self.decimals}f}"


def check_packages() -> None:
    """Raises ValueError if a package that charts need is not installed."""
    missing = [name for name in ("vega_datasets", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ValueError(f"charts need {' and '.join(missing)}: {extra_command('charts')}")


@lru_cache(maxsize=1)
def series_by_table() -> dict[str, tuple[ChartSeries, ...]]:
    """Returns for each table its series with at least MIN_VALUES values."""
    series: dict[str, tuple[ChartSeries, ...]] = {}
    for column in COLUMNS:
        long_enough = tuple(s for s in _read_series(column) if len(s.values) >= MIN_VALUES)
        series[column.table] = series.get(column.table, ()) + long_enough
    return series


def _read_series(column: ChartColumn) -> list[ChartSeries]:
    """Reads the series of a column from the package vega_datasets: one for each group of `group_by`, or one in all."""
    from vega_datasets import local_data

    frame = local_data(column.table).dropna(subset=[column.values])
    groups = [((), frame)] if not column.group_by else frame.groupby(list(column.group_by), sort=True)
    return [
        ChartSeries(
            column.title.format(*group_values),
            column.unit,
            column.decimals,
            tuple(str(label)[: column.label_length] for label in group[column.labels]),
            tuple(round(float(value), column.decimals) for value in group[column.values]),
        )
        for group_values, group in groups
    ]


def draw_chart(series: ChartSeries, shape: ChartShape, color: str, *, show_values: bool) -> Image.Image:
    """Draws a chart of 448 x 336 pixels whose axis of values starts at 0. show_values: whether each value is written
    beside its bar or point."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    positions, buffer = range(len(series.values)), BytesIO()
    with matplotlib.style.context("default"):  # whatever the user's own settings are
        figure = Figure(SIZE, DPI, layout="constrained")
        axes = figure.add_subplot()
        if shape == "bar":
            axes.bar(positions, series.values, color=color)
        else:
            axes.plot(positions, series.values, color=color, marker="o")
        axes.set_xticks(positions, series.labels, rotation=45, ha="right")
        axes.set_ylim(0, 1.15 * max(series.values))
        axes.set_title(series.title)
        axes.set_ylabel(series.unit)
        if show_values:
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
    """A question about a chart and its answer."""

    text: str
    answer: str


def _largest(series: ChartSeries, rng: np.random.Generator) -> ChartItem | None:
    """Asks for the label of the largest value. Returns None if several values are the largest."""
    top = max(series.values)
    if series.values.count(top) > 1:
        return None
    return ChartItem("Which has the largest value?", series.labels[series.values.index(top)])


def _value(series: ChartSeries, rng: np.random.Generator) -> ChartItem | None:
    """Asks for the value of a random label."""
    index = int(rng.integers(len(series.values)))
    return ChartItem(f"What is the value of {series.labels[index]}?", series.formatted(series.values[index]))


def _above(series: ChartSeries, rng: np.random.Generator) -> ChartItem | None:
    """Asks how many values exceed a threshold between two values that follow one another in sorted order. Returns None
    if no number with `series.decimals` decimals lies between them."""
    ordered = sorted(series.values)
    index = int(rng.integers(len(ordered) - 1))
    threshold = round((ordered[index] + ordered[index + 1]) / 2, series.decimals)
    if not ordered[index] < threshold < ordered[index + 1]:
        return None
    return ChartItem(f"How many values are above {series.formatted(threshold)}?", str(len(ordered) - index - 1))


def _difference(series: ChartSeries, rng: np.random.Generator) -> ChartItem | None:
    """Asks for the difference of two random values."""
    larger, smaller = (int(index) for index in rng.choice(len(series.values), 2, replace=False))
    if series.values[larger] < series.values[smaller]:
        larger, smaller = smaller, larger
    answer = series.formatted(series.values[larger] - series.values[smaller])
    return ChartItem(f"By how much is {series.labels[larger]} above {series.labels[smaller]}?", answer)


# A function returns None if the question would have no answer, or several.
QUESTIONS: dict[ChartQuestion, Callable[[ChartSeries, np.random.Generator], ChartItem | None]] = {
    "largest": _largest,
    "value": _value,
    "above": _above,
    "difference": _difference,
}


class ChartsSource:
    """`size` questions about charts; item i depends on (split, seed, i) and the options only.

    Item i is of kind `kinds[i % len(kinds)]`. Everything else is random: the table, the series, which consecutive
    values of it are drawn, the chart's shape and its color. Ambiguous questions are replaced. show_values: see
    `draw_chart`. Metadata: `kind`, `table`, `title`, `labels`, `values` and `shape`. Raises ValueError if a package is
    missing.
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
        show_values: bool = True,
    ) -> None:
        check_packages()
        self.split, self.size, self.seed = split, size, seed
        self.tables, self.kinds, self.shapes = tuple(tables), tuple(kinds), tuple(shapes)
        self.show_values = show_values

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns question `index`: a random part of a random series, drawn as a chart. Everything is determined by the
        split, the seed and `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        kind, item = self.kinds[index % len(self.kinds)], None
        while item is None:
            table = self.tables[rng.integers(len(self.tables))]
            table_series = series_by_table()[table]
            full_series = table_series[rng.integers(len(table_series))]
            length = int(rng.integers(MIN_VALUES, min(MAX_VALUES, len(full_series.values)) + 1))
            series = full_series.crop(int(rng.integers(len(full_series.values) - length + 1)), length)
            item = QUESTIONS[kind](series, rng) if max(series.values) > 0 else None  # a chart of zeros shows nothing
        shape, color = self.shapes[rng.integers(len(self.shapes))], COLORS[rng.integers(len(COLORS))]
        return Prompt(
            id=f"charts-{self.split}-{self.seed}-{index}",
            text=item.text,
            images=(draw_chart(series, shape, color, show_values=self.show_values),),
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
