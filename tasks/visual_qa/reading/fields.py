"""The columns of a row: question, answer, images and videos."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mmrl.rollouts import Prompt
from mmrl.runtime.jsonl import RowError, check_finite, check_value
from mmrl.tasks.data.bounds import MAX_FRAMES
from mmrl.tasks.data.image_files import ImageFiles
from mmrl.tasks.data.video_files import VideoFiles
from mmrl.tasks.visual_qa.data.columns import Columns
from mmrl.tasks.visual_qa.reading.messages import (
    MARKER,
    VIDEO_MARKER,
    ParsedQuestion,
    fill_markers,
    is_messages,
    read_messages,
)

IMAGES = "images"  # the default of task.data.image_field
T = TypeVar("T")


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column; a.b names the column b inside a. Returns None if there is no such column."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


@dataclass(frozen=True)
class Question:
    """The question of a row. images, videos: paths, URLs or bytes, not opened yet."""

    text: str
    answer: Any
    system: str | None
    images: list[Any]
    videos: list[Any]


@dataclass(frozen=True)
class Fields:
    """The names of a row's fields: question (`problem`), answer, images and videos.

    The question is text or a list of messages (see `read_messages`). If the row has no answer and the last message is
    an assistant's, that is the answer. A nested field has a dotted name, such as reward_model.ground_truth.

    Images and videos may be absent, a single one, or a list; see `ImageFiles` and `VideoFiles` for possible values. A
    row with a field of a similar name instead, such as `image`, is an error, since its image would be ignored. Each
    video is reduced to `max_frames` evenly spaced frames. columns: further columns, which are merged into question and
    images.
    """

    images: str = IMAGES
    problem: str = "problem"
    answer: str = "answer"
    videos: str = "videos"
    image_files: ImageFiles = ImageFiles()
    max_frames: int = MAX_FRAMES
    columns: Columns = Columns()

    @classmethod
    def from_columns(
        cls,
        images: str | Sequence[str],
        problem: str,
        answer: str,
        videos: str,
        options: str | None,
        image_files: ImageFiles,
        max_frames: int,
        inverted: float = 0.0,
    ) -> Fields:
        """Creates the fields from the names of columns. images: the column with all images of a row, or several columns
        with one image each; options: the column with the answer options of a question; inverted: as in `Columns`."""
        single_columns = () if isinstance(images, str) else tuple(images)
        image_column = images if isinstance(images, str) else IMAGES
        columns = Columns(options, single_columns, inverted)
        return cls(image_column, problem, answer, videos, image_files, max_frames, columns)

    def prompt(self, row: Any, prompt_id: str) -> Prompt:
        """Returns the prompt of a row, with images decoded to RGB. Fields of the row without a role go to metadata.

        Raises RowError as `check`, and if an image or video cannot be decoded.
        """
        question = self._read(row)
        return Prompt(
            id=prompt_id,
            text=question.text,
            images=tuple(self._apply(self.image_files.decode, question.images, self.images, "image")),
            videos=tuple(self._apply(self._video_files.decode, question.videos, self.videos, "video")),
            answer=question.answer,
            system=question.system,
            metadata={key: value for key, value in row.items() if key not in self._used},
        )

    def check(self, row: object) -> None:
        """Raises RowError if a row cannot be used: if question or answer are missing or empty, if the numbers of
        markers and images differ, or if the header of an image shows that it cannot be decoded."""
        question = self._read(row)
        self._apply(self.image_files.check, question.images, self.images, "image")
        self._apply(self._video_files.check, question.videos, self.videos, "video")

    @property
    def _video_files(self) -> VideoFiles:
        return VideoFiles(self.image_files, self.max_frames)

    @property
    def _used(self) -> tuple[str, ...]:
        return (self.images, self.videos, self.problem, self.answer, *self.columns.names)

    def _read(self, row: object) -> Question:
        """Reads question, answer, and references of images and videos of a row. Raises RowError as `check`."""
        if not isinstance(row, Mapping):
            raise RowError(f"a row must be an object, not {type(row).__name__}")
        for key, value in row.items():
            check_value(key, str(key))
            check_value(value, str(key))
        # options follow the question, an index becomes a letter, and images of several columns become one list
        row = self.columns.merge(row, self.problem, self.images, self.answer)
        question = self._question(self._required(row, self.problem, "problem_field"))
        # The answer is the value of its column, or without one the assistant's reply in the messages.
        answer = question.reply
        if answer is None or value_of(row, self.answer) is not None:
            answer = self._required(row, self.answer, "answer_field")
        check_finite(answer, self.answer)
        # messages may hold paths of their own; other markers take the values of the column in order
        images = fill_markers(question.images, self._as_list(row, self.images, "image_field"))
        videos = fill_markers(question.videos, self._as_list(row, self.videos, "video_field"))
        if MARKER in question.text or VIDEO_MARKER in question.text:
            self._check_markers(row, question.text, MARKER, self.images, images, "images")
            self._check_markers(row, question.text, VIDEO_MARKER, self.videos, videos, "videos")
        return Question(question.text, answer, question.system, images, videos)

    def _question(self, problem: Any) -> ParsedQuestion:
        """Reads the question: text, or messages. Raises RowError for anything else."""
        if isinstance(problem, str):
            return ParsedQuestion(problem)
        if not is_messages(problem):
            raise RowError(f"field {self.problem!r} must be text or a list of messages, not {type(problem).__name__}")
        try:
            question = read_messages(problem)
        except RowError as error:
            raise RowError(f"field {self.problem!r}: {error}") from None
        if not question.text.strip():
            raise RowError(f"field {self.problem!r}: the user message is empty")
        return question

    def _check_markers(
        self, row: Mapping[str, Any], text: str, marker: str, field: str, references: list[Any], plural: str
    ) -> None:
        """Raises RowError if the text has more or fewer markers (<image> or <video>) than the row has images or videos.
        field: their column; plural: "images" or "videos", for the message."""
        num_references = sum(reference is not None for reference in references)
        num_markers = text.count(marker)
        if num_markers == num_references:
            return
        hint = "; write one marker for each"
        if not num_references and field not in row:
            key = {MARKER: "image_field", VIDEO_MARKER: "video_field"}[marker]
            hint = f" (fields: {', '.join(map(str, row))}); set task.data.{key} to the right one"
        raise RowError(
            f"field {self.problem!r} has {num_markers} {marker} markers, field {field!r} has {num_references} "
            f"{plural}{hint}"
        )

    def _required(self, row: Mapping[str, Any], name: str, key: str) -> Any:
        """Returns the value of the field `name`. Raises RowError if it is missing or empty. key: the option under
        task.data that names the field."""
        value = value_of(row, name)
        if value is None and name not in row:
            fields = ", ".join(map(str, row)) or "none"
            raise RowError(f"field {name!r} is missing (fields: {fields}); set task.data.{key} to the right one")
        empty_list = value == [] and name != self.answer  # the answer [] is valid: there is nothing to find
        if value is None or empty_list or (isinstance(value, str) and not value.strip()):
            raise RowError(f"field {name!r} is empty")
        return value

    def _as_list(self, row: Mapping[str, Any], field: str, key: str) -> list[Any]:
        """Returns the images or videos of a field, which may hold one, a list, a list in JSON (as CSV files have it),
        or nothing. Raises RowError if it is empty but a field of a similar name is not."""
        value = value_of(row, field)
        if value is None or value in ([], ""):
            self._refuse_similar_name(row, field, key)
            return []
        if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            value = self._parse_list(value, field)
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def _parse_list(self, value: str, field: str) -> Any:
        """Parses a string in brackets as a JSON list. field: the column, for the message. Raises RowError if it is not
        one."""
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"field {field!r} is a string in brackets, but not a JSON list: {error}") from None

    def _refuse_similar_name(self, row: Mapping[str, Any], field: str, key: str) -> None:
        """Raises RowError if the row has an unused field whose name is similar to `field`."""
        others = [name for name, value in row.items() if value and name not in self._used]
        if similar := difflib.get_close_matches(field, others, n=1, cutoff=0.8):
            raise RowError(f"field {field!r} is missing, but there is {similar[0]!r}: set task.data.{key}={similar[0]}")

    def _apply(self, function: Callable[[object], T], references: Sequence[Any], field: str, singular: str) -> list[T]:
        """Applies a function to references of images or videos. Its errors are raised with the field and the index.
        singular: "image" or "video"."""
        values = []
        for index, reference in enumerate(references):
            try:
                values.append(function(reference))
            except RowError as error:
                raise RowError(f"field {field!r}, {singular} {index}: {error}") from None
        return values
