"""Settings of a reward."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, Literal

from pydantic import field_validator

from mmrl.children.limits import Limits
from mmrl.settings import Section, option


def path_of(target: object) -> str:
    """Returns 'module:name' of a function or class. Raises ValueError for an object that cannot be imported by that
    path."""
    if not isinstance(target, type | FunctionType):
        raise ValueError(
            f"a {type(target).__name__} cannot be a reward's name; give a function or class, or replace a reward of "
            "the job with job.task.rewards.replace(name, reward)"
        )
    name = target.__qualname__
    if vars(sys.modules[target.__module__]).get(name) is not target:
        raise ValueError(
            f"{name} is not at the top level of its module, where a resumed run would find it; move it there"
        )
    return f"{target.__module__}:{name}"


class RewardSpec(Section):
    """One component of a task's reward, of its evaluation or of its guards."""

    name: str = option(
        description="a shipped reward (see `mmrl methods`), or package.module:function or package.module:Class"
    )
    weight: float = option(1.0, "weight of the reward; 0: it is logged and not trained on", allow_inf_nan=False)
    options: dict[str, Any] = option({}, "options of the reward")
    signature: Literal["mmrl", "trl", "trl_text", "verl", "easyr1"] = option(
        "mmrl",
        "signature of a custom reward. mmrl: f(sample); trl: f(completions, **columns), completions as lists of one "
        "message; trl_text: the same, as strings; verl: compute_score(data_source, solution_str, ground_truth, "
        "extra_info); easyr1: compute_score(reward_inputs)",
    )
    label: str | None = option(None, "name of its column, where one reward is used twice; default: its name")
    total: Literal["sum", "mean", "min"] = option(
        "mean", "how the values of spans become the rollout's reward, if the reward returns spans without a total"
    )
    where: dict[str, Any] = option(
        {},
        "the prompts that it applies to, as keys of their metadata with values; others get `elsewhere`",
    )
    elsewhere: float | None = option(
        None,
        "value for prompts that it does not apply to; null: 0, or 1 if it is a gate of algorithm.components, which "
        "then stays open for them",
        allow_inf_nan=False,
    )
    isolated: bool | None = option(
        None, "run it in separate processes; default: only for rewards that are known to hang, such as math"
    )
    python: str | None = option(
        None,
        "Python interpreter of another environment, whose process runs the reward, such as those that `mmrl rewards "
        "install` makes; default: the interpreter of the trainer",
    )
    deadline_s: float | None = option(
        None,
        "time limit: for a sample of an isolated reward (default 5), for a batch of a reward with `python` (default "
        "600), or for a call of a custom reward in this process, which is a sample (default 60) or a batch (default "
        "600)",
        unit="s",
        gt=0,
    )
    on_timeout: Literal["unscored", "lowest"] = option(
        "unscored",
        "score of a sample that was not scored in time. unscored: it is left out of its group's statistics and neither "
        "rewarded nor punished; lowest: the lowest score of a verifier, 0 (-1 for box_giou, overlong_penalty and "
        "abstention), so that nothing is gained by an answer that takes very long to check",
    )
    max_timeouts: int | None = option(
        None,
        "calls of a batch that may time out. After that many, the rest of the batch is not tried and gets the score "
        "of on_timeout, with one warning. So a batch that hangs costs max_timeouts x deadline_s / workers. Default: "
        "32 for an isolated reward, 4 for a custom one in this process",
        ge=1,
    )
    workers: int | None = option(None, "processes of an isolated reward; default: 2", ge=1)
    limits: Limits | None = option(None, "limits of each process")
    batch_size: int | None = option(
        None, "samples that a batched reward gets in one call; default: all of them", unit="samples", ge=1
    )

    @field_validator("name", mode="before")
    @classmethod
    def _as_path(cls, value: object) -> object:
        """Converts a function or class to its import path, by which a resumed run finds it again."""
        return value if value is None or isinstance(value, str | int | float | list | dict) else path_of(value)

    @property
    def column(self) -> str:
        return self.label or self.name
