"""Options of the manipulation task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mmrl import sections
from mmrl.rewards import RewardSpec


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Demonstrations(_Section):
    """What algorithm.method=supervised learns from: episodes of the simulator's scripted expert, or a data set."""

    episodes: int | None = Field(default=None, ge=1)  # None: 200 of each task, or all of the data set; else the first
    # --- of the scripted expert ---
    noise: float = Field(default=0.0, ge=0)  # std of what is added to executed actions, not to those that are shown
    successful: bool = True  # leave out episodes that fail
    # --- of a data set ---
    lerobot: str | None = None  # a folder in LeRobot's format, 2.0 to 3.0
    camera: str | None = None  # a feature; None: the only camera
    state: str = "observation.state"  # a feature
    action: str = "action"  # a feature
    memory: float = Field(default=4.0, ge=0)  # GiB: if its pictures need more, they are decoded each time they are seen

    @model_validator(mode="after")
    def _one_source(self) -> Demonstrations:
        of_one = {"noise", "successful"} if self.lerobot else {"camera", "state", "action", "memory"}
        if unused := sorted(of_one & self.model_fields_set):
            raise ValueError(f"{unused[0]} is for the {'scripted expert' if self.lerobot else 'data set in lerobot'}")
        return self


class ManipulationConfig(_Section):
    """Which simulator, which of its tasks, and what an episode earns.

    Training episodes start from seeds that follow the run's seed, held-out ones from `eval_seed` on; they never meet.
    `instructions: shuffled` gives every episode the instruction of another one, to see whether a policy listens.
    """

    simulator: str = "tabletop"
    options: dict[str, Any] = {}  # of the simulator
    tasks: tuple[str, ...] = Field(default=("reach",), min_length=1)
    rows: int = Field(default=128, ge=1)  # environments at once on a rank
    workers: int = Field(default=0, ge=0)  # processes of their own for the simulator; 0: in this one
    ray: str | None = None  # of the workers: on hosts of this Ray cluster, HOST:PORT of its head, or auto; None: here
    turns: int = Field(default=1, ge=1)  # of the workers: one share moves while the policy acts for another
    deadline_s: float = Field(default=120.0, gt=0)  # after which a silent worker is replaced and its episodes are lost
    train_size: int = Field(default=1_000_000, ge=1)  # start states
    eval_size: int = Field(default=500, ge=1)
    eval_seed: int = Field(default=0, ge=0, lt=1_000_000)
    instructions: Literal["own", "shuffled"] = "own"
    demonstrations: Demonstrations | None = None
    rewards: list[RewardSpec] = [RewardSpec("tasks.manipulation.rewards:success", label="success")]

    @model_validator(mode="after")
    def _of_workers(self) -> ManipulationConfig:
        if self.ray is not None and self.workers == 0:
            raise ValueError(f"ray={self.ray} places workers; workers=0")
        if self.turns > max(self.workers, 1):
            raise ValueError(f"turns={self.turns} needs as many workers; workers={self.workers}")
        return self


def parse(options: Mapping[str, Any]) -> ManipulationConfig:
    """The configuration in `options`; ValueError in one line naming the key at fault and the nearest valid one."""
    return sections.parse(ManipulationConfig, options, "manipulation")
