"""What verifiers pay, by hand: `answers_by_hand/NAME.jsonl` says it of answers as people and models write them.

A row has `kind`, `reward` (as in a task's YAML), `gold`, `response`, `expected` and `why`, and where they are needed
`question`, `image` (width and height), `metadata`, `others` (what the rest of the group said) and `read` (the lines
that are read in the image that was made). `expected` is a number, `full`, `least` (the lowest that the verifier gives),
`less` (anything below full) or `unscored`. The values say what is right, whatever the verifiers do.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rewards.visual import images
from mmrl.rollouts import Prompt, Sample

FOLDER = Path(__file__).parent / "answers_by_hand"
LEAST = {"box_giou": -1.0, "abstention": -1.0}  # of all others 0
WORDS = ("full", "least", "less", "unscored")
KEYS = {"kind", "reward", "gold", "response", "expected", "why"}
MORE = {"question", "image", "metadata", "others", "read"}


def rows():
    for path in sorted(FOLDER.glob("*.jsonl")):
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(text)
            yield pytest.param(row, id=f"{path.stem}-{line}-{row['kind'].replace(' ', '_')}")


ROWS = list(rows())


@pytest.fixture(scope="module")
def built():
    """Sets of one reward by their YAML section; math has processes of its own, which end with the module."""
    sets: dict[str, RewardSet] = {}
    yield sets
    for rewards in sets.values():
        for component in rewards.components:
            getattr(component, "close", lambda: None)()


def reward_set(section, built):
    key = json.dumps(section, sort_keys=True)
    if key not in built:
        built[key] = RewardSet([RewardSpec(**section)])
    return built[key]


def samples_of(row):
    shown = (Image.new("RGB", tuple(row["image"])),) if "image" in row else ()
    question = row.get("question", "question")
    prompt = Prompt("p", question, images=shown, answer=row["gold"], metadata=row.get("metadata", {}))
    made = torch.zeros(3, 8, 8) if "read" in row else None
    return [
        Sample(prompt, response, 5, False, 100, image=made) for response in (row["response"], *row.get("others", ()))
    ]


@pytest.mark.parametrize("row", ROWS)
def test_an_answer_earns_what_is_written_down(row, built, monkeypatch):
    if "read" in row:  # the reading of images has tests of its own
        monkeypatch.setattr(images, "reader", lambda threads: lambda image: row["read"])
        built = {}
    samples, expected = samples_of(row), row["expected"]
    found = float(reward_set(row["reward"], built).score(samples, torch.zeros(len(samples), dtype=torch.long))[0, 0])
    if expected == "unscored":
        assert found != found, row["why"]
    elif expected == "less":
        assert found < 0.999, row["why"]
    else:
        wanted = {"full": 1.0, "least": LEAST.get(row["reward"]["name"], 0.0)}.get(expected, expected)
        assert found == pytest.approx(wanted, abs=1e-5), row["why"]


def test_the_tables_are_whole():
    given = [param.values[0] for param in ROWS]
    assert len(given) >= 420
    for row in given:
        assert KEYS <= set(row) <= KEYS | MORE and row["why"]
        assert isinstance(row["expected"], int | float) or row["expected"] in WORDS
    asked = Counter(json.dumps({k: v for k, v in row.items() if k not in ("kind", "why", "expected")}) for row in given)
    assert [text for text, count in asked.items() if count > 1] == []
