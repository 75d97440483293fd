"""Settings of the image generation task."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from mmrl.rewards.settings import RewardSpec
from mmrl.settings import Choice, load_attribute, option
from mmrl.tasks.settings import TaskSettings, check_held_out

if TYPE_CHECKING:
    from mmrl.protocols.parts import Source, Task
    from mmrl.rollouts import Prompt
    from mmrl.tasks.image_generation.data.sources_to_edit import ImagesToEdit

_PACKAGE = "mmrl.tasks.image_generation"
Color = Literal["red", "green", "blue", "yellow", "purple", "white"]


class Prompts(Choice):
    """Settings of a source of prompts, with default rewards, accuracy and second scorer of the images.

    edits: prompts have the images before and after an edit, which a guard compares.
    """

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
        """Returns whether training prompts may be held-out ones too, so that a base model can learn them."""
        return False

    @abstractmethod
    def sources(self, seed: int) -> tuple[Source | None, Source]:
        """Returns the training prompts and the held-out prompts. Without training prompts (None) the task can only
        be evaluated. seed: the random seed of the training prompts."""


class GeneratedPrompts(Prompts):
    """Synthetic prompts. The run's seed selects the training prompts, `eval_seed` the held-out ones."""

    train_size: int = option(20_000, "training prompts", ge=1)
    eval_size: int = option(500, "held-out prompts", ge=1)
    eval_seed: int = option(0, "random seed of the held-out prompts", ge=0)
    careless: float = option(
        0.0, "share of training prompts whose image for supervised training does not show what they ask for", ge=0, le=1
    )


class DigitPrompts(GeneratedPrompts):
    """Prompts that ask for a handwritten digit: images of 1 x 8 x 8."""

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
        False, "each prompt has an image of another digit too, for algorithm.type=offline_preference"
    )
    reasoning: bool = option(
        False, "each prompt has a text that names its digit, for models that reason (rollout.reasoning_length)"
    )
    twins: bool = option(
        False, "each prompt has a twin that asks for another digit in the same words, for rollout.twins"
    )

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.image_generation.data.digits import DigitPromptSource

        train_only: dict[str, Any] = {
            "wrong_share": self.careless,
            "rejected": self.rejected,
            "reasoning": self.reasoning,
            "twins": self.twins,
        }
        train = DigitPromptSource("train", size=self.train_size, seed=seed, **train_only)
        return train, DigitPromptSource("heldout", size=self.eval_size, seed=self.eval_seed)


class ShapesData(GeneratedPrompts):
    """Prompts that ask for a scene of colored shapes: images of 3 x 16 x 16."""

    test: ClassVar[str] = "tests/tasks/test_image_shapes.py"
    rewards: ClassVar[list[RewardSpec]] = [
        RewardSpec(name=f"{_PACKAGE}.rewards.checker:ShapesChecked", label="shapes_checked")
    ]
    accuracy: ClassVar[RewardSpec | None] = RewardSpec(name=f"{_PACKAGE}.rewards.checker:ShapesChecked")
    second_scorer: ClassVar[RewardSpec | None] = RewardSpec(name=f"{_PACKAGE}.rewards.checker:ShapesRedrawn")
    type: str = "shapes"
    scenes: tuple[Literal["count", "relation"], ...] = option(("count", "relation"), "kinds of scene", min_length=1)
    colours: tuple[Color, ...] = option(("red", "green", "blue", "yellow"), "colors of the shapes", min_length=1)
    max_count: int = option(4, "maximum number of objects of one color", ge=1, le=4)
    layout: Literal["free", "grid", "row"] = option(
        "free",
        "positions of objects in images for supervised training: anywhere, on a grid of 3 x 3, or on that grid with "
        "the objects of a phrase in one row",
    )
    combinations: Literal["train", "all"] = option(
        "train",
        "scenes to train on; all: also the held-out ones, for a base model, so that only RL lacks them",
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
        train = ShapesSource(self.combinations, size=self.train_size, seed=seed, wrong_share=self.careless, **allowed)
        return train, ShapesSource("heldout", size=self.eval_size, seed=self.eval_seed, **allowed)


class EditsData(GeneratedPrompts):
    """Instructions for drawn scenes ("make the bar blue"): source images of 3 x 16 x 16, and the edited images."""

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
    all_edits: bool = option(False, "train on all edits, also the held-out ones, for a base model")

    @property
    def shows_held_out(self) -> bool:
        return self.all_edits

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.image_generation.data.edits import EditedShapes

        train = EditedShapes(
            "all" if self.all_edits else "train", size=self.train_size, seed=seed, wrong_share=self.careless
        )
        return train, EditedShapes("heldout", size=self.eval_size, seed=self.eval_seed)


class NamedData(GeneratedPrompts):
    """Prompts that ask for a thing by name: images of 3 x 16 x 16 in one artist's style. The reward's classifier was
    trained on another style, the classifier of accuracy on the same style."""

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

        train = NamedSource("train", size=self.train_size, seed=seed, wrong_share=self.careless)
        return train, NamedSource("heldout", size=self.eval_size, seed=self.eval_seed)


class PromptsData(Prompts):
    """The user's prompt files. Held-out prompts are in the file `eval`, or are the share `heldout` of `train`."""

    test: ClassVar[str] = "tests/tasks/test_image_prompts.py"
    type: str = "prompts"
    train: Path | None = option(None, "file of training prompts; without it the task can only be evaluated")
    eval: Path | None = option(None, "file of held-out prompts")
    heldout: float | None = option(None, "share of `train` that is held out", gt=0, lt=1)
    format: Literal["plain", "geneval", "ocr"] = option("plain", "metadata that rows have for rewards")
    prompt_field: str = option("prompt", "column of the prompt, if a file has columns")
    image_field: str | None = option(
        None,
        "column of the image to edit, for an editing pipeline: a path below the file's folder, or a list of paths",
    )
    max_bad_share: float = option(0.0, "share of rows that may be unusable; they are logged and left out", ge=0, le=1)

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        check_held_out(self.train, self.eval, self.heldout)
        return self

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        """Returns the training prompts (None without `train`), and the held-out prompts: those in the file `eval`, or
        the share `heldout` of the file `train`."""
        from mmrl.tasks.image_generation.data import prompts

        train = None if self.train is None else self._read(self.train)
        if self.eval is None:
            assert self.train is not None and train is not None and self.heldout is not None
            training, held_out = prompts.hold_out(train, self.heldout)
            return self._source(training, self.train), self._source(held_out, self.train)
        evaluation = self._read(self.eval)
        if train is not None:
            prompts.warn_of_overlap(train, evaluation, self.image_field)
        train_source = None if train is None or self.train is None else self._source(train, self.train)
        return train_source, self._source(evaluation, self.eval)

    def _read(self, path: Path) -> list[Prompt]:
        """Reads the prompts of a file."""
        from mmrl.tasks.image_generation.data import prompts

        options: dict[str, Any] = {"format": self.format, "max_bad_share": self.max_bad_share}
        return prompts.load(path, field=self.prompt_field, images=self._images(path), **options)

    def _images(self, path: Path) -> ImagesToEdit | None:
        """Returns the reader of the images to edit of a prompt file; None if its prompts have none."""
        from mmrl.tasks.image_generation.data.sources_to_edit import ImagesToEdit

        return None if self.image_field is None else ImagesToEdit(path.parent, self.image_field)

    def _source(self, prompts: list[Prompt], path: Path) -> Source:
        """Returns the prompts of a file, with their images to edit if there are any."""
        from mmrl.tasks.image_generation.data.sources_to_edit import PromptsToEdit

        images = self._images(path)
        return prompts if images is None else PromptsToEdit(prompts, images)


class PairsData(Prompts):
    """The user's preference pairs, for algorithm.type=offline_preference: rows of `prompt`, `chosen` and `rejected`.
    `chosen` and `rejected` are paths below the file's folder, of images of one size."""

    test: ClassVar[str] = "tests/tasks/test_image_pairs.py"
    type: str = "pairs"
    train: Path | None = option(None, "file of training pairs; without it the task can only be evaluated")
    eval: Path = option(description="file of held-out prompts")
    prompt_field: str = option("prompt", "column of the prompt")
    grey: bool = option(False, "images have one channel")
    max_bad_share: float = option(0.0, "share of rows that may be unusable; they are logged and left out", ge=0, le=1)

    def sources(self, seed: int) -> tuple[Source | None, Source]:
        from mmrl.tasks.data.pairs import Pairs
        from mmrl.tasks.image_generation.data import prompts
        from mmrl.tasks.image_generation.data.pairs import ImagePairs

        rows: dict[str, Any] = {"max_bad_share": self.max_bad_share, "field": self.prompt_field}
        train: Pairs | None = None if self.train is None else ImagePairs(self.train, grey=self.grey, **rows)
        return train, prompts.load(self.eval, **rows)


class ImageGenerationSettings(TaskSettings):
    """Image generation from prompts. Synthetic data have default rewards, accuracy and second scorer; for prompt files
    set rewards and accuracy."""

    test: ClassVar[str] = "tests/tasks/test_image_generation.py"
    type: str = "image_generation"
    data: Prompts = option(DigitPrompts(), "where the prompts come from")
    rewards: list[RewardSpec] | None = option(None, "rewards of an image; default: those of the data", min_length=1)
    accuracy: RewardSpec | None = option(None, "reward that evaluation reports as accuracy; default: that of the data")
    second_scorer: RewardSpec | None = option(
        None, "a reward that is reported, but not trained on, to reveal reward hacking; default: that of the data"
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
        return load_attribute("mmrl.tasks.image_generation.task:ImageGeneration").from_settings(self, seed)
