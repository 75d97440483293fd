"""Boxes, points and objects in the forms in which models write them.

boxes
  [x1, y1, x2, y2] with any brackets, in JSON, in <box>, <|det|> or between other tags (InternVL, GLM, DeepSeek);
  (x1, y1), (x2, y2): two points, alone or in <|box_start|> (Qwen);
  x1, y1, x2, y2 or left, top, right, bottom, or x, y, width, height, each behind its name;
  four numbers that are the whole text
points
  [x, y] with any brackets, x and y behind their names, two numbers that are the whole text
objects
  JSON (or Python) with a label and a box; <ref>label</ref> and its kin with the boxes behind them
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from mmrl.rewards.parsing.responses import extract_answer
from mmrl.rewards.parsing.typography import folded, plain, spaced

Numbers = tuple[float, ...]
BOX_KEYS = ("bbox_2d", "bbox", "box", "bounding_box", "boundingbox", "position", "coordinates", "boxes", "bboxes")
LABEL_KEYS = ("label", "name", "class", "category", "object", "object_name")
_NUMBER = r"[-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+"
_SIDE = rf"\s*+({_NUMBER})\s*+"
_OR_SPACE = r"(?:,|(?<=\s))"
_FOUR = rf"{_SIDE}{_OR_SPACE}{_SIDE}{_OR_SPACE}{_SIDE}{_OR_SPACE}{_SIDE}"
_TWO = rf"{_SIDE},{_SIDE}"
_SHAPE = re.compile(rf"(?<=[\[({{<>;|])(?:{_FOUR}(?=[\])}}<>;|])|{_TWO}(?=[\])}}<]))")
_WHOLE = re.compile(rf"{_FOUR}|{_TWO}")
_NAMES = {
    **dict.fromkeys(("x1", "xmin", "x_min", "x_1", "left", "x0"), "x1"),
    **dict.fromkeys(("y1", "ymin", "y_min", "y_1", "top", "y0"), "y1"),
    **dict.fromkeys(("x2", "xmax", "x_max", "x_2", "right"), "x2"),
    **dict.fromkeys(("y2", "ymax", "y_max", "y_2", "bottom"), "y2"),
    **dict.fromkeys(("width", "w"), "width"),
    **dict.fromkeys(("height", "h"), "height"),
    "x": "x",
    "y": "y",
}
_NAMED = re.compile(
    rf"(?<![A-Za-z0-9_])[\"']?({'|'.join(sorted(_NAMES, key=len, reverse=True))})[\"']?\s*+[:=]\s*+[\"']?({_NUMBER})"
    rf"[\"']?(?![\w.])",
    re.IGNORECASE,
)
_BETWEEN_NAMED = re.compile(r"[\s,;]*+(?:and\b)?[\s,;]*+")
_OBJECT = re.compile(r"\{[^{}]*+\}")
_REFERENCE = re.compile(r"(?:<ref>|<\|object_ref_start\|>|<\|ref\|>)([^<]*+)(?:</ref>|<\|object_ref_end\|>|<\|/ref\|>)")
_FENCE = re.compile(r"```\w*+")
_NOTHING = re.compile(r"(?:\[\s*+\]|\{\s*+\}|null|none|nothing|no|n/a|not present|not visible|absent|nowhere)[\s.!]*+")
_NOTHING_SAID = re.compile(
    r"\[\s*+\]|\bthere (?:is|are|was|were) (?:no\b|none\b|nothing\b|not\b)|\bthere (?:isn't|aren't)|"
    r"\b(?:is|are) (?:not|nowhere) (?:present|visible|there|shown|seen|found|in (?:the|this))|"
    r"\b(?:isn't|aren't) (?:present|visible|there|shown|seen|found|in (?:the|this))|"
    r"\bno (?:such )?(?:objects?|box|boxes|targets?|matches|instances?|detections?)\b|"
    r"\b(?:image|picture|photo) (?:does not|doesn't) (?:show|contain|have)|\b(?:shows|contains|has) no\b|"
    r"\b(?:does not|doesn't) (?:appear|exist)|\u6ca1\u6709|\u4e0d\u5b58\u5728"
)


def boxes_in(text: str) -> list[Numbers]:
    """Every box of a string, four numbers each, in order."""
    return _shapes(text)[0]


def points_in(text: str) -> list[Numbers]:
    """Every point of a string, two numbers each, in order; the numbers of a box of four are not points."""
    return _shapes(text)[1]


def states_nothing(text: str) -> bool:
    """Returns whether a string without boxes says that there is nothing: [], "none", "There is no cat in the image"."""
    text = folded(_FENCE.sub(" ", text)).strip()
    return _NOTHING.fullmatch(text) is not None or _NOTHING_SAID.search(text) is not None


def gold_boxes(gold: Any) -> list[Numbers] | None:
    """Boxes of a gold answer: a box, a list of boxes, objects with boxes, or a string as a response has it. [] where it
    says that there is nothing; None where it can not be read."""
    if isinstance(gold, str):
        text = extract_answer(gold)
        written = boxes_in(text)
        return written if written or states_nothing(text) else None
    if isinstance(gold, dict):
        text = json.dumps(gold, default=str)
        return boxes_in(text) or ([] if _NOTHING_SAID.search(text) else None)
    if not isinstance(gold, (list, tuple)):
        return None
    if gold and all(_is_number(part) for part in gold):
        return [tuple(map(float, gold))] if len(gold) == 4 else None
    if len(gold) == 2 and all(_is_pair(part) for part in gold):
        return [tuple(float(number) for pair in gold for number in pair)]
    boxes: list[Numbers] = []
    for part in gold:
        inside = gold_boxes(part)
        if not inside:
            return None
        boxes += inside
    return boxes


def gold_points(gold: Any) -> list[Numbers] | None:
    """Points of a gold answer: a list of [x, y], or a string as a response has it; None where there are none."""
    if isinstance(gold, str):
        return points_in(extract_answer(gold)) or None
    if not isinstance(gold, (list, tuple)) or not all(_is_pair(part) for part in gold):
        return None
    return [tuple(map(float, part)) for part in gold] or None


def objects_in(text: str) -> list[dict[str, Any]]:
    """Every innermost JSON object of a string, in order, and every labelled box in tags as such an object; what does
    not parse is left out."""
    objects = [value for match in _OBJECT.findall(text) if (value := _parsed(match)) is not None]
    references = list(_REFERENCE.finditer(text)) if "<" in text else []
    ends = [*(reference.start() for reference in references[1:]), len(text)]
    for reference, end in zip(references, ends, strict=False):
        objects += [{"label": reference[1], "bbox_2d": list(box)} for box in boxes_in(text[reference.end() : end])]
    return objects


def labelled_in(value: dict[str, Any]) -> list[tuple[str, Numbers]]:
    """Label and box of an object, several where it has several boxes, [] where it lacks either."""
    lower = {str(key).lower(): part for key, part in value.items()}
    label = next((lower[key] for key in LABEL_KEYS if isinstance(lower.get(key), str)), None)
    box = next((lower[key] for key in BOX_KEYS if key in lower), None)
    boxes = gold_boxes(box if box is not None else {k: v for k, v in lower.items() if k in _NAMES})
    return [(spaced(label), numbers) for numbers in boxes or []] if label is not None else []


def _shapes(text: str) -> tuple[list[Numbers], list[Numbers]]:
    """Boxes and points."""
    text = plain(text)
    whole = _WHOLE.fullmatch(text.strip(" \n\t`\"'*."))
    marks = [(whole.start(), _numbers(whole))] if whole else []
    if not marks:
        marks = [(match.start(), _numbers(match)) for match in _SHAPE.finditer(text)]
        marks = sorted([*marks, *_named(text)], key=lambda mark: mark[0]) if "=" in text or ":" in text else marks
    boxes: list[Numbers] = []
    points: list[Numbers] = []
    corner: Numbers | None = None
    for _, numbers in marks:
        if len(numbers) == 4:
            boxes.append(numbers)
            corner = None
            continue
        points.append(numbers)
        if corner is None:
            corner = numbers
        else:
            boxes.append((*corner, *numbers))
            corner = None
    return boxes, points


def _numbers(match: re.Match[str]) -> Numbers:
    return tuple(float(number) for number in match.groups() if number is not None)


def _named(text: str) -> Iterator[tuple[int, Numbers]]:
    """Boxes and points whose numbers stand behind their names, with where they begin."""
    run: dict[str, float] = {}
    begin = end = 0
    for match in _NAMED.finditer(text):
        name = _NAMES[match[1].lower()]
        if not run or name in run or not _BETWEEN_NAMED.fullmatch(text, end, match.start()):
            yield from _of_names(begin, run)
            run, begin = {}, match.start()
        run[name] = float(match[2])
        end = match.end()
    yield from _of_names(begin, run)


def _of_names(begin: int, run: dict[str, float]) -> Iterator[tuple[int, Numbers]]:
    """Yields the box or point that named numbers make, with where they begin: x1 y1 x2 y2, x y width height, x1 y1
    width height, or x y."""
    if {"x1", "y1", "x2", "y2"} <= set(run):
        yield begin, (run["x1"], run["y1"], run["x2"], run["y2"])
    elif {"x", "y", "width", "height"} <= set(run):
        yield begin, (run["x"], run["y"], run["x"] + run["width"], run["y"] + run["height"])
    elif {"x1", "y1", "width", "height"} <= set(run):
        yield begin, (run["x1"], run["y1"], run["x1"] + run["width"], run["y1"] + run["height"])
    elif {"x", "y"} <= set(run):
        yield begin, (run["x"], run["y"])


def _parsed(text: str) -> dict[str, Any] | None:
    """A JSON or Python object."""
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text) if len(text) < 4096 else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(number) for number in value)
