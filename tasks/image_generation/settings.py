"""Settings of the image generation task."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from mmrl.rewards.settings import RewardSpec
from mmrl.settings import Choice, load_attribute, option
from mmrl.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from mmrl.protocols.parts import Source, Task
    from mmrl.rollouts import Prompt
    from mmrl.tasks.image_generation.data.sources_to_edit import ImagesToEdit

_PACKAGE = "mmrl.tasks.image_generation"
Colour = Literal["red", "green", "blue", "yellow", "purple", "white"]


class Prompts(Choice):
    """A source of prompts, with the rewards and the accuracy of their images where the task names none. edits: whether
    prompts hold the region of an image that shall not change, for a guard."""

    title: ClassVar[str] = "prompts"
    kinds: ClassVar[dict[str, str]] = {
        "digits": f"{_PACKAGE}.settings:DigitPrompts",
        "shapes": f"{_PACKAGE}.settings:ShapesData",
        "edits": f"{_PACKAGE}.settings:EditsData",
        "named": f"{_PACKAGE}.settings:NamedData",
        "prompts": f"{_PACKAGE}.settings:PromptsData",
        "pairs": f"{_PACKAGE}.settings:PairsData",
    }
    rewards: ClassVar[list[RewardSpec]] = []
    edits: ClassVar[bool] = False
    accuracy: ClassVar[RewardSpec | None] = None
    second_scorer: ClassVar[RewardSpec | None] = None

    @property
    def shows_held_out(self) -> bool:
        """Returns whether prompts to train on may be held-out ones too, as those of a base."""
        return False

    @abstractmethod
    def sources(self, seed: int) -> tuple[Source | None, Source]:
        """Returns prompts to train on (None: the task can only be evaluated), and held-out ones."""


class GeneratedPrompts(Prompts):
    """Generated prompts: those to train on follow the run's seed, held-out ones only `eval_seed`."""

    train_size: int = option(20_000, "prompts to train on", ge=1)
    eval_size: int = option(500, "held-out prompts", ge=1)
    eval_seed: int = option(0, "of the held-out prompts", ge=0)
    careless: float = option(0.0, "share of training images that show something else", ge=0, le=1)


class DigitPrompts(GeneratedPrompts):
    """Sentences that ask for a handwritten digit: images of 1 x 8 x 8."""

    test: ClassVar[str] = "tests/tasks/test_image_digits.py"
    rewards: ClassVar[list[RewardSpec]] = [
        RewardSpec(name="classifier_logp", options={"classifier": f"{_PACKAGE}.data.digits:reward_classifier"})
    ]
    accuracy: ClassVar[RewardSpec | None] = RewardSpec(name=f"{_PACKAGE}.data.digits:DigitCorrect")
    second_scorer: ClassVar[RewardSpec | None] = RewardSpec(
        name="classifier_logp", options={"classifier": f"{_PACKAGE}.data.digits:second_classifier"}
    )
    type: str = "digits"
    rejected: bool = option(
        False, "each prompt holds an image of another digit too, for algorithm.type=offline_preference"
    )
    reasoning: bool = option(
        False, "each prompt holds a text that names its digit, for models that write (rollout.reasoning_length)"
    )
    twins: bool = option(
        False, "each prompt holds a twin that asks for another digit in the same words, for rollout.twins"
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.image_generation.data.digits import DigitPromptSource

        more: dict[str, Any] = {
            "careless": self.careless,
            "rejected": self.rejected,
            "reasoning": self.reasoning,
            "twins": self.twins,
        }
        train = DigitPromptSource("train", size=self.train_size, seed=seed, **more)
        return train, DigitPromptSource("heldout", size=self.eval_size, seed=self.eval_seed)


class ShapesData(GeneratedPrompts):
    """Sentences that ask for a scene of coloured shapes: images of 3 x 16 x 16."""

    test: ClassVar[str] = "tests/tasks/test_image_shapes.py"
    rewards: ClassVar[list[RewardSpec]] = [
        RewardSpec(name=f"{_PACKAGE}.rewards.checker:ShapesChecked", label="shapes_checked")
    ]
    accuracy: ClassVar[RewardSpec | None] = RewardSpec(name=f"{_PACKAGE}.rewards.checker:ShapesChecked")
    second_scorer: ClassVar[RewardSpec | None] = RewardSpec(name=f"{_PACKAGE}.rewards.checker:ShapesRedrawn")
    type: str = "shapes"
    scenes: tuple[Literal["count", "relation"], ...] = option(("count", "relation"), "kinds of scene", min_length=1)
    colours: tuple[Colour, ...] = option(("red", "green", "blue", "yellow"), "of the shapes", min_length=1)
    max_count: int = option(4, "objects of one kind", ge=1, le=4)
    layout: Literal["free", "grid", "row"] = option(
        "free", "where objects to learn from stand: anywhere, on a grid of 3 x 3, or those of a phrase in one row of it"
    )
    combinations: Literal["train", "all"] = option(
        "train",
        "combinations to train on; all: also those that evaluation asks for, as a base has seen them, so that what RL "
        "then trains without is held out from RL, not from the base",
    )

    @property
    def shows_held_out(self) -> bool:
        return self.combinations == "all"

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.image_generation.data.shapes import ShapesSource

        allowed: dict[str, Any] = {
            "kinds": self.scenes,
            "colours": self.colours,
            "max_count": self.max_count,
            "layout": self.layout,
        }
        train = ShapesSource(self.combinations, size=self.train_size, seed=seed, careless=self.careless, **allowed)
        return train, ShapesSource("heldout", size=self.eval_size, seed=self.eval_seed, **allowed)


class EditsData(GeneratedPrompts):
    """Instructions for drawn scenes ("make the bar blue"): sources of 3 x 16 x 16, and what they shall become."""

    test: ClassVar[str] = "tests/tasks/test_image_edits.py"
    rewards: ClassVar[list[RewardSpec]] = [
        RewardSpec(name=f"{_PACKAGE}.data.edits:EditChecked", options={"part": "changed"}, label="changed"),
        RewardSpec(name=f"{_PACKAGE}.data.edits:EditChecked", options={"part": "kept"}, label="kept"),
        RewardSpec(name=f"{_PACKAGE}.data.edits:EditChecked", label="whole"),
    ]
    accuracy: ClassVar[RewardSpec | None] = RewardSpec(name=f"{_PACKAGE}.data.edits:EditChecked")
    second_scorer: ClassVar[RewardSpec | None] = RewardSpec(name=f"{_PACKAGE}.data.edits:RegionKept")
    edits: ClassVar[bool] = True
    type: str = "edits"
    all_edits: bool = option(False, "train on all edits, also those that evaluation asks for, as a base has seen them")

    @property
    def shows_held_out(self) -> bool:
        return self.all_edits

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.image_generation.data.edits import EditedShapes

        train = EditedShapes(
            "all" if self.all_edits else "train", size=self.train_size, seed=seed, careless=self.careless
        )
        return train, EditedShapes("heldout", size=self.eval_size, seed=self.eval_seed)


class NamedData(GeneratedPrompts):
    """Sentences that ask for one of some things by name: images of 3 x 16 x 16 in one artist's style. The reward is
    that of a scorer which learned another style, the accuracy that of one which learned this one."""

    test: ClassVar[str] = "tests/tasks/test_image_named.py"
    rewards: ClassVar[list[RewardSpec]] = [
        RewardSpec(
            name=f"{_PACKAGE}.data.named_images:Recognised",
            options={"judge": "reward", "soft": True},
            label="recognised",
        )
    ]
    accuracy: ClassVar[RewardSpec | None] = RewardSpec(name=f"{_PACKAGE}.data.named_images:Recognised")
    second_scorer: ClassVar[RewardSpec | None] = RewardSpec(
        name=f"{_PACKAGE}.data.named_images:Recognised", options={"soft": True}
    )
    type: str = "named"

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.image_generation.data.named_images import NamedSource

        train = NamedSource("train", size=self.train_size, seed=seed, careless=self.careless)
        return train, NamedSource("heldout", size=self.eval_size, seed=self.eval_seed)


class PromptsData(Prompts):
    """The user's prompt files. Held-out prompts come from `eval`, or are the share `heldout` of `train`."""

    test: ClassVar[str] = "tests/tasks/test_image_prompts.py"
    type: str = "prompts"
    train: Path | None = option(None, "prompts to train on; without it the task can only be evaluated")
    eval: Path | None = option(None, "held-out prompts")
    heldout: float | None = option(None, "share of `train` that is held out", gt=0, lt=1)
    format: Literal["plain", "geneval", "ocr"] = option("plain", "format of the files")
    prompt_field: str = option("prompt", "column of the prompt, where a file has columns")
    image_field: str | None = option(
        None,
        "column of the image to edit, for a pipeline that edits: a path below the file's folder, or a list of them",
    )
    max_bad_share: float = option(0.0, "share of rows that may be unusable; they are named and left out", ge=0, le=1)

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        if (self.eval is None) == (self.heldout is None):
            raise ValueError("set either eval, a file of held-out prompts, or heldout, a share of train")
        if self.heldout is not None and self.train is None:
            raise ValueError("heldout is a share of train, which is not set")
        return self

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.image_generation.data import prompts

        train = None if self.train is None else self._read(self.train)
        if self.eval is None:
            assert self.train is not None and train is not None and self.heldout is not None
            training, held_out = prompts.hold_out(train, self.heldout)
            return self._source(training, self.train), self._source(held_out, self.train)
        evaluation = self._read(self.eval)
        if train is not None:
            prompts.warn_of_overlap(train, evaluation, self.image_field)
        learned = None if train is None or self.train is None else self._source(train, self.train)
        return learned, self._source(evaluation, self.eval)

    def _read(self, path: Path) -> list[Prompt]:
        from mmrl.tasks.image_generation.data import prompts

        more: dict[str, Any] = {"format": self.format, "max_bad_share": self.max_bad_share}
        return prompts.load(path, field=self.prompt_field, images=self._images(path), **more)

    def _images(self, path: Path) -> ImagesToEdit | None:
        from mmrl.tasks.image_generation.data.sources_to_edit import ImagesToEdit

        return None if self.image_field is None else ImagesToEdit(path.parent, self.image_field)

    def _source(self, prompts: list[Prompt], path: Path) -> Source:
        from mmrl.tasks.image_generation.data.sources_to_edit import PromptsToEdit

        images = self._images(path)
        return prompts if images is None else PromptsToEdit(prompts, images)


class PairsData(Prompts):
    """Pairs of the user's: rows of `prompt`, `chosen` and `rejected`, the latter paths of images of one size below the
    file's folder; for algorithm.type=offline_preference."""

    test: ClassVar[str] = "tests/tasks/test_image_pairs.py"
    type: str = "pairs"
    train: Path | None = option(None, "pairs to train on; without them the task can only be evaluated")
    eval: Path = option(description="held-out prompts")
    prompt_field: str = option("prompt", "column of the prompt")
    grey: bool = option(False, "images have one channel")
    max_bad_share: float = option(0.0, "share of rows that may be unusable; they are named and left out", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.data.pairs import Pairs
        from mmrl.tasks.image_generation.data import prompts
        from mmrl.tasks.image_generation.data.pairs import ImagePairs

        rows: dict[str, Any] = {"max_bad_share": self.max_bad_share, "field": self.prompt_field}
        train: Pairs | None = None if self.train is None else ImagePairs(self.train, grey=self.grey, **rows)
        return train, prompts.load(self.eval, **rows)


class ImageGenerationSettings(TaskSettings):
    """Images from prompts. Digits and shapes have rewards, an accuracy and a second scorer of their own; prompt files
    need rewards and an accuracy."""

    test: ClassVar[str] = "tests/tasks/test_image_generation.py"
    type: str = "image_generation"
    data: Prompts = option(DigitPrompts(), "where the prompts come from")
    rewards: list[RewardSpec] | None = option(None, "what an image earns; default: that of the data", min_length=1)
    accuracy: RewardSpec | None = option(None, "what evaluation reports; default: that of the data")
    second_scorer: RewardSpec | None = option(
        None, "a guard that is reported beside the rewards and never trained on; default: that of the data"
    )

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

    def build(self, seed: int) -> Task:
        return load_attribute("mmrl.tasks.image_generation.task:ImageGeneration").of(self, seed)
