"""Questions about charts by value: answers from the tables' files, and bars and points read back from the pixels."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageColor

from mmrl.tasks.visual_qa.data.charts import ChartSeries, ChartsSource, draw_chart
from tests.tasks.choosing import build

vega_datasets = pytest.importorskip("vega_datasets")
pytest.importorskip("matplotlib")
DATA = Path(vega_datasets.__file__).parent / "_data"
RED = "#d62728"


def questions(kind, size=25, split="train", seed=3, tables=("wheat", "stocks"), **more):
    more = {"shapes": ("bar", "line"), **more}
    source = ChartsSource(split, size=size, seed=seed, tables=tables, kinds=(kind,), **more)
    return [source[index] for index in range(size)]


def test_values_are_those_of_the_tables_files():
    wheat = {str(row["year"]): row for row in json.loads((DATA / "wheat.json").read_text())}
    with (DATA / "stocks.csv").open() as file:
        stocks = list(csv.DictReader(file))
    months = dict(
        zip(
            ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"],
            range(1, 13),
            strict=True,
        )
    )

    def price(title, label):
        (found,) = (
            row["price"]
            for row in stocks
            if row["symbol"] == title.removeprefix("Price of ")
            and f"{row['date'].split()[2]}-{months[row['date'].split()[0]]:02}" == label
        )
        return found

    seen = Counter()
    for prompt in questions("value", 40):
        about = prompt.metadata
        seen[about["title"]] += 1
        for label, value in zip(about["labels"], about["values"], strict=True):
            if about["table"] == "stocks":
                assert value == round(float(price(about["title"], label)))
            elif about["title"] == "Weekly wages":
                assert value == round(wheat[label]["wages"], 1)
            else:
                assert value == round(wheat[label]["wheat"])
        assert 4 <= len(about["values"]) <= 8
    assert {"Weekly wages", "Price of wheat", "Price of AAPL"} <= set(seen)


@pytest.mark.parametrize("kind", ["largest", "value", "above", "difference"])
def test_answers_follow_from_what_is_drawn(kind):
    answers = set()
    for prompt in questions(kind, tables=("wheat", "driving", "crimea")):
        about = prompt.metadata
        drawn = dict(zip(about["labels"], about["values"], strict=True))
        if kind == "largest":
            assert all(drawn[prompt.answer] > value for label, value in drawn.items() if label != prompt.answer)
        elif kind == "value":
            label = prompt.text.removeprefix("What is the value of ").removesuffix("?")
            assert float(prompt.answer) == drawn[label]
        elif kind == "above":
            limit = float(prompt.text.removeprefix("How many values are above ").removesuffix("?"))
            assert limit not in drawn.values() and int(prompt.answer) == sum(v > limit for v in drawn.values())
            assert 0 < int(prompt.answer) < len(drawn)
        else:
            high, low = prompt.text.removeprefix("By how much is ").removesuffix("?").split(" above ")
            assert (
                float(prompt.answer) == pytest.approx(drawn[high] - drawn[low], abs=1e-6) and drawn[high] >= drawn[low]
            )
        answers.add(prompt.answer)
    assert len(answers) > 4


VALUES = (10.0, 40.0, 25.0, 5.0)
SERIES = ChartSeries("A title", "things", 0, ("one", "two", "three", "four"), VALUES)


def coloured(image):
    """Where an image is red: [height, width]."""
    return np.abs(np.asarray(image).astype(int) - ImageColor.getrgb(RED)).sum(-1) < 30


def test_bars_are_as_high_as_their_values():
    red = coloured(draw_chart(SERIES, "bar", RED, show_values=True))
    assert red.shape == (336, 448)
    columns = np.flatnonzero(red.any(0))
    bars = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    heights = np.array([red[:, bar].sum(0).max() for bar in bars])
    np.testing.assert_allclose(heights / heights[1], np.array(VALUES) / 40, atol=0.01)


def test_points_of_a_line_stand_at_their_values():
    """The largest is highest; between two points the line is straight."""
    red = coloured(draw_chart(SERIES, "line", RED, show_values=False))
    columns = np.flatnonzero(red.any(0))
    middle = np.array([np.flatnonzero(red[:, column]).mean() for column in columns])
    places = np.interp(np.linspace(columns[0] + 3, columns[-1] - 3, 4), columns, middle)  # markers are 6 points wide
    rise = (places[3] - places) / (places[3] - places[1])
    np.testing.assert_allclose(rise, (np.array(VALUES) - 5) / 35, atol=0.06)


def test_values_are_written_where_they_are_to_be():
    with_values = np.asarray(draw_chart(SERIES, "bar", RED, show_values=True))
    without = np.asarray(draw_chart(SERIES, "bar", RED, show_values=False))
    changed = np.argwhere((with_values != without).any(-1))
    red = coloured(draw_chart(SERIES, "bar", RED, show_values=True))
    assert len(changed) > 20 and changed[:, 0].min() < np.argwhere(red)[:, 0].min()  # above the highest bar


def test_the_users_own_style_changes_nothing():
    import matplotlib

    plain = draw_chart(SERIES, "line", RED, show_values=True).tobytes()
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 20, "axes.facecolor": "black"}):
        assert draw_chart(SERIES, "line", RED, show_values=True).tobytes() == plain


def test_items_follow_from_split_seed_and_place():
    first = questions("value", 3)
    assert [(p.text, p.images[0].tobytes()) for p in first] == [
        (p.text, p.images[0].tobytes()) for p in questions("value", 3)
    ]
    assert first[0].images[0].tobytes() != questions("value", 1, "heldout")[0].images[0].tobytes()
    assert first[0].images[0].tobytes() != questions("value", 1, seed=4)[0].images[0].tobytes()
    assert {p.metadata["shape"] for p in questions("value", 8, shapes=("line",))} == {"line"}


def test_held_out_questions_are_of_other_tables():
    task = build("visual_qa", {"data": {"type": "charts"}}, 0)
    tables = [{source[i].metadata["table"] for i in range(16)} for source in (task.train, task.evaluation)]
    assert not tables[0] & tables[1] and len(tables[0]) == 4 and len(tables[1]) == 3
    kinds = [task.train[index].metadata["kind"] for index in range(5)]
    assert kinds == ["largest", "value", "above", "difference", "largest"]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("mmrl.tasks.visual_qa.data.charts.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"charts need vega_datasets and matplotlib: pip install -e '.\[charts\]'"):
        questions("value", 1)
