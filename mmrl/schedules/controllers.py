"""Options that follow a metric: in proportion to it, or in stages."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from mmrl.schedules.schedule import Follower, Schedule, measured_metric
from mmrl.settings import option


class Proportional(Follower):
    """A value that is multiplied each step by a power of target / metric: a temperature that holds the entropy, for
    example."""

    equation: ClassVar[str] = "value clip((target / metric)^rate, 1 / (1 + most), 1 + most)"
    source: ClassVar[str] = (
        "temperature that follows the entropy, as E3-RL4LLMs and AceReason-Nemotron say; the control law is mmrl's own"
    )
    test: ClassVar[str] = "tests/schedules/test_controllers.py"
    type: str = "proportional"
    start: float = option(description="value of the first step", gt=0)
    target: float = option(description="target value of the metric", gt=0)
    rate: float = option(0.2, "exponent: how quickly the value follows the metric", gt=0)
    most: float = option(0.1, "largest relative change per step", gt=0)

    @property
    def extremes(self) -> tuple[float, float]:
        low, high = super().extremes
        return low or sys.float_info.min, high  # a product of positive factors does not reach 0

    def next_value(self, measured: float) -> float:
        factor = (self.target / max(measured, 1e-12)) ** self.rate  # a metric of 0 or below gives the largest change
        return self.value * min(max(factor, 1 / (1 + self.most)), 1 + self.most)


class Staircase(Schedule):
    """A list of values; the next one is taken once a metric has been beyond a bound for `patience` steps.

    Uses: longer responses once most are truncated, a higher temperature once the answers of a group are all equal.
    """

    equation: ClassVar[str] = (
        "values[stage]; stage + 1 after `patience` steps in a row with the metric above (below) the bound"
    )
    source: ClassVar[str] = (
        "stages of length and temperature that depend on metrics: progressive thinking suppression of Vision-R1, arXiv "
        "2503.06749; POLARIS"
    )
    test: ClassVar[str] = "tests/schedules/test_controllers.py"
    type: str = "staircase"
    values: tuple[float, ...] = option(description="value of each stage", min_length=1)
    metric: str = option(description="name of the metric, as written in metrics.jsonl")
    bound: float = option(description="bound that the metric must reach")
    when: Literal["above", "below"] = option("above", "above: at least the bound; below: at most the bound")
    patience: int = option(1, "consecutive steps before the next value is taken", unit="steps", ge=1)
    _stage: int = PrivateAttr(0)
    _reached: int = PrivateAttr(0)  # consecutive steps with the metric beyond the bound

    @property
    def value(self) -> float:
        return self.values[self._stage]

    @property
    def extremes(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the next value if the metric has been at the bound or beyond it for `patience` steps in a row."""
        measured = measured_metric(self.metric, metrics)
        reached = measured >= self.bound if self.when == "above" else measured <= self.bound
        self._reached = self._reached + 1 if reached and math.isfinite(measured) else 0
        if self._reached >= self.patience:
            self._stage, self._reached = min(self._stage + 1, len(self.values) - 1), 0

    def state(self) -> dict[str, Any]:
        return {"stage": self._stage, "reached": self._reached}

    def load(self, state: dict[str, Any]) -> None:
        self._stage, self._reached = int(state["stage"]), int(state["reached"])
