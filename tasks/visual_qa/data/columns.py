"""Questions whose options and images are in columns of their own, as MMMU, ScienceQA and others have them."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.runtime.jsonl import RowError

NUMBERED = re.compile(r"<image (\d+)>")


@dataclass(frozen=True)
class Columns:
    """Further columns, which are joined into the question and the list of images of a row.

    options: column of the options, a list, a mapping by letter, or the text of a list; they are appended to the
    question as lines "A. ...", and an answer that is a number is the index of an option, from 0. images: columns of
    one image each, of which those that a row has are shown; `<image 2>` in question or options is where the second
    column's is shown, and those that no text names come first.
    """

    options: str | None = None
    images: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        return self.images if self.options is None else (*self.images, self.options)

    def joined(self, row: Mapping[str, Any], problem: str, images: str, answer: str) -> dict[str, Any]:
        """Returns the row with all of it under the keys of question, images and answer. Raises RowError."""
        joined_row = dict(row)
        if self.options is not None and (options := self._options(row)):
            lines = (f"{letter}. {text}" for letter, text in options.items())
            joined_row[problem] = "\n".join((str(row.get(problem) or ""), *lines))
            if isinstance(row.get(answer), int) and not isinstance(row[answer], bool):
                joined_row[answer] = self._letter(row[answer], list(options), answer)
        if self.images:
            joined_row[problem], joined_row[images] = self._shown(row, str(joined_row.get(problem) or ""), images)
        return joined_row

    def _options(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Returns the options by letter. Raises RowError."""
        assert self.options is not None
        options = row.get(self.options)
        if isinstance(options, str):
            try:
                options = ast.literal_eval(options) if options.strip() else None
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise RowError(f"field {self.options!r} is a string that is not a list of options") from None
        if options is None:
            return {}
        if isinstance(options, Mapping):
            return {str(letter): str(text) for letter, text in options.items() if text is not None}
        if not isinstance(options, list | tuple) or len(options) > len(string.ascii_uppercase):
            raise RowError(f"field {self.options!r} must be a list of at most 26 options, or a mapping by letter")
        return {letter: str(text) for letter, text in zip(string.ascii_uppercase, options, strict=False)}

    def _letter(self, index: int, letters: list[str], answer: str) -> str:
        if not 0 <= index < len(letters):
            raise RowError(f"field {answer!r} is {index}, and there are {len(letters)} options, counted from 0")
        return letters[index]

    def _shown(self, row: Mapping[str, Any], text: str, images: str) -> tuple[str, list[Any]]:
        """Returns the text with plain markers, and the images in their order."""
        available = {number: row[name] for number, name in enumerate(self.images, 1) if row.get(name) is not None}
        named = [int(number) for number in NUMBERED.findall(text)]
        for number in named:
            if number not in available:
                raise RowError(f"the question names <image {number}>, and the row has no such image")
        first = [number for number in available if number not in named]
        if named and first:
            text = "<image>" * len(first) + text
        return NUMBERED.sub("<image>", text), [available[number] for number in (*first, *named)]
