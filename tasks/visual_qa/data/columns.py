"""Rows with columns for the options of a question and for single images, as in MMMU and ScienceQA."""

from __future__ import annotations

import ast
import re
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.runtime.jsonl import RowError

NUMBERED = re.compile(r"<image (\d{1,9})>")
INVERSION = "\nWhich of these options are not right answers to the question? Name the letters of all of them."


@dataclass(frozen=True)
class Columns:
    """Columns that are merged into the question and into the list of images of a row.

    options: the column of answer options: a list, a mapping from letters, or a list written as text. Options are
    appended to the question as lines "A. ...". If the answer is a number, it is the index of an option, from 0.

    inverted: the share of questions that ask for all options but the right ones (question-answer inversion of TW-GRPO,
    arXiv 2505.24718); the text of a question decides whether it is one of them. A question whose options are all right
    is never inverted.

    images: columns of one image each. `<image 2>` in the question or the options marks the place of the second column's
    image. Images without such a marker come first; empty columns are skipped.
    """

    options: str | None = None
    images: tuple[str, ...] = ()
    inverted: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return self.images if self.options is None else (*self.images, self.options)

    def merge(self, row: Mapping[str, Any], problem: str, images: str, answer: str) -> dict[str, Any]:
        """Returns a copy of the row: the options follow the question as lines such as "A. text", an answer that is an
        index becomes its letter, and the images of several columns become one list, in the order of the markers.

        problem, images, answer: the keys of the question, the list of images and the answer. Raises RowError if options
        or markers are malformed.
        """
        merged = dict(row)
        if self.options is not None and (options := self._options(row)):
            lines = (f"{letter}. {text}" for letter, text in options.items())
            merged[problem] = "\n".join((str(row.get(problem) or ""), *lines))
            if isinstance(row.get(answer), int) and not isinstance(row[answer], bool):
                merged[answer] = self._letter(row[answer], list(options), answer)
            if zlib.crc32(merged[problem].encode()) < self.inverted * 2**32:
                self._invert(merged, list(options), problem, answer)
        if self.images:
            merged[problem], merged[images] = self._place_images(row, str(merged.get(problem) or ""))
        return merged

    def _options(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Returns the options of a row by letter. Raises RowError if they are malformed."""
        assert self.options is not None
        options = row.get(self.options)
        if isinstance(options, str):
            try:
                options = ast.literal_eval(options) if options.strip() else None
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise RowError(
                    f"field {self.options!r} is text, but not a list of options such as ['a', 'b']"
                ) from None
        if options is None:
            return {}
        if isinstance(options, Mapping):
            return {str(letter): str(text) for letter, text in options.items() if text is not None}
        if not isinstance(options, list | tuple) or len(options) > len(string.ascii_uppercase):
            actual = f"a list of {len(options)}" if isinstance(options, list | tuple) else type(options).__name__
            raise RowError(
                f"field {self.options!r} must be a list of at most 26 options, or a mapping from letters, not {actual}"
            )
        return {letter: str(text) for letter, text in zip(string.ascii_uppercase, options, strict=False)}

    def _invert(self, merged: dict[str, Any], letters: list[str], problem: str, answer: str) -> None:
        """Makes the question of a row ask for all wrong options. Raises RowError if the answer is not one or several of
        the `letters`."""
        gold = merged.get(answer)
        right = gold if isinstance(gold, list) else re.split(r"[,;\s]+", str(gold).strip())
        if not right or any(letter not in letters for letter in right):
            raise RowError(
                f"field {answer!r} is {gold!r}, but task.data.inverted needs letters of the options "
                f"({', '.join(letters)}) or the number of one"
            )
        if wrong := [letter for letter in letters if letter not in right]:
            merged[problem] += INVERSION
            merged[answer] = ", ".join(wrong)

    def _letter(self, index: int, letters: list[str], answer: str) -> str:
        """Returns the letter of the option `index`, which is the answer. answer: the field of the answer, for the
        message. Raises RowError if there is no such option."""
        if not 0 <= index < len(letters):
            raise RowError(f"field {answer!r} is {index}, but there are {len(letters)} options, counted from 0")
        return letters[index]

    def _place_images(self, row: Mapping[str, Any], text: str) -> tuple[str, list[Any]]:
        """Replaces numbered markers such as `<image 2>` by `<image>`. Returns the text, and the images in the order of
        its markers. Images without a marker come first; they get one if others have one. Raises RowError for a marker
        without an image."""
        available = {number: row[name] for number, name in enumerate(self.images, 1) if row.get(name) is not None}
        marked = [int(number) for number in NUMBERED.findall(text)]
        for number in marked:
            if number not in available:
                columns = ", ".join(self.images[position - 1] for position in available) or "none"
                raise RowError(
                    f"the question has the marker <image {number}>, but the row has no such image (columns with "
                    f"images: {columns})"
                )
        unmarked = [number for number in available if number not in marked]
        if marked and unmarked:
            text = "<image>" * len(unmarked) + text
        return NUMBERED.sub("<image>", text), [available[number] for number in (*unmarked, *marked)]
