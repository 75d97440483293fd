"""Settings of the visual question answering task."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.rewards.settings import RewardSpec
from mmrl.settings import Choice, load_attribute, option
from mmrl.sims.turns.settings import EnvironmentSettings, RecordedSettings
from mmrl.tasks.data.bounds import MAX_FRAMES, MAX_PIXELS, PARQUET_GIB, PILLOW_MAX_PIXELS
from mmrl.tasks.settings import TaskSettings
from mmrl.tasks.visual_qa.data.kinds import (
    CHART_QUESTIONS,
    DIGITS_QUESTIONS,
    NAMED_QUESTIONS,
    STILL_LIFE_COLOURS,
    VIDEO_QUESTIONS,
    ChartQuestion,
    ChartShape,
    ChartTable,
    DigitsKind,
    NamedQuestion,
    NamedStyle,
    NamesSplit,
    StillLifeColour,
    VideoQuestion,
)

if TYPE_CHECKING:
    from mmrl.protocols.parts import Source, Task
    from mmrl.tasks.visual_qa.data.conversations import ConversationFields


class Questions(Choice):
    """Settings of a source of questions."""

    title: ClassVar[str] = "questions"
    kinds: ClassVar[dict[str, str]] = {
        "digits": "mmrl.tasks.visual_qa.settings:DigitsData",
        "running_sums": "mmrl.tasks.visual_qa.settings:RunningSumsData",
        "scenes": "mmrl.tasks.visual_qa.settings:ScenesData",
        "still_lifes": "mmrl.tasks.visual_qa.settings:StillLifesData",
        "clips": "mmrl.tasks.visual_qa.settings:VideosData",
        "named_images": "mmrl.tasks.visual_qa.settings:NamedImagesData",
        "charts": "mmrl.tasks.visual_qa.settings:ChartsData",
        "words": "mmrl.tasks.visual_qa.settings:WordsData",
        "files": "mmrl.tasks.visual_qa.settings:FilesData",
        "huggingface": "mmrl.tasks.visual_qa.settings:HuggingFaceData",
        "conversations": "mmrl.tasks.visual_qa.settings:ConversationFilesData",
        "huggingface_conversations": "mmrl.tasks.visual_qa.settings:HuggingFaceConversationsData",
    }
    test: ClassVar[str] = "tests/tasks/test_sources.py"
    recorded: ClassVar[bool] = False  # whether rows are conversations, with recorded observations between responses

    @property
    def num_readers(self) -> int:
        """The number of processes that read ahead for each rank; 0 for data without that option."""
        return 0

    @abstractmethod
    def sources(self, seed: int) -> tuple[Source | None, Source]:
        """Returns the training questions and the held-out questions. If the former are None, the task can only be
        evaluated. seed: the random seed of the training questions."""


class DigitsData(Questions):
    """Rows of handwritten digits. The run's seed selects the training questions, `eval_seed` the held-out ones."""

    test: ClassVar[str] = "tests/tasks/test_digits.py"
    type: str = "digits"
    train_size: int = option(20_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "random seed of the held-out questions", ge=0)
    questions: tuple[DigitsKind, ...] = option(DIGITS_QUESTIONS, "kinds of question", min_length=1)
    cells: int = option(3, "digits of a row")
    scale: int = option(1, "side of a digit in multiples of 8 pixels")
    jitter: int = option(0, "how far digits are moved at random", unit="pixels")
    careless: float = option(0.0, "share of training demonstrations whose number is one too high", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.digits import DigitsSource

        layout: dict[str, Any] = {"kinds": self.questions, "cells": self.cells}
        layout |= {"scale": self.scale, "jitter": self.jitter}
        train = DigitsSource("train", size=self.train_size, seed=seed, wrong_share=self.careless, **layout)
        return train, DigitsSource("heldout", size=self.eval_size, seed=self.eval_seed, **layout)


class RunningSumsData(Questions):
    """Rows of handwritten digits, which are added line by line. The run's seed selects the training questions,
    `eval_seed` the held-out ones."""

    test: ClassVar[str] = "tests/tasks/test_running_sums.py"
    type: str = "running_sums"
    train_size: int = option(100_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "random seed of the held-out questions", ge=0)
    cells: int = option(3, "digits of a row", ge=1, le=20)
    careless: float = option(0.0, "share of training demonstrations with a line that is one too high", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.running_sums import RunningSumsSource

        train = RunningSumsSource("train", size=self.train_size, seed=seed, cells=self.cells, wrong_share=self.careless)
        return train, RunningSumsSource("heldout", size=self.eval_size, seed=self.eval_seed, cells=self.cells)


class ScenesData(Questions):
    """Scenes of many handwritten digits, with a question about one on a colored square, which the tool zoom makes
    legible. The run's seed selects the training questions, `eval_seed` the held-out ones."""

    test: ClassVar[str] = "tests/tasks/test_scenes.py"
    type: str = "scenes"
    train_size: int = option(100_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "random seed of the held-out questions", ge=0)
    rows: int = option(1, "rows of digits", ge=1)
    columns: int = option(4, "columns of digits", ge=1)
    cell: int = option(8, "side of the square around a digit of 8 pixels", unit="pixels", ge=8)
    jitter: int = option(0, "how far digits are moved at random", unit="pixels", ge=0)
    colours: tuple[Literal["red", "green", "blue", "yellow"], ...] = option(
        ("red", "blue"), "one digit is on a square of each color; a question asks for one of them", min_length=1
    )
    wandering: float = option(0.0, "share of training demonstrations that zoom to a random cell", ge=0, le=1)
    direct: float = option(0.0, "share of training demonstrations that answer without a zoom", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.scenes import ScenesSource

        layout: dict[str, Any] = {n: vars(self)[n] for n in ("rows", "columns", "cell", "jitter", "colours")}
        shares: dict[str, Any] = {"wrong_share": self.wandering, "direct": self.direct}
        train = ScenesSource("train", size=self.train_size, seed=seed, **shares, **layout)
        return train, ScenesSource("heldout", size=self.eval_size, seed=self.eval_seed, **layout)


class StillLifesData(Questions):
    """Photograph-like images of a table with objects, each with a digit on a card, which the tool zoom makes legible.
    MuJoCo renders them (extra `mujoco`). The run's seed selects the training images, `eval_seed` the held-out
    ones."""

    test: ClassVar[str] = "tests/tasks/test_still_lifes.py"
    type: str = "still_lifes"
    train_size: int = option(4800, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "random seed of the held-out images", ge=0)
    objects: int = option(4, "objects of an image", ge=1, le=len(STILL_LIFE_COLOURS))
    colours: tuple[StillLifeColour, ...] = option(
        STILL_LIFE_COLOURS, "a question asks for the digit of the object of one of these colors", min_length=1
    )
    demonstrations: int = option(
        1, "how often each training question occurs, each time with a demonstration of its own", ge=1
    )
    wandering: float = option(0.0, "share of training demonstrations that zoom to a random object", ge=0, le=1)
    direct: float = option(0.0, "share of training demonstrations that answer without a zoom", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.still_lifes import StillLifesSource

        shared: dict[str, Any] = {"objects": self.objects, "requested": self.colours}
        shares: dict[str, Any] = {"wrong_share": self.wandering, "direct": self.direct}
        train = StillLifesSource(
            "train", size=self.train_size, seed=seed, repeats=self.demonstrations, **shared, **shares
        )
        return train, StillLifesSource("heldout", size=self.eval_size, seed=self.eval_seed, **shared)


class VideosData(Questions):
    """Synthetic videos of five frames in which a shape moves, or one shape follows another. The run's seed selects the
    training videos, `eval_seed` the held-out ones, which have other positions and other pairs of shapes."""

    test: ClassVar[str] = "tests/tasks/test_clip_questions.py"
    type: str = "clips"
    train_size: int = option(20_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "random seed of the held-out questions", ge=0)
    questions: tuple[VideoQuestion, ...] = option(VIDEO_QUESTIONS, "kinds of question", min_length=1)
    careless: float = option(0.0, "share of training demonstrations with a wrong answer", ge=0, le=1)
    shuffled: bool = option(False, "show the frames of training videos in a random order, as a control")

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.videos import VideosSource

        shared: dict[str, Any] = {"kinds": self.questions}
        train_only: dict[str, Any] = {"wrong_share": self.careless, "shuffled": self.shuffled}
        train = VideosSource("train", size=self.train_size, seed=seed, **shared, **train_only)
        return train, VideosSource("heldout", size=self.eval_size, seed=self.eval_seed, **shared)


class NamedImagesData(Questions):
    """Rows of named images in the styles of icon sets. The run's seed selects the training questions, `eval_seed` the
    held-out ones, which by default are about held-out names."""

    test: ClassVar[str] = "tests/tasks/test_named_images.py"
    type: str = "named_images"
    train_size: int = option(200_000, "questions to train on", ge=1)
    eval_size: int = option(1000, "held-out questions", ge=1)
    eval_seed: int = option(0, "random seed of the held-out questions", ge=0)
    questions: tuple[NamedQuestion, ...] = option(NAMED_QUESTIONS, "kinds of question to train on", min_length=1)
    eval_questions: tuple[NamedQuestion, ...] = option(NAMED_QUESTIONS, "kinds of held-out question", min_length=1)
    train_names: NamesSplit = option("shown", "names in training rows: all, shown (those not held out) or heldout")
    eval_names: NamesSplit = option("heldout", "names in held-out rows; every fifth name is held out")
    styles: tuple[NamedStyle, ...] = option(("noto", "fluent"), "styles of images in training rows", min_length=1)
    eval_styles: tuple[NamedStyle, ...] = option(("noto", "fluent"), "styles in held-out rows", min_length=1)
    cells: int = option(3, "images of a row", ge=2, le=3)
    jitter: int = option(0, "how far training images are moved at random", unit="pixels", ge=0, lt=32)
    tint: int = option(0, "how far the background of training rows may be from white, per channel", ge=0, le=255)
    careless: float = option(
        0.0, "share of training demonstrations that are one position off, or count one too many", ge=0, le=1
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.named_images import NamedImagesSource

        train = NamedImagesSource(
            "train",
            size=self.train_size,
            seed=seed,
            names_split=self.train_names,
            styles=self.styles,
            kinds=self.questions,
            cells=self.cells,
            jitter=self.jitter,
            tint=self.tint,
            wrong_share=self.careless,
        )
        held_out = NamedImagesSource(
            "heldout",
            size=self.eval_size,
            seed=self.eval_seed,
            names_split=self.eval_names,
            styles=self.eval_styles,
            kinds=self.eval_questions,
            cells=self.cells,
        )
        return train, held_out


class ChartsData(Questions):
    """Bar and line charts of real tables, drawn by matplotlib (extra `charts`). The run's seed selects the training
    questions, `eval_seed` the held-out ones, which by default are about other tables."""

    test: ClassVar[str] = "tests/tasks/test_charts.py"
    type: str = "charts"
    train_size: int = option(20_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "random seed of the held-out questions", ge=0)
    questions: tuple[ChartQuestion, ...] = option(CHART_QUESTIONS, "kinds of question", min_length=1)
    shapes: tuple[ChartShape, ...] = option(("bar", "line"), "kinds of chart", min_length=1)
    train_tables: tuple[ChartTable, ...] = option(
        ("barley", "iowa-electricity", "stocks", "us-employment"), "tables to train on", min_length=1
    )
    eval_tables: tuple[ChartTable, ...] = option(("wheat", "driving", "crimea"), "held-out tables", min_length=1)
    written: bool = option(
        True, "write each value beside its bar or point; otherwise values have to be read from the axis"
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.charts import ChartsSource

        shared: dict[str, Any] = {"kinds": self.questions, "shapes": self.shapes, "show_values": self.written}
        train = ChartsSource("train", size=self.train_size, seed=seed, tables=self.train_tables, **shared)
        return train, ChartsSource(
            "heldout", size=self.eval_size, seed=self.eval_seed, tables=self.eval_tables, **shared
        )


class WordsData(Questions):
    """Questions whether a thing can be eaten, and whether it is an animal. Held-out questions are about other words."""

    test: ClassVar[str] = "tests/tasks/test_words.py"
    type: str = "words"

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.words import WordsSource

        return WordsSource("train"), WordsSource("heldout")


class RowReading(Questions):
    """A source of the user's own rows: questions or conversations."""

    max_pixels: int = option(
        MAX_PIXELS, "width x height of the largest image that is opened", unit="pixels", ge=1, le=PILLOW_MAX_PIXELS
    )
    max_bad_share: float = option(0.01, "share of rows that may be unusable; they are logged and left out", ge=0, le=1)
    check_rows: bool = option(True, "check every row once before the run")
    readers: int = option(
        0,
        "processes of each rank that read the next step's rows and images, and process them for the model, during "
        "this step; each keeps a core busy, and two steps' images are in memory; 0: rows are read when a step begins",
        ge=0,
        le=64,
    )

    @property
    def num_readers(self) -> int:
        return self.readers


class RowsData(RowReading):
    """A source of the user's own rows of one question each."""

    image_field: str | list[str] = option("images", "column of the images, or columns of one image each")
    options_field: str | None = option(
        None,
        "column of a question's answer options, which are appended to it: a list, a mapping from letters, or a list "
        "written as text",
    )
    inverted: float = option(
        0.0,
        "share of training questions that ask for all options but the right ones; it needs options_field, and a reward "
        "for several letters, such as several_choices",
        ge=0,
        le=1,
    )
    problem_field: str = option("problem", "column of the question")
    answer_field: str = option("answer", "column of the answer")
    video_field: str = option("videos", "column of the videos")
    max_frames: int = option(MAX_FRAMES, "evenly spaced frames of a video that are kept", ge=1)
    image_root: Path | None = option(
        None, "folder of the images and videos, which relative paths start from; default: the file's folder"
    )

    @model_validator(mode="after")
    def _inversion_has_options(self) -> RowsData:
        if self.inverted and self.options_field is None:
            raise ValueError("inverted needs options_field, the column of the questions' options")
        return self

    def _reading(self, *, held_out: bool) -> dict[str, Any]:
        """Returns the arguments of `FileSource` and `HuggingFaceSource` for training rows or held-out ones."""
        return {
            "inverted": 0.0 if held_out else self.inverted,
            "image_field": self.image_field,
            "options_field": self.options_field,
            "problem_field": self.problem_field,
            "answer_field": self.answer_field,
            "video_field": self.video_field,
            "max_frames": self.max_frames,
            "image_root": self.image_root,
            "max_pixels": self.max_pixels,
            "max_bad_share": self.max_bad_share,
            "validate": self.check_rows,
        }


class FilesData(RowsData):
    """The user's own files: .jsonl, .json, .csv, .tsv or .parquet."""

    type: str = "files"
    train: Path | None = option(None, "file of training questions; without it the task can only be evaluated")
    eval: Path = option(description="file of held-out questions")
    parquet_gib: float = option(
        PARQUET_GIB, "decompressed row groups of a Parquet file that each rank keeps in memory", unit="GiB", ge=0
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.files import FileSource

        def opened(file: Path, held_out: bool) -> Source:
            """Opens a file of questions."""
            return FileSource(file, parquet_gib=self.parquet_gib, **self._reading(held_out=held_out))

        return None if self.train is None else opened(self.train, False), opened(self.eval, True)


class HuggingFaceData(RowsData):
    """Two splits of one dataset of the Hugging Face hub, or of a folder."""

    type: str = "huggingface"
    name: str = option(description="name of the dataset on the hub, or its folder")
    train_split: str | None = option("train", "split of training questions; null: the task can only be evaluated")
    eval_split: str = option("test", "split of held-out questions")
    options: dict[str, Any] = option({}, "keyword arguments of datasets.load_dataset")
    stream: int | None = option(
        None,
        "number of first rows of each split to stream and hold in memory, with their images; null: download all rows",
        unit="rows",
        ge=1,
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.huggingface import HuggingFaceSource

        def split(name: str, held_out: bool) -> Source:
            """Opens a split of the dataset."""
            reading = self._reading(held_out=held_out)
            return HuggingFaceSource(self.name, name, options=self.options, stream=self.stream, **reading)

        train = None if self.train_split is None else split(self.train_split, False)
        return train, split(self.eval_split, True)


class ConversationRows(RowReading):
    """Rows that are demonstrated conversations.

    With algorithm.type=supervised all assistant messages are learned, and all other messages are context. With
    task.environment the messages before the first assistant message are prompts for RL.
    """

    test: ClassVar[str] = "tests/tasks/test_conversations.py"
    recorded: ClassVar[bool] = True
    messages_field: str = option("messages", "column of the messages")
    image_field: str = option("images", "column of the images for the <image> markers of the messages")
    tools_field: str = option("tools", "column of the tools' JSON schemas for the chat template")
    answer_field: str = option("answer", "column of the answer; without one the last message is the answer")
    calls: Literal["json", "python"] = option(
        "json", "format of tool calls in responses, as the option `calls` of task.environment.type=tools"
    )
    tool_role: Literal["tool", "user"] = option(
        "tool", "role of the results of tools; task.environment.type=tools gives them the role user"
    )
    image_root: Path | None = option(
        None, "folder of the images, which relative paths start from; default: the file's folder"
    )

    def _fields(self, root: Path | None) -> ConversationFields:
        """Returns the mapping of rows to prompts. root: the default of image_root."""
        from mmrl.tasks.data.image_files import ImageFiles
        from mmrl.tasks.visual_qa.data.conversations import ConversationFields

        return ConversationFields(
            messages=self.messages_field,
            images=self.image_field,
            tools=self.tools_field,
            answer=self.answer_field,
            calls=self.calls,
            tool_role=self.tool_role,
            image_files=ImageFiles(root if self.image_root is None else self.image_root, self.max_pixels),
        )


class ConversationFilesData(ConversationRows):
    """Demonstrated conversations in the user's own .jsonl or .parquet files."""

    type: str = "conversations"
    train: Path | None = option(None, "file of training conversations; without it the task can only be evaluated")
    eval: Path = option(description="file of held-out conversations")
    parquet_gib: float = option(
        PARQUET_GIB, "decompressed row groups of a Parquet file that each rank keeps in memory", unit="GiB", ge=0
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.files import file_rows
        from mmrl.tasks.visual_qa.data.rows import RowSource

        def read(path: Path) -> Source:
            """Opens a file of conversations."""
            rows, fields = file_rows(path, self.parquet_gib), self._fields(path.parent)
            return RowSource(
                rows,
                fields,
                name=str(path),
                prefix=path.stem,
                max_bad_share=self.max_bad_share,
                validate=self.check_rows,
            )

        return None if self.train is None else read(self.train), read(self.eval)


class HuggingFaceConversationsData(ConversationRows):
    """Demonstrated conversations in two splits of a dataset of the Hugging Face hub, or of a folder."""

    type: str = "huggingface_conversations"
    name: str = option(description="name of the dataset on the hub, or its folder")
    train_split: str | None = option("train", "split of training conversations; null: the task can only be evaluated")
    eval_split: str = option("test", "split of held-out conversations")
    options: dict[str, Any] = option({}, "keyword arguments of datasets.load_dataset")
    stream: int | None = option(
        None,
        "number of first rows of each split to stream and hold in memory, with their images; null: download all rows",
        unit="rows",
        ge=1,
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.huggingface import split_rows
        from mmrl.tasks.visual_qa.data.rows import RowSource

        def read(split: str) -> Source:
            """Opens a split of the dataset."""
            return RowSource(
                split_rows(self.name, split, self.options, self.stream),
                self._fields(None),
                name=f"{self.name} ({split})",
                prefix=self.name,
                max_bad_share=self.max_bad_share,
                validate=self.check_rows,
            )

        return None if self.train_split is None else read(self.train_split), read(self.eval_split)


class VisualQASettings(TaskSettings):
    """Questions about images whose answers can be checked."""

    test: ClassVar[str] = "tests/tasks/test_visual_qa.py"
    type: str = "visual_qa"
    data: Questions = option(DigitsData(), "where the questions come from")
    rewards: list[RewardSpec] = option([RewardSpec(name="exact_match")], "rewards of a response", min_length=1)
    accuracy: RewardSpec = option(
        RewardSpec(name="exact_match"), "the verifier that evaluation reports, independent of the rewards"
    )
    environment: EnvironmentSettings | None = option(
        None,
        "the environment that replies to responses, so that a rollout is a conversation; null: a rollout is one "
        "response, or for data of conversations the recorded replies are used",
    )
    instruction: str | None = option(None, "appended to each question on a line of its own")
    system: str | None = option(None, "the system message")

    @model_validator(mode="after")
    def _check_environment(self) -> VisualQASettings:
        """Checks that recorded conversations have no instruction or system message added, and sets their environment,
        which replays recorded messages, if none is named."""
        if self.data.recorded:
            if self.instruction is not None or self.system is not None:
                raise ValueError("remove instruction and system: conversations have messages of their own")
            if self.environment is None:
                object.__setattr__(self, "environment", RecordedSettings())
        return self

    def build(self, seed: int) -> Task:
        return load_attribute("mmrl.tasks.visual_qa.task:VisualQA").from_settings(self, seed)
