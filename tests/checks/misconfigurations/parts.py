"""A case, and what the cases of all users share: rows, images, configurations, modules of the user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from PIL import Image, ImageDraw

Wanted = str | tuple[str, ...]  # a text, or several of which one is enough

COLOURS = {"red": (220, 30, 30), "green": (20, 160, 40), "blue": (30, 60, 220), "orange": (250, 140, 0)}
SIDE = 32  # of the images, in pixels

SHARED: dict[str, Any] = {
    "steps": 1,
    "threads": 1,
    "rollout": {"prompts": 2, "group_size": 4},
    "optim": {"lr": 1e-4},
    "engine": {"micro_batch": 8},
    "evaluation": {"before": False, "every": 0, "prompts": 2},
    "checkpoint": {"every": 0, "best": False},
    "log": {"samples_every": 0},
}


class Written(NamedTuple):
    """A configuration on disk, and overrides for the command line. Relative names in them start from its folder."""

    config: Path
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One input. Commands run with `folder` as the working directory, for modules of the user's own lie there.

    write: makes all files below a folder. must_name: texts that one line of a good message contains, such as the key,
    the file or the row; of a tuple one is enough. A control has none, and raises no alarm. severity: refused, where
    training cannot go well; warned, where it can go on. source: a public thread in which it went wrong, or "own".
    in_config: the configuration alone shows it, and is not read. unset: environment variables that a
    run must not have.
    """

    name: str
    user: Literal["questions", "generation", "robots"]
    write: Callable[[Path], Written]
    must_name: tuple[Wanted, ...] = ()
    severity: Literal["refused", "warned", "sound"] = "refused"
    source: str = "own"
    in_config: bool = False
    unset: tuple[str, ...] = ()


def named_by(case: Case, message: str) -> bool:
    """Tells whether one line of a message holds all that the case wants; "row 1" is not in "row 12"."""
    return any(all(_holds(line, wanted) for wanted in case.must_name) for line in message.splitlines())


def _holds(line: str, wanted: Wanted) -> bool:
    texts = (wanted,) if isinstance(wanted, str) else wanted
    return any(re.search(rf"(?<!\w){re.escape(text)}(?!\d)", line, re.IGNORECASE) for text in texts)


def row(*numbers: int, file: str = "train") -> tuple[str, ...]:
    """Ways to name one of several rows of a file, counted from 1."""
    suffixes = ("", ".jsonl", ".csv", ".txt")
    forms = [f"{word} {n}" for n in numbers for word in ("row", "rows", "line", "lines")]
    return (*forms, *(f"{file}{suffix}:{n}" for n in numbers for suffix in suffixes))


def merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Later trees win; sections are merged."""
    found: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            inner = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merged(found[key], value) if inner else deepcopy(value)
    return found


def write_config(
    folder: Path, *trees: Mapping[str, Any], without: Iterable[str] = (), overrides: Iterable[str] = ()
) -> Written:
    """Writes what the trees make of SHARED, without some dotted keys."""
    made = merged(SHARED, {"run_dir": str(folder / "run")}, *trees)
    for dotted in without:
        *sections, key = dotted.split(".")
        inner = made
        for section in sections:
            inner = inner[section]
        del inner[key]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    return Written(path, tuple(overrides))


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines; a row that is a text stands there as it is."""
    lines = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def write_module(folder: Path, case: str, text: str) -> str:
    """A module of the user's own, of a name that no other case has, for they may be imported in one process."""
    name = f"own_{case}"
    (folder / f"{name}.py").write_text(text)
    return name


def square(number: int, *, side: int = SIDE, colour: str | None = None) -> tuple[Image.Image, list[int], str]:
    """A coloured square on white: the image, the square's box in pixels, its colour. Numbers give different images."""
    colour = colour or list(COLOURS)[number % len(COLOURS)]
    image = Image.new("RGB", (side, side), "white")
    size, left, top = side // 4 + number % 3, (number * 5) % (side // 2), (number * 3) % (side // 2)
    box = [left, top, left + size, top + size]
    ImageDraw.Draw(image).rectangle((left, top, left + size - 1, top + size - 1), fill=COLOURS[colour])
    return image, box, colour
