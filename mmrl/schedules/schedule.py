"""Options whose value may change during a run: constants, schedules over steps, and controllers that follow a metric.

In the YAML, such an option is a number, or a mapping whose `type` says how it changes. `value` is its current value.
The trainer updates all of them once per step, from metrics that are equal on all ranks. It saves their state in
checkpoints and logs their values as `control/<key>`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from mmrl.errors import UserError
from mmrl.settings import Choice, Section, option, sections_in


class Schedule(Choice):
    """An option with a current value that may change from step to step."""

    title: ClassVar[str] = "control"
    kinds: ClassVar[dict[str, str]] = {
        "constant": "mmrl.schedules.schedule:Constant",
        "linear": "mmrl.schedules.schedule:Linear",
        "cosine": "mmrl.schedules.schedule:Cosine",
        "stages": "mmrl.schedules.schedule:Stages",
        "adaptive": "mmrl.schedules.schedule:Adaptive",
        "additive": "mmrl.schedules.schedule:Additive",
        "multiplier": "mmrl.schedules.schedule:Multiplier",
        "proportional": "mmrl.schedules.controllers:Proportional",
        "staircase": "mmrl.schedules.controllers:Staircase",
        "band": "mmrl.schedules.schedule:Band",
    }
    test: ClassVar[str] = "tests/schedules/test_schedule.py"
    of_numbers: ClassVar[bool] = True

    @property
    @abstractmethod
    def value(self) -> float:
        """Returns the current value."""

    @property
    @abstractmethod
    def extremes(self) -> tuple[float, float]:
        """Returns the smallest and the largest value that this option can take during a run."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the value after a step.

        step: number of finished steps; metrics: those of the last step, over all ranks. Raises UserError if the metric
        that this option follows is not among them.
        """

    def state(self) -> dict[str, float]:
        """Returns the state that a checkpoint saves, numbers by name."""
        return {}

    def load(self, state: dict[str, float]) -> None:
        """Restores a state that `state` returned."""

    def check(self, ge: float = -math.inf, gt: float = -math.inf, le: float = math.inf, lt: float = math.inf) -> None:
        """Raises ValueError if the smallest or the largest value violates a bound (>=, >, <=, <)."""
        low, high = self.extremes
        if low < ge or low <= gt:
            raise ValueError(f"must be {'above' if gt >= ge else 'at least'} {max(ge, gt):g} (got {low:g})")
        if high > le or high >= lt < math.inf:  # without a bound lt, `high` may be infinite
            raise ValueError(f"must be {'below' if lt <= le else 'at most'} {min(le, lt):g} (got {high:g})")


def number(default: float, description: str, *, unit: str | None = None, **bounds: float) -> Any:
    """Returns a pydantic field for a `Schedule` option whose default is the constant `default`.

    bounds: ge, gt, le or lt, which every value that the schedule can take must satisfy.
    """
    extra: dict[str, Any] = {"bounds": bounds} | ({} if unit is None else {"unit": unit})
    return Field(constant(default), description=description, json_schema_extra=extra)


def constant(value: float) -> Constant:
    """Returns a schedule that always has this value."""
    return Constant(type="constant", number=value)


class Constant(Schedule):
    """A value that does not change."""

    type: str = "constant"
    number: int | float = option(description="the value")

    @property
    def value(self) -> float:
        return self.number

    @property
    def extremes(self) -> tuple[float, float]:
        return self.number, self.number


class Linear(Schedule):
    """Linear interpolation from `start` to `end` over `steps` steps, then constant."""

    equation: ClassVar[str] = "start + (end - start) min(1, step / steps)"
    type: str = "linear"
    start: float = option(description="value of the first step")
    end: float = option(description="value after `steps` steps")
    steps: int = option(description="steps from start to end", unit="steps", ge=1)
    _step: int = PrivateAttr(0)

    @property
    def value(self) -> float:
        return self.start + (self.end - self.start) * self._interpolate(min(1.0, self._step / self.steps))

    def _interpolate(self, progress: float) -> float:
        """Returns the position between start (0) and end (1) after this fraction of the steps."""
        return progress

    @property
    def extremes(self) -> tuple[float, float]:
        return min(self.start, self.end), max(self.start, self.end)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step

    def state(self) -> dict[str, float]:
        return {"step": self._step}

    def load(self, state: dict[str, float]) -> None:
        self._step = int(state["step"])


class Cosine(Linear):
    """Cosine interpolation from `start` to `end` over `steps` steps, then constant."""

    equation: ClassVar[str] = "start + (end - start) (1 - cos(pi min(1, step / steps))) / 2"
    type: str = "cosine"

    def _interpolate(self, progress: float) -> float:
        return (1 - math.cos(math.pi * progress)) / 2


class Stages(Schedule):
    """A piecewise constant value: values[i] from step starts[i] on; starts[0] is 0."""

    type: str = "stages"
    starts: tuple[int, ...] = option(description="first step of each stage, increasing from 0", unit="steps")
    values: tuple[float, ...] = option(description="value of each stage")
    _step: int = PrivateAttr(0)

    def model_post_init(self, context: Any) -> None:
        if not self.starts or self.starts[0] != 0 or any(b <= a for a, b in zip(self.starts, self.starts[1:])):  # noqa: B905
            raise ValueError(f"starts must begin with 0 and increase, got {list(self.starts)}")
        if len(self.starts) != len(self.values):
            raise ValueError(
                f"starts has {len(self.starts)} entries and values has {len(self.values)}; give one of each per stage"
            )

    @property
    def value(self) -> float:
        return self.values[sum(start <= self._step for start in self.starts) - 1]

    @property
    def extremes(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step

    def state(self) -> dict[str, float]:
        return {"step": self._step}

    def load(self, state: dict[str, float]) -> None:
        self._step = int(state["step"])


class Follower(Schedule):
    """A controller that updates its value after each step from a metric of that step."""

    start: float = option(description="value of the first step")
    metric: str = option(description="name of the metric that the value follows, as written in metrics.jsonl")
    target: float = option(description="target value of the metric")
    low: float = option(0.0, "smallest value")
    high: float = option(math.inf, "largest value; .inf: no limit", allow_inf_nan=True)
    _value: float | None = PrivateAttr(None)  # None before the first update

    @property
    def value(self) -> float:
        return self.start if self._value is None else self._value

    @property
    def extremes(self) -> tuple[float, float]:
        return min(self.low, self.start), max(self.high, self.start)

    def check(self, ge: float = -math.inf, gt: float = -math.inf, le: float = math.inf, lt: float = math.inf) -> None:
        """Raises ValueError like `Schedule.check`, and names the option, low or high, that limits the value."""
        try:
            super().check(ge, gt, le, lt)
        except ValueError as error:
            low, _ = self.extremes
            key = "low" if low < ge or low <= gt else "high"
            raise ValueError(f"{error}; set `{key}`, which limits the value") from None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        measured = measured_metric(self.metric, metrics)
        if math.isfinite(measured):
            self._value = min(max(self.next_value(measured), self.low), self.high)

    @abstractmethod
    def next_value(self, measured: float) -> float:
        """Returns the next value, before it is clamped to low..high. measured: the metric of the last step, finite."""

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load(self, state: dict[str, float]) -> None:
        self._value = state["value"]


class Adaptive(Follower):
    """A coefficient that grows while the metric is above its target and shrinks while it is below: of a KL penalty, for
    example."""

    equation: ClassVar[str] = "value (1 + rate clip(metric / target - 1, -0.2, 0.2))"
    source: ClassVar[str] = "Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with rate = rollouts / horizon"
    type: str = "adaptive"
    start: float = option(description="value of the first step", gt=0)
    target: float = option(description="target value of the metric", gt=0)
    rate: float = option(0.1, "gain; 0.2 x rate is the largest relative change per step", gt=0)

    def next_value(self, measured: float) -> float:
        return self.value * (1 + self.rate * min(max(measured / self.target - 1, -0.2), 0.2))


class Additive(Follower):
    """A coefficient that grows by `rate` per step while the metric is below its target, and shrinks by `rate` while it
    is above: of an entropy bonus, for example."""

    equation: ClassVar[str] = "value + rate sign(target - metric)"
    source: ClassVar[str] = "Skywork-OR1's adaptive entropy control, arXiv 2505.22312"
    type: str = "additive"
    rate: float = option(description="change per step", gt=0)

    def next_value(self, measured: float) -> float:
        return self.value + self.rate * ((measured < self.target) - (measured > self.target))


class Multiplier(Follower):
    """A Lagrange multiplier of the constraint metric <= target, by a PID controller on the violation."""

    equation: ClassVar[str] = "max(0, start + k_p e + k_i sum(e) + k_d max(0, e - previous e)), e = metric - target"
    source: ClassVar[str] = "Stooke et al. 2020, arXiv 2007.03964; with k_i alone it is dual ascent"
    type: str = "multiplier"
    start: float = option(0.0, "value of the first step", ge=0)
    k_p: float = option(0.0, "proportional gain: of the violation", ge=0)
    k_i: float = option(0.01, "integral gain: of the sum of violations over the steps, kept at 0 or above", ge=0)
    k_d: float = option(0.0, "derivative gain: of the increase of the violation", ge=0)
    _total: float = PrivateAttr(0.0)  # sum of violations
    _previous: float = PrivateAttr(0.0)  # violation of the last step

    def next_value(self, measured: float) -> float:
        """Returns start + k_p e + k_i sum(e) + k_d x the increase of e, at least 0, for the violation e = metric -
        target. The sum never falls below 0."""
        error = measured - self.target
        increase, self._previous = max(0.0, error - self._previous), error
        self._total = max(0.0, self._total + error)
        return max(0.0, self.start + self.k_p * error + self.k_i * self._total + self.k_d * increase)

    def state(self) -> dict[str, float]:
        return {"value": self.value, "total": self._total, "before": self._previous}

    def load(self, state: dict[str, float]) -> None:
        self._value, self._total, self._previous = state["value"], state["total"], state["before"]


class Band(Schedule):
    """A coefficient that is multiplied by `factor` after each step whose metric is outside low..high, and divided by
    `factor`, down to `start`, after each step whose metric is inside: a guard that raises the KL penalty, for
    example."""

    equation: ClassVar[str] = "value factor outside low..high, else max(start, value / factor)"
    type: str = "band"
    start: float = option(description="smallest value, kept while the metric is in its band", gt=0)
    most: float = option(description="largest value", gt=0)
    metric: str = option(description="name of the metric, as written in metrics.jsonl")
    low: float = option(-math.inf, "lower bound of the metric's band")
    high: float = option(math.inf, "upper bound of the metric's band")
    factor: float = option(2.0, "change per step", gt=1)
    _value: float | None = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}; lower low, or raise high")
        if (self.low, self.high) == (-math.inf, math.inf):
            raise ValueError("neither low nor high is set; set one or both")
        if self.most < self.start:
            raise ValueError(f"most={self.most:g} is below start={self.start:g}; raise most or lower start")

    @property
    def value(self) -> float:
        return self.start if self._value is None else self._value

    @property
    def extremes(self) -> tuple[float, float]:
        return self.start, self.most

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Multiplies the value by `factor` if the metric is outside low..high, else divides it, within start..most."""
        measured = measured_metric(self.metric, metrics)
        if math.isfinite(measured):
            if self.low <= measured <= self.high:
                self._value = max(self.start, self.value / self.factor)
            else:
                self._value = min(self.value * self.factor, self.most)

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load(self, state: dict[str, float]) -> None:
        self._value = state["value"]


def measured_metric(name: str, metrics: Mapping[str, float]) -> float:
    """Returns a metric of the step. Raises UserError, which lists the known metrics, if it does not exist."""
    if name not in metrics:
        known = ", ".join(sorted(metric for metric in metrics if not metric.startswith(("time/", "control/"))))
        raise UserError(f"metric {name!r} is not a metric of this job; choose one of {known}")
    return metrics[name]


class Schedules:
    """All options of a job whose value can change during the run, by their keys."""

    def __init__(self, config: Section) -> None:
        schedules = sections_in(config, Schedule)
        self._changing = {key: schedule for key, schedule in schedules if not isinstance(schedule, Constant)}

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates all values after a step; see `Schedule.update` for the arguments.

        Raises UserError, which names the key, if the metric that an option follows does not exist.
        """
        for key, schedule in self._changing.items():
            try:
                schedule.update(step, metrics)
            except UserError as error:
                raise UserError(f"{key}: {error}") from None

    def values(self) -> dict[str, float]:
        """Returns the current values as metrics, `control/<key>`."""
        return {f"control/{key}": schedule.value for key, schedule in self._changing.items()}

    def state(self) -> dict[str, dict[str, float]]:
        """Returns the states of all options for a checkpoint, by key."""
        return {key: schedule.state() for key, schedule in self._changing.items()}

    def load(self, state: Mapping[str, dict[str, float]]) -> None:
        """Restores states that `state` returned."""
        for key, schedule in self._changing.items():
            schedule.load(state[key])
