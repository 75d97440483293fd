"""Boxes, points and objects in the forms in which models write them.

boxes
  [x1, y1, x2, y2] with any brackets, in JSON, in <box>, <|det|> or between other tags (InternVL, GLM, DeepSeek);
  (x1, y1), (x2, y2): two points, alone or in <|box_start|> (Qwen);
  x1, y1, x2, y2 or left, top, right, bottom, or x, y, width, height, each after its name;
  four numbers that are the full text
points
  [x, y] with any brackets, x and y after their names, two numbers that are the full text
objects
  JSON (or Python) with a label and a box; <ref>label</ref> and the like, with the boxes after them
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from mmrl.rewards.parsing.responses import extract_answer
from mmrl.rewards.parsing.typography import normalize_case, normalize_text, normalize_typography

Numbers = tuple[float, ...]  # four of a box, two of a point
MAX_LITERAL = 4096  # characters of a Python dict; literal_eval of a longer one takes too much time and memory
BOX_KEYS = ("bbox_2d", "bbox", "box", "bounding_box", "boundingbox", "position", "coordinates", "boxes", "bboxes")
LABEL_KEYS = ("label", "name", "class", "category", "object", "object_name")
_NUMBER = r"[-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+"
_COORDINATE = rf"\s*+({_NUMBER})\s*+"
_OR_SPACE = r"(?:,|(?<=\s))"
_FOUR = rf"{_COORDINATE}{_OR_SPACE}{_COORDINATE}{_OR_SPACE}{_COORDINATE}{_OR_SPACE}{_COORDINATE}"
_TWO = rf"{_COORDINATE},{_COORDINATE}"
_SHAPE = re.compile(rf"(?<=[\[({{<>;|])(?:{_FOUR}(?=[\])}}<>;|])|{_TWO}(?=[\])}}<]))")
_FULL_TEXT = re.compile(rf"{_FOUR}|{_TWO}")
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
# All of an answer, or a part of one, that says that there is no object.
_EMPTY_ANSWER = re.compile(
    r"(?:\[\s*+\]|\{\s*+\}|null|none|nothing|no|n/a|not present|not visible|absent|nowhere)[\s.!]*+"
)
_ABSENCE_PHRASE = re.compile(
    r"\[\s*+\]|\bthere (?:is|are|was|were) (?:no\b|none\b|nothing\b|not\b)|\bthere (?:isn't|aren't)|"
    r"\b(?:is|are) (?:not|nowhere) (?:present|visible|there|shown|seen|found|in (?:the|this))|"
    r"\b(?:isn't|aren't) (?:present|visible|there|shown|seen|found|in (?:the|this))|"
    r"\bno (?:such )?(?:objects?|box|boxes|targets?|matches|instances?|detections?)\b|"
    r"\b(?:image|picture|photo) (?:does not|doesn't) (?:show|contain|have)|\b(?:shows|contains|has) no\b|"
    r"\b(?:does not|doesn't) (?:appear|exist)|\u6ca1\u6709|\u4e0d\u5b58\u5728"
)


def parse_boxes(text: str) -> list[Numbers]:
    """Returns every box of a string, four numbers each, in order."""
    return _boxes_and_points(text)[0]


def parse_points(text: str) -> list[Numbers]:
    """Returns every point of a string, two numbers each, in order. The four numbers of a box are not two points."""
    return _boxes_and_points(text)[1]


def states_nothing(text: str) -> bool:
    """Returns whether a string without boxes says that nothing was found: [], "none", "There is no cat in the
    image"."""
    text = normalize_case(_FENCE.sub(" ", text)).strip()
    return _EMPTY_ANSWER.fullmatch(text) is not None or _ABSENCE_PHRASE.search(text) is not None


def gold_boxes(gold: Any) -> list[Numbers] | None:
    """Reads the boxes of a gold answer: a box (four numbers or two corners), a list of boxes, objects with boxes, or a
    string in the form of a response.

    Returns [] if it says that there is nothing, and None if it cannot be read.
    """
    if isinstance(gold, str):
        text = extract_answer(gold)
        parsed = parse_boxes(text)
        return parsed if parsed or states_nothing(text) else None
    if isinstance(gold, dict):
        text = json.dumps(gold, default=str)
        return parse_boxes(text) or ([] if _ABSENCE_PHRASE.search(text) else None)
    if not isinstance(gold, (list, tuple)):
        return None
    if gold and all(_is_number(part) for part in gold):
        return [tuple(map(float, gold))] if len(gold) == 4 else None
    if len(gold) == 2 and all(_is_pair(part) for part in gold):
        return [tuple(float(number) for pair in gold for number in pair)]
    boxes: list[Numbers] = []
    for part in gold:
        part_boxes = gold_boxes(part)
        if not part_boxes:
            return None
        boxes += part_boxes
    return boxes


def gold_points(gold: Any) -> list[Numbers] | None:
    """Reads the points of a gold answer: a list of [x, y], or a string in the form of a response. Returns None if there
    are none."""
    if isinstance(gold, str):
        return parse_points(extract_answer(gold)) or None
    if not isinstance(gold, (list, tuple)) or not all(_is_pair(part) for part in gold):
        return None
    return [tuple(map(float, part)) for part in gold] or None


def parse_objects(text: str) -> list[dict[str, Any]]:
    """Returns every innermost JSON object of a string, in order, then every labelled box in tags as {"label",
    "bbox_2d"}. Text that does not parse is skipped."""
    objects = [value for match in _OBJECT.findall(text) if (value := _parsed(match)) is not None]
    references = list(_REFERENCE.finditer(text)) if "<" in text else []
    # the boxes of a label stand between it and the next label
    ends = [*(reference.start() for reference in references[1:]), len(text)]
    for reference, end in zip(references, ends, strict=False):
        objects += [{"label": reference[1], "bbox_2d": list(box)} for box in parse_boxes(text[reference.end() : end])]
    return objects


def parse_labelled_boxes(value: dict[str, Any]) -> list[tuple[str, Numbers]]:
    """Returns (label, box) pairs of a parsed object: one for each of its boxes, [] if it has no label or no box."""
    lower = {str(key).lower(): part for key, part in value.items()}
    label = next((lower[key] for key in LABEL_KEYS if isinstance(lower.get(key), str)), None)
    box = next((lower[key] for key in BOX_KEYS if key in lower), None)
    # without a key of BOX_KEYS, the box is in keys such as x1, y1, x2 and y2
    boxes = gold_boxes(box if box is not None else {key: part for key, part in lower.items() if key in _NAMES})
    return [(normalize_text(label), numbers) for numbers in boxes or []] if label is not None else []


def _boxes_and_points(text: str) -> tuple[list[Numbers], list[Numbers]]:
    """Returns the boxes and the points of a string. Two points in a row are a box as well."""
    text = normalize_typography(text)
    full_match = _FULL_TEXT.fullmatch(text.strip(" \n\t`\"'*."))
    # (position in the text, four numbers of a box or two of a point)
    candidates = [(full_match.start(), _numbers(full_match))] if full_match else []
    if not candidates:
        candidates = [(match.start(), _numbers(match)) for match in _SHAPE.finditer(text)]
        if "=" in text or ":" in text:
            candidates = sorted([*candidates, *_named_numbers(text)], key=lambda item: item[0])
    boxes: list[Numbers] = []
    points: list[Numbers] = []
    first_corner: Numbers | None = None
    for _, numbers in candidates:
        if len(numbers) == 4:
            boxes.append(numbers)
            first_corner = None
            continue
        points.append(numbers)
        if first_corner is None:
            first_corner = numbers
        else:
            boxes.append((*first_corner, *numbers))
            first_corner = None
    return boxes, points


def _numbers(match: re.Match[str]) -> Numbers:
    """Returns the numbers of a match, two or four."""
    return tuple(float(number) for number in match.groups() if number is not None)


def _named_numbers(text: str) -> Iterator[tuple[int, Numbers]]:
    """Yields (position in the text, box or point) whose numbers follow names, such as x1=3, y1=4, x2=8, y2=9."""
    named: dict[str, float] = {}
    begin = end = 0
    for match in _NAMED.finditer(text):
        name = _NAMES[match[1].lower()]
        # a shape ends at a name that it has already, and at text other than commas, semicolons and "and"
        if not named or name in named or not _BETWEEN_NAMED.fullmatch(text, end, match.start()):
            yield from _shape_from_names(begin, named)
            named, begin = {}, match.start()
        named[name] = float(match[2])
        end = match.end()
    yield from _shape_from_names(begin, named)


def _shape_from_names(begin: int, named: dict[str, float]) -> Iterator[tuple[int, Numbers]]:
    """Yields (begin, box or point) made of named numbers, if they are complete: x1 y1 x2 y2, x y width height, x1 y1
    width height, or x y."""
    if {"x1", "y1", "x2", "y2"} <= set(named):
        yield begin, (named["x1"], named["y1"], named["x2"], named["y2"])
    elif {"x", "y", "width", "height"} <= set(named):
        yield begin, (named["x"], named["y"], named["x"] + named["width"], named["y"] + named["height"])
    elif {"x1", "y1", "width", "height"} <= set(named):
        yield begin, (named["x1"], named["y1"], named["x1"] + named["width"], named["y1"] + named["height"])
    elif {"x", "y"} <= set(named):
        yield begin, (named["x"], named["y"])


def _parsed(text: str) -> dict[str, Any] | None:
    """Parses a JSON or Python dict; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text) if len(text) < MAX_LITERAL else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(number) for number in value)
