"""Guards against reward hacking: each watches a metric and acts when the metric leaves its band.

A guard reads one metric of every step, or of every evaluation. After `patience` consecutive values outside low..high it
acts: it prints a warning, lowers the learning rate, restores the newest checkpoint, or stops the run. Related options
of an algorithm: a coefficient of type=band grows while a metric is outside its band (`mmrl.schedules.schedule`), and a
mask of type=band excludes rollouts.
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
    """The interface of a run that guards use; `mmrl.trainer.Trainer` implements it."""

    def line(self, text: str) -> None:
        """Prints a line to the run's output."""

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rate of all later steps."""

    def go_back(self) -> str:
        """Restores weights and optimizer of the newest checkpoint, but not the position in the prompts.

        Returns a description of the checkpoint. Raises UserError if there is none.
        """


class Action(Choice):
    """An action that a guard takes."""

    title: ClassVar[str] = "action of a guard"
    kinds: ClassVar[dict[str, str]] = {
        "warn": "mmrl.monitors.guards:Warn",
        "lower_lr": "mmrl.monitors.guards:LowerLR",
        "restore": "mmrl.monitors.guards:Restore",
        "stop": "mmrl.monitors.guards:Stop",
    }
    test: ClassVar[str] = "tests/monitors/test_guards.py"

    @abstractmethod
    def act(self, run: GuardedRun, reason: str) -> None:
        """Acts on the run. reason: one line with the metric, its value and its band."""


class Warn(Action):
    """Prints a warning; the run continues."""

    type: str = "warn"

    def act(self, run: GuardedRun, reason: str) -> None:
        run.line(f"guard: {reason}")


class LowerLR(Action):
    """Multiplies the learning rate of all later steps by `factor`."""

    type: str = "lower_lr"
    factor: float = option(0.5, "factor of the learning rate", gt=0, lt=1)

    def act(self, run: GuardedRun, reason: str) -> None:
        run.scale_lr(self.factor)
        run.line(f"guard: {reason}; the learning rate is multiplied by {self.factor:g}")


class Restore(Action):
    """Restores the weights and the optimizer of the newest checkpoint, and multiplies the learning rate by `factor`.

    The run continues with the next prompts. No checkpoint is written while a metric is outside its band.
    """

    type: str = "restore"
    factor: float = option(0.5, "factor of the learning rate afterwards", gt=0, le=1)

    def act(self, run: GuardedRun, reason: str) -> None:
        checkpoint = run.go_back()
        run.scale_lr(self.factor)
        run.line(
            f"guard: {reason}; the run goes back to {checkpoint}, with the learning rate multiplied by {self.factor:g}"
        )


class Stop(Action):
    """Stops the run with an error; its checkpoints are kept."""

    type: str = "stop"

    def act(self, run: GuardedRun, reason: str) -> None:
        raise UserError(f"guard: {reason}; the run stops, since action=stop is set for this guard")


class Guard(Section):
    """A metric, the band that it should stay in, and the action if it does not."""

    metric: str = option(description="name in metrics.jsonl, such as guard/sharpness or evaluation/accuracy")
    low: float = option(-math.inf, "lower bound of the band")
    high: float = option(math.inf, "upper bound of the band")
    patience: int = option(1, "consecutive values outside the band before it acts", ge=1)
    action: Action = option(Warn(), "action to take")

    @model_validator(mode="after")
    def _check_band(self) -> Guard:
        if self.low == -math.inf and self.high == math.inf:
            raise ValueError(f"the guard of {self.metric} has no band: set low or high")
        if self.low > self.high:
            raise ValueError(
                f"the guard of {self.metric} has low={self.low:g} above high={self.high:g}; lower low or raise high"
            )
        return self

    def is_outside(self, value: float) -> bool:
        """Returns whether a finite value is outside the band; NaN and inf never are."""
        return math.isfinite(value) and not self.low <= value <= self.high


class Guards:
    """All guards of a run. Metrics are equal on all ranks, so all ranks act the same."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self.guards = list(guards)
        self.outside = [0] * len(self.guards)  # consecutive values outside the band, per guard

    @property
    def all_in_band(self) -> bool:
        """Returns whether the latest value of every metric was in its band."""
        return not any(self.outside)

    def judge(self, metrics: Mapping[str, float], run: GuardedRun, *, evaluation: bool = False) -> dict[str, float]:
        """Checks new metrics, and takes the action of each guard whose metric has left its band.

        metrics: those of a step, or of an evaluation if `evaluation` is set; only guards of such metrics are checked.
        Returns `outside/<metric>`, the number of consecutive values outside the band, for the metrics of the step.

        Raises UserError if a guard's metric does not exist, or if an action stops the run.
        """
        for index, guard in enumerate(self.guards):
            if guard.metric.startswith("evaluation/") != evaluation:
                continue
            if guard.metric not in metrics:
                known = ", ".join(sorted(name for name in metrics if not name.startswith("time/")))
                raise UserError(
                    f"guards.{index}: metric {guard.metric!r} is not a metric of this job; choose one of {known}"
                )
            value = metrics[guard.metric]
            self.outside[index] = self.outside[index] + 1 if guard.is_outside(value) else 0
            # the guard acts again after each further `patience` values outside the band
            if self.outside[index] and self.outside[index] % guard.patience == 0:
                guard.action.act(run, f"{guard.metric} is {value:.4g}, outside {guard.low:g} to {guard.high:g}")
        return {f"outside/{guard.metric}": float(n) for guard, n in zip(self.guards, self.outside, strict=True)}

    def state(self) -> list[int]:
        return list(self.outside)

    def load(self, state: Any) -> None:
        self.outside = list(state)
