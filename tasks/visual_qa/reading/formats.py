"""Row formats of other libraries and published datasets, recognised by their columns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmrl.runtime.jsonl import RowError
from mmrl.tasks.visual_qa.data.rows import Rows, first_rows
from mmrl.tasks.visual_qa.reading.fields import IMAGES, Fields, value_of
from mmrl.tasks.visual_qa.reading.messages import is_messages, read_messages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowFormat:
    """A library's columns for question and answer. answer None: the last message, an assistant's, is the answer."""

    library: str
    problem: str
    answer: str | None

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a row has the columns of this format; without an answer column, whether its messages end in
        an assistant's reply."""
        problem = value_of(row, self.problem)
        if self.answer is not None:
            return problem is not None and value_of(row, self.answer) is not None
        return is_messages(problem) and _reply(problem) is not None

    @property
    def columns(self) -> str:
        return self.problem if self.answer is None else f"{self.problem}, {self.answer}"


FORMATS = (
    RowFormat("verl", "prompt", "reward_model.ground_truth"),
    RowFormat("TRL", "prompt", "solution"),
    RowFormat("TRL", "prompt", "answer"),
    RowFormat("ms-swift", "messages", "solution"),
    RowFormat("OpenAI", "messages", "answer"),
    RowFormat("VLM-R1", "problem", "solution"),
    RowFormat("LLaVA", "conversations", "answer"),
    RowFormat("LLaVA", "conversations", "solution"),
)
FORMATS_WITH_REPLY = (RowFormat("LLaMA-Factory", "messages", None), RowFormat("LLaVA", "conversations", None))


def detect_format(fields: Fields, rows: Rows, name: str) -> Fields:
    """Returns `fields` with the columns of the format that the first rows have, and logs that format.

    Returns `fields` unchanged if the user named columns, if rows have the columns `problem` and `answer`, or if no
    format matches. name: the file, for messages. Raises ValueError if several formats match.
    """
    default = Fields()
    if (fields.problem, fields.answer) != (default.problem, default.answer):
        return fields
    default_columns = {default.problem, default.answer}
    if default_columns <= set(rows.columns()):
        return fields
    head = []
    for row in first_rows(rows):
        if isinstance(row, Mapping) and default_columns <= set(row):
            return fields
        head += [row] if isinstance(row, Mapping) else []
    # An assistant's reply is the answer only if no column holds one.
    formats = _matching(FORMATS, head) or _matching(FORMATS_WITH_REPLY, head) or _with_messages(head)
    if not formats:
        return fields
    if len(formats) > 1:
        listed = " and ".join(f"{row_format.library} ({row_format.columns})" for row_format in formats)
        raise ValueError(
            f"{name}: rows match the formats of {listed}; set task.data.problem_field and task.data.answer_field to "
            "the columns to use"
        )
    row_format, images = formats[0], _image_column(fields, head)
    log.info("%s: read in the format of %s: %s, %s", name, row_format.library, row_format.columns, images)
    return replace(fields, problem=row_format.problem, answer=row_format.answer or fields.answer, images=images)


def _matching(formats: Iterable[RowFormat], rows: list[Mapping[str, Any]]) -> list[RowFormat]:
    return [row_format for row_format in formats if any(row_format.matches(row) for row in rows)]


def _with_messages(rows: list[Mapping[str, Any]]) -> list[RowFormat]:
    """Returns the format whose column holds messages, although they do not end in one reply: reading the rows then
    raises an error that says what is wrong with the messages."""
    return [
        row_format
        for row_format in FORMATS_WITH_REPLY
        if any(is_messages(value_of(row, row_format.problem)) for row in rows)
    ][:1]


def _image_column(fields: Fields, rows: list[Mapping[str, Any]]) -> str:
    """Returns the column of the images: `image` if that has values, the default `images` has none, and the user named
    no column; else the column in `fields`."""
    if fields.images != IMAGES or fields.columns.images or any(row.get(IMAGES) for row in rows):
        return fields.images
    return "image" if any(row.get("image") for row in rows) else fields.images


def _reply(messages: Any) -> str | None:
    """Returns the assistant's reply at the end of a question's messages; None if there is none."""
    try:
        return read_messages(messages).reply
    except RowError:
        return None
