"""The user's own prompts: a text file with one a line, or JSONL with metadata, as GenEval's and OCR prompts come."""

from __future__ import annotations

import codecs
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from mmrl.rollouts import Prompt
from mmrl.runtime.jsonl import LONGEST_LINE, RowError, check_length, check_value, line_spans, parsed

Format = Literal["plain", "geneval", "ocr"]
QUOTED = re.compile(r'"[^"]+"|“[^“”]+”')
T = TypeVar("T")
log = logging.getLogger(__name__)


def load(path: str | Path, *, format: Format = "plain", max_bad_share: float = 0.0) -> list[Prompt]:
    """Reads the prompts of a `.txt` file (one a line) or a `.jsonl` file (the key `prompt`, the rest goes to metadata).

    `format` says what else a row must hold: geneval a `tag` and `include` (a list of {class, count}, each with `color`
    or `position`, [relation, index of another], where the prompt has them); ocr a text in double quotes in the prompt,
    or under the key `text`. Ids are '<stem>:<line>', lines counted from 1; blank lines of JSONL are no rows.

    Rows that cannot be used are left out and logged, by file and line. Raises FileNotFoundError; ValueError for another
    kind of file, for a share of bad rows above `max_bad_share`, and where no prompt is left.
    """
    path, prompts, bad, total = Path(path), [], [], 0
    for line, text in _rows(path):
        total += 1
        try:
            prompts.append(_prompt(text, path, line, format))
        except RowError as error:
            bad.append(f"{path}, line {line}: {error}")
    if len(bad) > max_bad_share * total:
        listed = "; ".join(bad[:5]) + ("; ..." if len(bad) > 5 else "")
        raise ValueError(
            f"{path}: {len(bad)} of {total} rows cannot be used, more than max_bad_share={max_bad_share:g} allows; "
            f"mend or remove them, or raise max_bad_share: {listed}"
        )
    for reason in bad:
        log.warning("left out: %s", reason)
    if not prompts:
        raise ValueError(f"{path}: no prompt in it")
    return prompts


def hold_out(prompts: list[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Splits prompts into training and held-out ones. A text's side depends on the text alone: on no seed, order or
    repetition.

    Raises ValueError where a side stays empty.
    """
    sides: tuple[list[Prompt], list[Prompt]] = [], []
    for prompt in prompts:
        digest = hashlib.sha256(prompt.text.encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < share * 2**64].append(prompt)
    if not all(sides):
        raise ValueError(
            f"task.data.heldout={share:g} leaves {len(sides[0])} prompts to train on and {len(sides[1])} held out; "
            "both need some: change it, or name a file of held-out prompts in task.data.eval"
        )
    return sides


def warn_of_overlap(train: list[Prompt], evaluation: list[Prompt]) -> None:
    """Logs how many held-out prompts are trained on too, if any."""
    train_texts = {prompt.text for prompt in train}
    shared = sum(prompt.text in train_texts for prompt in evaluation)
    if shared:
        log.warning("%d of %d held-out prompts are among those to train on", shared, len(evaluation))


def _rows(path: Path) -> Iterator[tuple[int, bytes]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of prompts")
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path}: a file of prompts ends in .txt or .jsonl")
    with path.open("rb") as file:
        last = 0
        for position in list(line_spans(file)):
            if path.suffix == ".txt":
                yield from ((blank, b"") for blank in range(last + 1, position.line))
            last = position.line
            file.seek(position.offset)
            yield position.line, file.read(min(position.size, LONGEST_LINE + 1))


def _prompt(text: bytes, path: Path, line: int, format: Format) -> Prompt:
    check_length(text)
    row = _row(text.removeprefix(codecs.BOM_UTF8).strip(), path.suffix)
    for key, value in row.items():
        check_value(key, key)
        check_value(value, key)
    prompt_text = _text(row, "prompt")
    if format == "geneval":
        _check_geneval(row)
    elif format == "ocr" and not QUOTED.search(prompt_text) and "text" not in row:
        raise RowError("the prompt puts no text in double quotes, and there is no key 'text'")
    elif format == "ocr" and "text" in row:
        _text(row, "text")
    rest = {key: value for key, value in row.items() if key != "prompt"}
    return Prompt(id=f"{path.stem}:{line}", text=prompt_text, metadata=rest)


def _row(text: bytes, suffix: str) -> Mapping[str, Any]:
    if suffix == ".txt":
        try:
            return {"prompt": text.decode()}
        except UnicodeDecodeError as error:
            raise RowError(f"not UTF-8: {error}") from None
    row = parsed(text)
    if not isinstance(row, Mapping):
        raise RowError(f"a row must be an object, not {type(row).__name__}")
    return row


def _value(row: Mapping[str, Any], key: str, kind: type[T], name: str, where: str = "") -> T:
    if key not in row:
        raise RowError(f"key {where + key!r} is missing (keys: {', '.join(map(str, row)) or 'none'})")
    value = row[key]
    if not isinstance(value, kind):
        raise RowError(f"key {where + key!r} must be {name}, not {type(value).__name__}")
    if kind is not int and not (value.strip() if isinstance(value, str) else value):
        raise RowError(f"key {where + key!r} is empty")
    return value


def _text(row: Mapping[str, Any], key: str, where: str = "") -> str:
    return _value(row, key, str, "text", where).strip()


def _check_geneval(row: Mapping[str, Any]) -> None:
    _text(row, "tag")
    include = _value(row, "include", list, "a list")
    for index, item in enumerate(include):
        where = f"include[{index}]."
        if not isinstance(item, Mapping):
            raise RowError(f"key 'include[{index}]' must be an object, not {type(item).__name__}")
        _text(item, "class", where)
        if _value(item, "count", int, "a number", where) < 1:
            raise RowError(f"key '{where}count' must be at least 1, not {item['count']}")
        if "color" in item:
            _text(item, "color", where)
        if "position" in item:
            relation, other = (*_value(item, "position", list, "a list", where), None, None)[:2]
            if not isinstance(relation, str) or other not in range(len(include)) or other == index:
                raise RowError(
                    f"key '{where}position' must be [relation, index of another in include], not {item['position']}"
                )
