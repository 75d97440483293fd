"""Settings of the visual question answering task."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.rewards.settings import RewardSpec
from mmrl.settings import Choice, load_attribute, option
from mmrl.sims.turns.settings import EnvironmentSettings, RecordedSettings
from mmrl.tasks.data.bounds import MAX_FRAMES, MAX_PIXELS, PARQUET_GIB, PILLOWS_LIMIT
from mmrl.tasks.settings import TaskSettings
from mmrl.tasks.visual_qa.data.kinds import (
    CHART_QUESTIONS,
    EVERY,
    NAMED,
    VIDEO_QUESTIONS,
    ChartQuestion,
    ChartShape,
    ChartTable,
    NamedPart,
    NamedQuestion,
    NamedStyle,
    Question,
    VideoQuestion,
)

if TYPE_CHECKING:
    from mmrl.protocols.parts import Source, Task
    from mmrl.tasks.visual_qa.data.conversations import ConversationFields


class Questions(Choice):
    """A source of questions."""

    title: ClassVar[str] = "questions"
    kinds: ClassVar[dict[str, str]] = {
        "digits": "mmrl.tasks.visual_qa.settings:DigitsData",
        "scenes": "mmrl.tasks.visual_qa.settings:ScenesData",
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
    recorded: ClassVar[bool] = False  # whether prompts hold the recorded answers to their responses

    @property
    def processes(self) -> int:
        """The processes that read ahead for each rank; 0 for data without that option."""
        return 0

    @abstractmethod
    def sources(self, seed: int) -> tuple[Source | None, Source]:
        """Returns questions to train on (None: the task can only be evaluated), and held-out ones."""


class DigitsData(Questions):
    """Canvases of handwritten digits; training rows follow the run's seed, held-out rows only `eval_seed`."""

    test: ClassVar[str] = "tests/tasks/test_digits.py"
    type: str = "digits"
    train_size: int = option(20_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "seed of the held-out questions", ge=0)
    questions: tuple[Question, ...] = option(EVERY, "kinds of question", min_length=1)
    cells: int = option(3, "digits of a row")
    scale: int = option(1, "size of a digit, in 8 pixels")
    jitter: int = option(0, "largest random shift of a digit, in pixels", unit="pixels")
    careless: float = option(0.0, "share of training demonstrations whose number is one too high", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.digits import DigitsSource

        layout: dict[str, Any] = {"kinds": self.questions, "cells": self.cells}
        layout |= {"scale": self.scale, "jitter": self.jitter}
        train = DigitsSource("train", size=self.train_size, seed=seed, careless=self.careless, **layout)
        return train, DigitsSource("heldout", size=self.eval_size, seed=self.eval_seed, **layout)


class ScenesData(Questions):
    """Scenes of many handwritten digits, with a question about a coloured one; a zoom shows it. Training rows follow
    the run's seed, held-out rows only `eval_seed`."""

    test: ClassVar[str] = "tests/tasks/test_scenes.py"
    type: str = "scenes"
    train_size: int = option(100_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "seed of the held-out questions", ge=0)
    rows: int = option(1, "rows of digits in an image", ge=1)
    columns: int = option(4, "of digits", ge=1)
    cell: int = option(8, "side of a digit's square, in pixels; the digit itself has 8", unit="pixels", ge=8)
    jitter: int = option(0, "largest random shift of a digit, in pixels", unit="pixels", ge=0)
    colours: tuple[Literal["red", "green", "blue", "yellow"], ...] = option(
        ("red", "blue"), "each marks one digit, and a question asks for one of them", min_length=1
    )
    wandering: float = option(0.0, "share of training demonstrations that zoom to any cell", ge=0, le=1)
    direct: float = option(0.0, "share of training demonstrations that answer without a zoom", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.scenes import ScenesSource

        layout: dict[str, Any] = {n: vars(self)[n] for n in ("rows", "columns", "cell", "jitter", "colours")}
        shown: dict[str, Any] = {"wandering": self.wandering, "direct": self.direct}
        train = ScenesSource("train", size=self.train_size, seed=seed, **shown, **layout)
        return train, ScenesSource("heldout", size=self.eval_size, seed=self.eval_seed, **layout)


class VideosData(Questions):
    """Drawn videos of five frames in which a shape moves, or one shape follows another. Training videos follow the
    run's seed, held-out videos only `eval_seed`, with shapes at other positions and in other pairs."""

    test: ClassVar[str] = "tests/tasks/test_clip_questions.py"
    type: str = "clips"
    train_size: int = option(20_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "seed of the held-out questions", ge=0)
    questions: tuple[VideoQuestion, ...] = option(VIDEO_QUESTIONS, "kinds of question", min_length=1)
    careless: float = option(0.0, "share of training demonstrations that give another answer", ge=0, le=1)
    shuffled: bool = option(False, "show the frames of training videos in random order, as a control")

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.videos import VideosSource

        shared: dict[str, Any] = {"kinds": self.questions}
        shown: dict[str, Any] = {"careless": self.careless, "shuffled": self.shuffled}
        train = VideosSource("train", size=self.train_size, seed=seed, **shared, **shown)
        return train, VideosSource("heldout", size=self.eval_size, seed=self.eval_seed, **shared)


class NamedImagesData(Questions):
    """Rows of named images in the styles of icon sets; training rows follow the run's seed, held-out rows only
    `eval_seed`. Held-out rows show held-out names by default."""

    test: ClassVar[str] = "tests/tasks/test_named_images.py"
    type: str = "named_images"
    train_size: int = option(200_000, "questions to train on", ge=1)
    eval_size: int = option(1000, "held-out questions", ge=1)
    eval_seed: int = option(0, "seed of the held-out questions", ge=0)
    questions: tuple[NamedQuestion, ...] = option(NAMED, "kinds of question to train on", min_length=1)
    eval_questions: tuple[NamedQuestion, ...] = option(NAMED, "kinds of held-out questions", min_length=1)
    train_names: NamedPart = option("shown", "names in training rows; every fifth name is held out")
    eval_names: NamedPart = option("heldout", "names in held-out rows")
    styles: tuple[NamedStyle, ...] = option(("noto", "fluent"), "styles of the training images", min_length=1)
    eval_styles: tuple[NamedStyle, ...] = option(("noto", "fluent"), "styles of the held-out images", min_length=1)
    cells: int = option(3, "images of a row", ge=2, le=3)
    jitter: int = option(0, "how far images to train on are moved by chance", unit="pixels", ge=0, lt=32)
    tint: int = option(0, "how far their background may be from white, of 255 a channel", ge=0, le=255)
    careless: float = option(
        0.0, "share of training demonstrations that are one position off, or count one too many", ge=0, le=1
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.named_images import NamedImagesSource

        train = NamedImagesSource(
            "train",
            size=self.train_size,
            seed=seed,
            which=self.train_names,
            styles=self.styles,
            kinds=self.questions,
            cells=self.cells,
            jitter=self.jitter,
            tint=self.tint,
            careless=self.careless,
        )
        held_out = NamedImagesSource(
            "heldout",
            size=self.eval_size,
            seed=self.eval_seed,
            which=self.eval_names,
            styles=self.eval_styles,
            kinds=self.eval_questions,
            cells=self.cells,
        )
        return train, held_out


class ChartsData(Questions):
    """Bar and line charts of real tables, drawn by matplotlib (extra `charts`); training rows follow the run's seed,
    held-out rows only `eval_seed`, and are made of other tables by default."""

    test: ClassVar[str] = "tests/tasks/test_charts.py"
    type: str = "charts"
    train_size: int = option(20_000, "questions to train on", ge=1)
    eval_size: int = option(500, "held-out questions", ge=1)
    eval_seed: int = option(0, "seed of the held-out questions", ge=0)
    questions: tuple[ChartQuestion, ...] = option(CHART_QUESTIONS, "kinds of question", min_length=1)
    shapes: tuple[ChartShape, ...] = option(("bar", "line"), "of charts", min_length=1)
    train_tables: tuple[ChartTable, ...] = option(
        ("barley", "iowa-electricity", "stocks", "us-employment"), "tables to train on", min_length=1
    )
    eval_tables: tuple[ChartTable, ...] = option(("wheat", "driving", "crimea"), "held-out tables", min_length=1)
    written: bool = option(
        True, "write each value beside its bar or point; otherwise values have to be read from the axis"
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.charts import ChartsSource

        shared: dict[str, Any] = {"kinds": self.questions, "shapes": self.shapes, "written": self.written}
        train = ChartsSource("train", size=self.train_size, seed=seed, tables=self.train_tables, **shared)
        return train, ChartsSource(
            "heldout", size=self.eval_size, seed=self.eval_seed, tables=self.eval_tables, **shared
        )


class WordsData(Questions):
    """Questions whether one can eat a thing, and whether something is an animal; held-out questions are about other
    words."""

    test: ClassVar[str] = "tests/tasks/test_words.py"
    type: str = "words"

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.words import WordsSource

        return WordsSource("train"), WordsSource("heldout")


class RowReading(Questions):
    """A source of the user's rows, whatever they hold."""

    max_pixels: int = option(
        MAX_PIXELS, "width x height of the largest image that is opened", unit="pixels", ge=1, le=PILLOWS_LIMIT
    )
    max_bad_share: float = option(0.01, "share of rows that may be unusable; they are named and left out", ge=0, le=1)
    check_rows: bool = option(True, "check every row once before the run")
    readers: int = option(
        0,
        "processes of each rank that read the next step's rows and images, and encode them where the model reads "
        "prompts, while this step goes on; each keeps a core busy, and the next step's images are held beside this "
        "one's; 0: rows are read when a step begins",
        ge=0,
        le=64,
    )

    @property
    def processes(self) -> int:
        return self.readers


class RowsData(RowReading):
    """The user's rows, of one question each."""

    image_field: str | list[str] = option("images", "column of the images, or columns of one image each")
    options_field: str | None = option(
        None, "column of a question's options: a list, a mapping by letter, or the text of a list; they are appended"
    )
    problem_field: str = option("problem", "column of the question")
    answer_field: str = option("answer", "column of the answer")
    video_field: str = option("videos", "column of the videos")
    max_frames: int = option(MAX_FRAMES, "frames of a video that are used, evenly spaced", ge=1)
    image_root: Path | None = option(
        None, "folder that relative paths of images and videos start from; default: the file's"
    )

    @property
    def _reading(self) -> dict[str, Any]:
        """Returns the arguments of a source of rows that come from these settings."""
        return {
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
    train: Path | None = option(None, "questions to train on; without it the task can only be evaluated")
    eval: Path = option(description="held-out questions")
    parquet_gib: float = option(
        PARQUET_GIB, "of a Parquet file's row groups, that each rank keeps unpacked", unit="GiB", ge=0
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.files import FileSource

        reading = self._reading | {"parquet_gib": self.parquet_gib}
        train = None if self.train is None else FileSource(self.train, **reading)
        return train, FileSource(self.eval, **reading)


class HuggingFaceData(RowsData):
    """Two splits of one dataset of the Hugging Face hub, or of a folder."""

    type: str = "huggingface"
    name: str = option(description="name of the data set")
    train_split: str | None = option("train", "questions to train on; null: the task can only be evaluated")
    eval_split: str = option("test", "held-out questions")
    options: dict[str, Any] = option({}, "keyword arguments of datasets.load_dataset")
    stream: int | None = option(
        None,
        "first rows of each split that are read as a stream and held in memory, images included, instead of a download "
        "of the whole; null: download",
        unit="rows",
        ge=1,
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.huggingface import HuggingFaceSource

        def split(name: str) -> Source:
            return HuggingFaceSource(self.name, name, options=self.options, stream=self.stream, **self._reading)

        return None if self.train_split is None else split(self.train_split), split(self.eval_split)


class ConversationRows(RowReading):
    """Rows that are demonstrated conversations: assistants' messages are learned from with algorithm.type=supervised,
    every turn of it, and all else is read. With task.environment the beginnings are prompts for RL."""

    test: ClassVar[str] = "tests/tasks/test_conversations.py"
    recorded: ClassVar[bool] = True
    messages_field: str = option("messages", "column of the messages")
    image_field: str = option("images", "column of the images that messages have places for")
    tools_field: str = option("tools", "column of the JSON schemas of functions that the chat template shows")
    answer_field: str = option("answer", "column of the answer; a row without one is answered by its last message")
    calls: Literal["json", "python"] = option(
        "json", "how tool_calls are written into responses, as the option `calls` of task.environment.type=tools"
    )
    tool_role: Literal["tool", "user"] = option(
        "tool", "role of tool results; task.environment.type=tools uses the role user"
    )
    image_root: Path | None = option(None, "folder that relative paths of images start from; default: the file's")

    def _fields(self, root: Path | None) -> ConversationFields:
        """Returns the reader of rows with conversations. root: the file's folder, below which images lie by default."""
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
    train: Path | None = option(None, "conversations to train on; without it the task can only be evaluated")
    eval: Path = option(description="held-out conversations")
    parquet_gib: float = option(
        PARQUET_GIB, "of a Parquet file's row groups, that each rank keeps unpacked", unit="GiB", ge=0
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.files import file_rows
        from mmrl.tasks.visual_qa.data.rows import RowSource

        def read(path: Path) -> Source:
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
    name: str = option(description="name of the data set")
    train_split: str | None = option("train", "conversations to train on; null: the task can only be evaluated")
    eval_split: str = option("test", "held-out conversations")
    options: dict[str, Any] = option({}, "keyword arguments of datasets.load_dataset")
    stream: int | None = option(
        None,
        "first rows of each split that are read as a stream and held in memory, images included, instead of a download "
        "of the whole; null: download",
        unit="rows",
        ge=1,
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.visual_qa.data.huggingface import split_rows
        from mmrl.tasks.visual_qa.data.rows import RowSource

        def read(split: str) -> Source:
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
    data: Questions = option(DigitsData(), "source of the questions")
    rewards: list[RewardSpec] = option([RewardSpec(name="exact_match")], "rewards of a rollout", min_length=1)
    accuracy: RewardSpec = option(
        RewardSpec(name="exact_match"), "the verifier that evaluation reports, whatever the rewards are"
    )
    environment: EnvironmentSettings | None = option(
        None,
        "what answers responses, so that a rollout is a conversation; null: one response a prompt, and for data that "
        "are conversations what was recorded there",
    )
    instruction: str | None = option(None, "appended to each question on a line of its own")
    system: str | None = option(None, "the system message")

    @model_validator(mode="after")
    def _check_environment(self) -> VisualQASettings:
        if self.data.recorded:
            if self.instruction is not None or self.system is not None:
                raise ValueError("instruction and system are for questions; conversations have messages of their own")
            if self.environment is None:
                object.__setattr__(self, "environment", RecordedSettings())
        return self

    def build(self, seed: int) -> Task:
        return load_attribute("mmrl.tasks.visual_qa.task:VisualQA").of(self, seed)
