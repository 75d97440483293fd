"""Options of the image generation task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mmrl import sections
from mmrl.rewards import RewardSpec
from tasks.image_generation.shapes import COLOURS, COUNTS, Layout

_HERE = "tasks.image_generation"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Made(_Section):
    """Prompts that are made: those to train on follow the run's seed, held-out ones only `eval_seed`."""

    train_size: int = Field(default=20_000, ge=1)
    eval_size: int = Field(default=500, ge=1)
    eval_seed: int = Field(default=0, ge=0)
    careless: float = Field(default=0.0, ge=0, le=1)  # share of training pictures that show something else


class DigitsData(_Made):
    """Sentences that ask for a handwritten digit: pictures of 1 x 8 x 8."""

    kind: Literal["digits"] = "digits"


class ShapesData(_Made):
    """Sentences that ask for a scene of coloured shapes: pictures of 3 x 16 x 16."""

    kind: Literal["shapes"]
    kinds: tuple[Literal["count", "relation"], ...] = Field(default=("count", "relation"), min_length=1)
    colours: tuple[Literal[tuple(COLOURS)], ...] = Field(default=("red", "green", "blue", "yellow"), min_length=1)  # type: ignore[valid-type]
    max_count: int = Field(default=len(COUNTS), ge=1, le=len(COUNTS))
    # Where objects to learn from stand: anywhere, on a grid of 3 x 3, or those of a phrase in one row of it.
    layout: Layout = "free"
    # Combinations to train on. all: also those that evaluation asks for, as a base has seen them in its pictures; RL
    # that follows trains on "train", and what it never got a reward for is then held out from RL, not from the base.
    combinations: Literal["train", "all"] = "train"


class PromptsData(_Section):
    """The user's prompt files. Held-out prompts come from `eval`, or are the share `heldout` of `train`.

    Without `train` the task can only be evaluated.
    """

    kind: Literal["prompts"]
    train: Path | None = None
    eval: Path | None = None
    heldout: float | None = Field(default=None, gt=0, lt=1)
    format: Literal["plain", "geneval", "ocr"] = "plain"
    max_bad_share: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _one_source_of_held_out_prompts(self) -> Self:
        if (self.eval is None) == (self.heldout is None):
            raise ValueError("set either eval, a file of held-out prompts, or heldout, a share of train")
        if self.heldout is not None and self.train is None:
            raise ValueError("heldout is a share of train, which is not set")
        return self


class ImageGenerationConfig(_Section):
    """Where the prompts come from and what a picture earns.

    `accuracy` is what evaluation reports, and `second_scorer` a guard that is logged beside the rewards and never
    trained on. Digits and shapes have their own for all three; a prompt file needs rewards and an accuracy.
    """

    data: Annotated[DigitsData | ShapesData | PromptsData, Field(discriminator="kind")] = DigitsData()
    rewards: list[RewardSpec] = []
    accuracy: RewardSpec | None = None
    second_scorer: RewardSpec | None = None


DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "rewards": [RewardSpec("classifier_logp", options={"classifier": f"{_HERE}.digits:reward_classifier"})],
        "accuracy": RewardSpec(f"{_HERE}.digits:DigitCorrect"),
        "second_scorer": RewardSpec("classifier_logp", options={"classifier": f"{_HERE}.digits:second_classifier"}),
    },
    "shapes": {
        "rewards": [RewardSpec(f"{_HERE}.checker:ShapesChecked", label="shapes_checked")],
        "accuracy": RewardSpec(f"{_HERE}.checker:ShapesChecked"),
        "second_scorer": RewardSpec(f"{_HERE}.checker:ShapesRedrawn"),
    },
    "prompts": {},
}


def parse(options: Mapping[str, Any]) -> ImageGenerationConfig:
    """The configuration in `options`, completed by the defaults of its kind of data.

    Raises ValueError in one line naming the key at fault and the nearest valid one.
    """
    config = sections.parse(ImageGenerationConfig, options, "image_generation")
    defaults = {key: value for key, value in DEFAULTS[config.data.kind].items() if key not in config.model_fields_set}
    config = config.model_copy(update=defaults)
    if not config.rewards:
        raise ValueError("rewards: at least one is needed; name it, such as [{name: clip_similarity}]")
    if config.accuracy is None:
        raise ValueError("accuracy: name the reward that evaluation reports, such as {name: clip_similarity}")
    return config
