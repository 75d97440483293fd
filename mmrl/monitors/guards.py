"""Guards that act: a metric with a band, and what happens when it leaves it.

A reward that can be hacked is; what shows it is another metric. A guard watches one metric of every step (or of every
evaluation), and after `patience` steps in a row outside its band it acts: it says so, lowers the learning rate, goes
back to the last good checkpoint, or ends the run. Two more answers are parts of an algorithm: a KL coefficient of
type=band rises while a metric is outside (`mmrl.schedules.schedule`), and a mask of type=band leaves out the rollouts
that are.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from pydantic import model_validator

from mmrl.errors import UserError
from mmrl.settings import Choice, Section, option


class GuardedRun(Protocol):
    """The part of a run that a guard may act on."""

    def line(self, text: str) -> None:
        """Say something where the run's lines go."""

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate from now on."""

    def go_back(self) -> str:
        """Restore weights and optimizer of the newest checkpoint; returns where that was. Prompts go on as they were.
        Raises UserError where there is none."""


class Action(Choice):
    """An action that a guard takes."""

    title: ClassVar[str] = "what a guard does"
    kinds: ClassVar[dict[str, str]] = {
        "warn": "mmrl.monitors.guards:Warn",
        "lower_lr": "mmrl.monitors.guards:LowerLR",
        "restore": "mmrl.monitors.guards:Restore",
        "stop": "mmrl.monitors.guards:Stop",
    }
    test: ClassVar[str] = "tests/monitors/test_guards.py"

    @abstractmethod
    def act(self, run: GuardedRun, why: str) -> None:
        """why: which metric is where, in one line."""


class Warn(Action):
    """It says so, and the run goes on."""

    type: str = "warn"

    def act(self, run: GuardedRun, why: str) -> None:
        run.line(f"guard: {why}")


class LowerLR(Action):
    """The learning rate is multiplied by `factor` from then on."""

    type: str = "lower_lr"
    factor: float = option(0.5, "factor of the learning rate", gt=0, lt=1)

    def act(self, run: GuardedRun, why: str) -> None:
        run.scale_lr(self.factor)
        run.line(f"guard: {why}; the learning rate is multiplied by {self.factor:g}")


class Restore(Action):
    """The run goes back to the weights and the optimizer of the newest checkpoint, none of which is written while a
    metric is out of its band, and goes on with the next prompts and a lower learning rate."""

    type: str = "restore"
    factor: float = option(0.5, "of the learning rate afterwards", gt=0, le=1)

    def act(self, run: GuardedRun, why: str) -> None:
        where = run.go_back()
        run.scale_lr(self.factor)
        run.line(f"guard: {why}; back to {where}, with the learning rate multiplied by {self.factor:g}")


class Stop(Action):
    """The run ends with an error; its checkpoints stay."""

    type: str = "stop"

    def act(self, run: GuardedRun, why: str) -> None:
        raise UserError(f"guard: {why}; the run stops there, as guards says")


class Guard(Section):
    """A band that a metric shall stay in."""

    metric: str = option(description="name of the metric, as in metrics.jsonl: guard/sharpness, evaluation/accuracy")
    low: float = option(-math.inf, "least good value")
    high: float = option(math.inf, "largest good value")
    patience: int = option(1, "measurements in a row outside the band before it acts", ge=1)
    action: Action = option(Warn(), "action of the guard")

    @model_validator(mode="after")
    def _band(self) -> Guard:
        if self.low == -math.inf and self.high == math.inf:
            raise ValueError(f"the guard of {self.metric} has no band: set low or high")
        if self.low > self.high:
            raise ValueError(f"the guard of {self.metric} has low={self.low:g} above high={self.high:g}")
        return self

    def outside(self, value: float) -> bool:
        return math.isfinite(value) and not self.low <= value <= self.high


class Guards:
    """All guards of a run. Metrics are equal on all ranks, so all of them act alike."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self.guards = list(guards)
        self.outside = [0] * len(self.guards)  # measurements in a row

    @property
    def within(self) -> bool:
        """Returns whether no metric was out of its band when it was last measured."""
        return not any(self.outside)

    def judge(self, metrics: Mapping[str, float], run: GuardedRun, *, evaluation: bool = False) -> dict[str, float]:
        """Acts where a guard has to; returns how long each metric has been outside, for the metrics of the step.

        Raises UserError for a metric that the step (or, under evaluation/, the evaluation) does not have, and as an
        action does.
        """
        for index, guard in enumerate(self.guards):
            if guard.metric.startswith("evaluation/") != evaluation:
                continue
            if guard.metric not in metrics:
                known = ", ".join(sorted(name for name in metrics if not name.startswith("time/")))
                raise UserError(
                    f"guards.{index}: metric {guard.metric!r} is not a metric of this job, which has {known}"
                )
            value = metrics[guard.metric]
            self.outside[index] = self.outside[index] + 1 if guard.outside(value) else 0
            if self.outside[index] and self.outside[index] % guard.patience == 0:
                guard.action.act(run, f"{guard.metric} is {value:.4g}, outside {guard.low:g} to {guard.high:g}")
        return {f"outside/{guard.metric}": float(n) for guard, n in zip(self.guards, self.outside, strict=True)}

    def state(self) -> list[int]:
        return list(self.outside)

    def load(self, state: Any) -> None:
        self.outside = list(state)
