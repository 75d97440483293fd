"""Settings of the video generation task."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from mmrl.rewards.settings import RewardSpec
from mmrl.settings import Choice, option
from mmrl.tasks.settings import TaskSettings, check_held_out

if TYPE_CHECKING:
    from mmrl.protocols.parts import Source
    from mmrl.tasks.video_generation.task import VideoGeneration

_PACKAGE = "mmrl.tasks.video_generation"
_CHECKED = f"{_PACKAGE}.tracking:MotionChecked"


class VideoPrompts(Choice):
    """Settings of a source of video prompts, with default rewards and accuracy of the videos."""

    title: ClassVar[str] = "video prompts"
    kinds: ClassVar[dict[str, str]] = {
        "moving_shapes": f"{_PACKAGE}.settings:MovingShapesData",
        "prompts": f"{_PACKAGE}.settings:VideoPromptsData",
        "pairs": f"{_PACKAGE}.settings:VideoPairsData",
    }
    rewards: ClassVar[list[RewardSpec]] = []
    accuracy: ClassVar[RewardSpec | None] = None

    @property
    def shows_held_out(self) -> bool:
        """Returns whether training prompts may be held-out ones too, so that a base model can learn them."""
        return False

    @abstractmethod
    def sources(self, seed: int) -> tuple[Source | None, Source]:
        """Returns the training prompts and the held-out prompts. Without training prompts (None) the task can only
        be evaluated. seed: the random seed of the training prompts."""


class MovingShapesData(VideoPrompts):
    """Prompts that ask for a moving shape: videos of 5 x 1 x 12 x 12, whose motion is tracked exactly."""

    test: ClassVar[str] = "tests/tasks/test_video_generation.py"
    rewards: ClassVar[list[RewardSpec]] = [
        RewardSpec(name=_CHECKED, options={"partial": True}, label="parts"),
        RewardSpec(name=_CHECKED, label="whole"),
    ]
    accuracy: ClassVar[RewardSpec | None] = RewardSpec(name=_CHECKED)
    type: str = "moving_shapes"
    train_size: int = option(20_000, "training prompts", ge=1)
    eval_size: int = option(500, "held-out prompts", ge=1)
    eval_seed: int = option(0, "random seed of the held-out prompts", ge=0)
    careless: float = option(
        0.0, "share of prompts whose video for supervised training has a wrong shape, direction or speed", ge=0, le=1
    )
    all_motions: bool = option(False, "train on all motions, also the held-out ones, for a base model")

    @property
    def shows_held_out(self) -> bool:
        return self.all_motions

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.data.moving_shapes import MovingShapes

        train = MovingShapes(
            "all" if self.all_motions else "train", size=self.train_size, seed=seed, wrong_share=self.careless
        )
        return train, MovingShapes("heldout", size=self.eval_size, seed=self.eval_seed)


class VideoPromptsData(VideoPrompts):
    """The user's prompt files. Held-out prompts are in the file `eval`, or are the share `heldout` of `train`."""

    test: ClassVar[str] = "tests/tasks/test_video_generation.py"
    type: str = "prompts"
    train: Path | None = option(None, "file of training prompts; without it the task can only be evaluated")
    eval: Path | None = option(None, "file of held-out prompts")
    heldout: float | None = option(None, "share of `train` that is held out", gt=0, lt=1)
    prompt_field: str = option("prompt", "column of the prompt, if a file has columns")
    max_bad_share: float = option(0.0, "share of rows that may be unusable; they are logged and left out", ge=0, le=1)

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        check_held_out(self.train, self.eval, self.heldout)
        return self

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.data.prompt_files import load_prompts
        from mmrl.tasks.video_generation import prompts

        rows: dict[str, Any] = {"field": self.prompt_field, "max_bad_share": self.max_bad_share}
        train = None if self.train is None else load_prompts(self.train, **rows)
        if self.eval is not None:
            return train, load_prompts(self.eval, **rows)
        assert train is not None and self.heldout is not None
        return prompts.hold_out(train, self.heldout)


class VideoPairsData(VideoPrompts):
    """The user's preference pairs, for algorithm.type=offline_preference: rows of `prompt`, `chosen` and `rejected`.
    `chosen` and `rejected` are paths below the file's folder, of videos of one size."""

    test: ClassVar[str] = "tests/tasks/test_video_pairs.py"
    type: str = "pairs"
    train: Path | None = option(None, "file of training pairs; without it the task can only be evaluated")
    eval: Path = option(description="file of held-out prompts")
    prompt_field: str = option("prompt", "column of the prompt")
    frames: int = option(16, "evenly spaced frames that are read from a video: as many as the model generates", ge=1)
    grey: bool = option(False, "videos have one channel")
    max_bad_share: float = option(0.0, "share of rows that may be unusable; they are logged and left out", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.data.prompt_files import load_prompts
        from mmrl.tasks.video_generation.pairs import VideoPairs

        rows: dict[str, Any] = {"field": self.prompt_field, "max_bad_share": self.max_bad_share}
        train = None if self.train is None else VideoPairs(self.train, grey=self.grey, num_frames=self.frames, **rows)
        return train, load_prompts(self.eval, **rows)


class VideoGenerationSettings(TaskSettings):
    """Video generation from prompts. Moving shapes have default rewards and accuracy; for prompt files set both."""

    test: ClassVar[str] = "tests/tasks/test_video_generation.py"
    type: str = "video_generation"
    data: VideoPrompts = option(MovingShapesData(), "where the prompts come from")
    rewards: list[RewardSpec] | None = option(None, "rewards of a video; default: those of the data", min_length=1)
    accuracy: RewardSpec | None = option(None, "reward that evaluation reports as accuracy; default: that of the data")

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if not (self.rewards or self.data.rewards):
            raise ValueError("rewards: at least one is needed; name it, such as [{name: clip_similarity}]")
        if self.accuracy is None and self.data.accuracy is None:
            raise ValueError("accuracy: name the reward that evaluation reports, such as {name: clip_similarity}")
        return self

    @property
    def shows_held_out(self) -> bool:
        return self.data.shows_held_out

    def build(self, seed: int) -> VideoGeneration:
        """Builds the task. seed: the random seed of the training prompts."""
        from mmrl.rewards import RewardSet
        from mmrl.tasks.video_generation.task import VideoGeneration

        train, evaluation = self.data.sources(seed)
        accuracy = self.accuracy or self.data.accuracy
        assert accuracy is not None
        return VideoGeneration(train, evaluation, RewardSet(self.rewards or self.data.rewards), RewardSet([accuracy]))
