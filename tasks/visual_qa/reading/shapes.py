"""Shapes of rows that other libraries and published data sets have, known by the columns that must be there."""

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
class RowShape:
    """Columns of question and answer. answer None: the reply of an assistant that ends the messages."""

    name: str
    problem: str
    answer: str | None

    def fits(self, row: Mapping[str, Any]) -> bool:
        problem = value_of(row, self.problem)
        if self.answer is not None:
            return problem is not None and value_of(row, self.answer) is not None
        return is_messages(problem) and _reply(problem) is not None

    @property
    def columns(self) -> str:
        return self.problem if self.answer is None else f"{self.problem}, {self.answer}"


SHAPES = (
    RowShape("verl", "prompt", "reward_model.ground_truth"),
    RowShape("TRL", "prompt", "solution"),
    RowShape("TRL", "prompt", "answer"),
    RowShape("ms-swift", "messages", "solution"),
    RowShape("OpenAI", "messages", "answer"),
    RowShape("VLM-R1", "problem", "solution"),
    RowShape("LLaVA", "conversations", "answer"),
    RowShape("LLaVA", "conversations", "solution"),
)
REPLIES = (RowShape("LLaMA-Factory", "messages", None), RowShape("LLaVA", "conversations", None))


def shaped(fields: Fields, rows: Rows, name: str) -> Fields:
    """Returns the fields of the shape that the first rows have, and says so in the log.

    Columns that the user named, and rows of `problem` and `answer`, are read as `fields` says. Raises ValueError where
    two shapes fit, naming them and the keys to write.
    """
    default = Fields()
    if (fields.problem, fields.answer) != (default.problem, default.answer):
        return fields
    usual = {default.problem, default.answer}
    if usual <= set(rows.columns()):
        return fields
    first = []
    for row in first_rows(rows):
        if isinstance(row, Mapping) and usual <= set(row):
            return fields
        first += [row] if isinstance(row, Mapping) else []
    # A question that ends in a reply has its answer there only where no column holds one.
    shapes = _fitting(SHAPES, first) or _fitting(REPLIES, first) or _resembling(first)
    if not shapes:
        return fields
    if len(shapes) > 1:
        listed = " and ".join(f"{shape.name} ({shape.columns})" for shape in shapes)
        raise ValueError(
            f"{name}: its rows could be of {listed}; say which columns are meant with task.data.problem_field and "
            "task.data.answer_field"
        )
    shape, images = shapes[0], _images(fields, first)
    log.info("%s: read as rows of %s: %s, %s", name, shape.name, shape.columns, images)
    return replace(fields, problem=shape.problem, answer=shape.answer or fields.answer, images=images)


def _fitting(shapes: Iterable[RowShape], rows: list[Mapping[str, Any]]) -> list[RowShape]:
    return [shape for shape in shapes if any(shape.fits(row) for row in rows)]


def _resembling(rows: list[Mapping[str, Any]]) -> list[RowShape]:
    """Returns the shape whose messages rows hold without being questions of one reply, so that each says why not."""
    return [shape for shape in REPLIES if any(is_messages(value_of(row, shape.problem)) for row in rows)][:1]


def _images(fields: Fields, rows: list[Mapping[str, Any]]) -> str:
    """Returns the column of the images: `image` where no row has the other one."""
    if fields.images != IMAGES or fields.columns.images or any(row.get(IMAGES) for row in rows):
        return fields.images
    return "image" if any(row.get("image") for row in rows) else fields.images


def _reply(messages: Any) -> str | None:
    try:
        return read_messages(messages).reply
    except RowError:
        return None
