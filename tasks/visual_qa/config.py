"""Options of the visual QA task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmrl import sections
from mmrl.rewards import RewardSpec
from tasks.visual_qa.digits import KINDS


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DigitsData(_Section):
    """Canvases of handwritten digits; training rows follow the run's seed, held-out rows only `eval_seed`."""

    kind: Literal["digits"] = "digits"
    train_size: int = Field(default=20_000, ge=1)
    eval_size: int = Field(default=500, ge=1)
    eval_seed: int = Field(default=0, ge=0)
    kinds: tuple[str, ...] = KINDS
    cells: int = 3
    scale: int = 1
    jitter: int = 0
    careless: float = Field(default=0.0, ge=0, le=1)  # share of training demonstrations whose number is one too high


class _Rows(_Section):
    image_field: str = "images"
    problem_field: str = "problem"
    answer_field: str = "answer"
    image_root: Path | None = None
    max_bad_share: float = Field(default=0.01, ge=0, le=1)
    check_rows: bool = True  # read every row once before the run


class FilesData(_Rows):
    """The user's own .jsonl or .parquet files; without `train` the task can only be evaluated."""

    kind: Literal["files"]
    train: Path | None = None
    eval: Path


class HuggingFaceData(_Rows):
    """Two splits of one dataset; `options` go to `datasets.load_dataset`."""

    kind: Literal["huggingface"]
    name: str
    train_split: str | None = "train"
    eval_split: str = "test"
    options: dict[str, Any] = {}


class VisualQAConfig(_Section):
    """Where the questions come from, how they are put, and what a response earns.

    `instruction` is appended to each problem on a line of its own; `system` becomes the system message. `accuracy` is
    the verifier that evaluation reports, whatever the rewards are.
    """

    data: Annotated[DigitsData | FilesData | HuggingFaceData, Field(discriminator="kind")] = DigitsData(kind="digits")
    rewards: list[RewardSpec] = [RewardSpec("exact_match")]
    accuracy: RewardSpec = RewardSpec("exact_match")
    instruction: str | None = None
    system: str | None = None


def parse(options: Mapping[str, Any]) -> VisualQAConfig:
    """The configuration in `options`; ValueError in one line naming the key at fault and the nearest valid one."""
    return sections.parse(VisualQAConfig, options, "visual_qa")
