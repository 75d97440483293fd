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
    """How several columns become the one question, and the one list of images, that rows have otherwise.

    options: column of the options, a list, a mapping by letter, or the text of a list; they are appended to the
    question as lines "A. ...", and an answer that is a number is the place of an option, from 0. images: columns of
    one image each, of which those that a row has are shown; `<image 2>` in question or options is where the second
    column's belongs, and those that no text names come first.
    """

    options: str | None = None
    images: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        return self.images if self.options is None else (*self.images, self.options)

    def joined(self, row: Mapping[str, Any], problem: str, images: str, answer: str) -> dict[str, Any]:
        """The row with all of it under the keys of question, images and answer. Raises RowError."""
        found = dict(row)
        if self.options is not None and (offered := self._offered(row)):
            lines = (f"{letter}. {text}" for letter, text in offered.items())
            found[problem] = "\n".join((str(row.get(problem) or ""), *lines))
            if isinstance(row.get(answer), int) and not isinstance(row[answer], bool):
                found[answer] = self._letter(row[answer], list(offered), answer)
        if self.images:
            found[problem], found[images] = self._shown(row, str(found.get(problem) or ""), images)
        return found

    def _offered(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Options by letter."""
        assert self.options is not None
        given = row.get(self.options)
        if isinstance(given, str):
            try:
                given = ast.literal_eval(given) if given.strip() else None
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise RowError(f"field {self.options!r} is a text that is no list of options") from None
        if given is None:
            return {}
        if isinstance(given, Mapping):
            return {str(letter): str(text) for letter, text in given.items() if text is not None}
        if not isinstance(given, list | tuple) or len(given) > len(string.ascii_uppercase):
            raise RowError(f"field {self.options!r} must be a list of at most 26 options, or a mapping by letter")
        return {letter: str(text) for letter, text in zip(string.ascii_uppercase, given, strict=False)}

    def _letter(self, place: int, letters: list[str], answer: str) -> str:
        if not 0 <= place < len(letters):
            raise RowError(f"field {answer!r} is {place}, and there are {len(letters)} options, counted from 0")
        return letters[place]

    def _shown(self, row: Mapping[str, Any], text: str, images: str) -> tuple[str, list[Any]]:
        """The text with plain markers, and the images in their order."""
        there = {place: row[name] for place, name in enumerate(self.images, 1) if row.get(name) is not None}
        named = [int(number) for number in NUMBERED.findall(text)]
        for number in named:
            if number not in there:
                raise RowError(f"the question names <image {number}>, and the row has no such image")
        first = [place for place in there if place not in named]
        if named and first:
            text = "<image>" * len(first) + text
        return NUMBERED.sub("<image>", text), [there[place] for place in (*first, *named)]
