"""Settings of a reward."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, Literal

from pydantic import field_validator

from mmrl.children.limits import Limits
from mmrl.settings import Section, option


def path_of(target: object) -> str:
    """Returns 'module:name' of a function or class. Raises ValueError for one that can not be found by it."""
    if not isinstance(target, type | FunctionType):
        raise ValueError(
            f"a {type(target).__name__} has no name; give the function or class that makes it, or put it in the place "
            "of a reward with job.task.rewards.replace(name, reward)"
        )
    name = target.__qualname__
    if vars(sys.modules[target.__module__]).get(name) is not target:
        raise ValueError(f"{name} is not at the top of its module, where a run that resumes would find it")
    return f"{target.__module__}:{name}"


class RewardSpec(Section):
    """One component of a task's reward, of its evaluation or of its guards."""

    name: str = option(
        description="of `mmrl.rewards.REWARDS`, or a custom one as package.module:function or package.module:Class"
    )
    weight: float = option(1.0, "weight of the reward; 0: it is logged and not trained on", allow_inf_nan=False)
    options: dict[str, Any] = option({}, "options of the reward")
    signature: Literal["mmrl", "trl", "trl_text", "verl", "easyr1"] = option(
        "mmrl",
        "of a custom reward. mmrl: f(sample); trl: f(completions, **columns), completions as lists of one message; "
        "trl_text: the same, as strings; verl: compute_score(data_source, solution_str, ground_truth, extra_info); "
        "easyr1: compute_score(reward_inputs)",
    )
    label: str | None = option(None, "name of its column, where one reward is used twice; default: its name")
    total: Literal["sum", "mean", "min"] = option(
        "mean", "of the values of spans, where the reward returns spans without a total: the rollout's number"
    )
    where: dict[str, Any] = option(
        {},
        "prompts it is for: keys of their metadata and the values these have; others get `elsewhere`",
    )
    elsewhere: float | None = option(
        None,
        "value on prompts that it is not for; null: 0, or 1 where it is a gate of algorithm.components, which so stays "
        "open for them",
        allow_inf_nan=False,
    )
    isolated: bool | None = option(
        None, "run it in separate processes; default: those that are known to hang, such as math"
    )
    deadline_s: float | None = option(
        None,
        "the longest that an isolated reward may take for a sample (default 5), or a custom one in this process "
        "for a call, which is a sample (60) or a batch (600)",
        unit="s",
        gt=0,
    )
    on_timeout: Literal["unscored", "lowest"] = option(
        "unscored",
        "what a sample counts that was not scored in time. unscored: it leaves its group's statistics and is neither "
        "rewarded nor punished; lowest: the lowest score of a verifier, 0 (-1 for box_giou and overlong_penalty), so "
        "that nothing is gained by an answer that takes for ever to check",
    )
    max_timeouts: int | None = option(
        None,
        "calls of a batch that may take too long. After so many the rest of the batch is not tried and counts as "
        "on_timeout says, with one warning, so that a batch that hangs costs max_timeouts x deadline_s / workers. "
        "Default: 32 of an isolated reward, 4 of a custom one in this process",
        ge=1,
    )
    workers: int | None = option(None, "processes of an isolated reward; default: 2", ge=1)
    limits: Limits | None = option(None, "limits of each process")
    batch_size: int | None = option(
        None, "samples that a batched reward gets at once; default: all of them", unit="samples", ge=1
    )

    @field_validator("name", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """A function or class of a program stands for its name, by which a run that resumes finds it again."""
        return value if value is None or isinstance(value, str | int | float | list | dict) else path_of(value)

    @property
    def column(self) -> str:
        return self.label or self.name
