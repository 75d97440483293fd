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
from mmrl.tasks.visual_qa.reading.messages import MARKER, VIDEO_MARKER, ReadQuestion, filled, is_messages, read_messages

IMAGES = "images"  # the field of the images, unless another is named
T = TypeVar("T")


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column, or of a nested one by its dotted name; None where there is none."""
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
    """The question of a row. images, videos: references that are not opened yet."""

    text: str
    answer: Any
    system: str | None
    images: list[Any]
    videos: list[Any]


@dataclass(frozen=True)
class Fields:
    """The fields of a row: question, answer, images and videos.

    A question is text, or a list of messages (see `read_messages`) whose last one, an assistant's, is the answer where
    the row has no other. A nested field has a dotted name, such as reward_model.ground_truth.

    The fields of images and of videos may be absent or empty, one, or a list of them; see `ImageFiles` and `VideoFiles`
    for their values. A row without one that has a field of nearly the same name is refused: it would be a question
    without the image it is about. Of a video `max_frames` are kept, evenly spaced. columns: further ones that question
    and images are made of.
    """

    images: str = IMAGES
    problem: str = "problem"
    answer: str = "answer"
    videos: str = "videos"
    image_files: ImageFiles = ImageFiles()
    max_frames: int = MAX_FRAMES
    columns: Columns = Columns()

    @classmethod
    def named(
        cls,
        images: str | Sequence[str],
        problem: str,
        answer: str,
        videos: str,
        options: str | None,
        image_files: ImageFiles,
        max_frames: int,
    ) -> Fields:
        """images: the column of the images, or several of one image each; options: that of a question's options."""
        several = () if isinstance(images, str) else tuple(images)
        joined = images if isinstance(images, str) else IMAGES
        return cls(joined, problem, answer, videos, image_files, max_frames, Columns(options, several))

    def prompt(self, row: Any, prompt_id: str) -> Prompt:
        """Returns the prompt of a row, its images decoded to RGB; other fields of the row go to metadata.

        Raises RowError as `check`, and for an image that cannot be decoded.
        """
        question = self._checked(row)
        return Prompt(
            id=prompt_id,
            text=question.text,
            images=tuple(self._each(self.images, "image", question.images, self.image_files.decoded)),
            videos=tuple(self._each(self.videos, "video", question.videos, self._video_files.decoded)),
            answer=question.answer,
            system=question.system,
            metadata={key: value for key, value in row.items() if key not in self._used},
        )

    def check(self, row: object) -> None:
        """Raises RowError for a row that is not an object, a problem or an answer that is missing or empty, markers
        that do not match the images, values that cannot be used, and an image whose header says that it cannot be."""
        question = self._checked(row)
        self._each(self.images, "image", question.images, self.image_files.check)
        self._each(self.videos, "video", question.videos, self._video_files.check)

    @property
    def _video_files(self) -> VideoFiles:
        return VideoFiles(self.image_files, self.max_frames)

    @property
    def _used(self) -> tuple[str, ...]:
        return (self.images, self.videos, self.problem, self.answer, *self.columns.used)

    def _checked(self, row: object) -> Question:
        """Reads question, answer, images and videos of a row, and checks that markers and images agree. Raises
        RowError."""
        if not isinstance(row, Mapping):
            raise RowError(f"a row must be an object, not {type(row).__name__}")
        for key, value in row.items():
            check_value(key, str(key))
            check_value(value, str(key))
        row = self.columns.joined(row, self.problem, self.images, self.answer)
        question = self._question(self._filled(row, self.problem, "problem_field"))
        answer = question.reply
        if answer is None or value_of(row, self.answer) is not None:
            answer = self._filled(row, self.answer, "answer_field")
        check_finite(answer, self.answer)
        images = filled(question.images, self._listed(row, self.images, "image_field"))
        videos = filled(question.videos, self._listed(row, self.videos, "video_field"))
        if MARKER in question.text or VIDEO_MARKER in question.text:
            self._match(row, question.text, MARKER, self.images, images, "images")
            self._match(row, question.text, VIDEO_MARKER, self.videos, videos, "videos")
        return Question(question.text, answer, question.system, images, videos)

    def _question(self, problem: Any) -> ReadQuestion:
        """Reads the question: a string, or messages. Raises RowError for anything else."""
        if isinstance(problem, str):
            return ReadQuestion(problem)
        if not is_messages(problem):
            raise RowError(f"field {self.problem!r} must be text or a list of messages, not {type(problem).__name__}")
        try:
            question = read_messages(problem)
        except RowError as error:
            raise RowError(f"field {self.problem!r}: {error}") from None
        if not question.text.strip():
            raise RowError(f"field {self.problem!r}: the user's message is empty")
        return question

    def _match(self, row: Mapping[str, Any], text: str, marker: str, field: str, shown: list[Any], what: str) -> None:
        """Raises RowError where the text has another number of <image> or <video> markers than the row has images or
        videos."""
        count = len([one for one in shown if one is not None])
        if (markers := text.count(marker)) != count:
            absent = ""
            if not count and field not in row:
                key = {MARKER: "image_field", VIDEO_MARKER: "video_field"}[marker]
                absent = f" (fields: {', '.join(map(str, row))}); task.data.{key} names another one"
            raise RowError(
                f"field {self.problem!r} has {markers} {marker} markers, field {field!r} has {count} {what}{absent}"
            )

    def _filled(self, row: Mapping[str, Any], name: str, key: str) -> Any:
        value = value_of(row, name)
        if value is None and name not in row:
            fields = ", ".join(map(str, row)) or "none"
            raise RowError(f"field {name!r} is missing (fields: {fields}); task.data.{key} names another one")
        nothing = value == [] and name != self.answer  # an answer of [] says that there is nothing to find
        if value is None or nothing or (isinstance(value, str) and not value.strip()):
            raise RowError(f"field {name!r} is empty")
        return value

    def _listed(self, row: Mapping[str, Any], field: str, key: str) -> list[Any]:
        value = value_of(row, field)
        if value is None or value in ([], ""):
            self._refuse_a_near_name(row, field, key)
            return []
        if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            value = self._list_of_text(value, field)  # how a table holds several images
        return list(value) if isinstance(value, (list, tuple)) else [value]

    def _list_of_text(self, value: str, field: str) -> Any:
        try:
            return json.loads(value)
        except ValueError as error:
            raise RowError(f"field {field!r} is a string in brackets, but not a JSON list: {error}") from None

    def _refuse_a_near_name(self, row: Mapping[str, Any], field: str, key: str) -> None:
        others = [name for name, value in row.items() if value and name not in self._used]
        if near := difflib.get_close_matches(field, others, n=1, cutoff=0.8):
            raise RowError(f"field {field!r} is missing, but there is {near[0]!r}: set task.data.{key}={near[0]}")

    def _each(self, field: str, what: str, shown: Sequence[Any], function: Callable[[object], T]) -> list[T]:
        values = []
        for index, one in enumerate(shown):
            try:
                values.append(function(one))
            except RowError as error:
                raise RowError(f"field {field!r}, {what} {index}: {error}") from None
        return values
