"""Numbers that may change while a run goes on: constants, schedules, and controllers that follow a metric.

A setting that is a `Schedule` is written as a number, or as a mapping whose `type` says how it changes. Its `value` is
what holds now. The trainer updates all controls of a job once a step, from metrics that are equal on all ranks, keeps
their state in checkpoints and reports their values as `control/<key>`.
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
    """A number with a value of the moment."""

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
    def value(self) -> float: ...

    @property
    @abstractmethod
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest value that it can take."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """step: finished steps. metrics: of the last of them, over all ranks. Raises UserError if the metric that it
        follows is not among them."""

    def state(self) -> dict[str, float]:
        return {}

    def load(self, state: dict[str, float]) -> None:
        pass

    def check(self, ge: float = -math.inf, gt: float = -math.inf, le: float = math.inf, lt: float = math.inf) -> None:
        """Raises ValueError where a value that it can take is out of bounds."""
        low, high = self.extremes
        if low < ge or low <= gt:
            raise ValueError(f"must be {'above' if gt >= ge else 'at least'} {max(ge, gt):g} (got {low:g})")
        if high > le or high >= lt < math.inf:
            raise ValueError(f"must be {'below' if lt <= le else 'at most'} {min(le, lt):g} (got {high:g})")


def number(default: float, description: str, *, unit: str | None = None, **bounds: float) -> Any:
    """A key that holds a `Schedule`, by default a constant."""
    extra: dict[str, Any] = {"bounds": bounds} | ({} if unit is None else {"unit": unit})
    return Field(constant(default), description=description, json_schema_extra=extra)


def constant(value: float) -> Constant:
    return Constant(type="constant", number=value)


class Constant(Schedule):
    """It stays as it is."""

    type: str = "constant"
    number: int | float = option(description="what it is")

    @property
    def value(self) -> float:
        return self.number

    @property
    def extremes(self) -> tuple[float, float]:
        return self.number, self.number


class Linear(Schedule):
    """It goes from `start` to `end` in a straight line over `steps` steps, and stays there."""

    equation: ClassVar[str] = "start + (end - start) min(1, step / steps)"
    type: str = "linear"
    start: float = option(description="value of the first step")
    end: float = option(description="value after `steps` steps")
    steps: int = option(description="how long it takes", unit="steps", ge=1)
    _step: int = PrivateAttr(0)

    @property
    def value(self) -> float:
        return self.start + (self.end - self.start) * self._share(min(1.0, self._step / self.steps))

    def _share(self, passed: float) -> float:
        return passed

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
    """It goes from `start` to `end` along half a cosine over `steps` steps, and stays there."""

    equation: ClassVar[str] = "start + (end - start) (1 - cos(pi min(1, step / steps))) / 2"
    type: str = "cosine"

    def _share(self, passed: float) -> float:
        return (1 - math.cos(math.pi * passed)) / 2


class Stages(Schedule):
    """It is values[i] from step starts[i] on; starts[0] is 0."""

    type: str = "stages"
    starts: tuple[int, ...] = option(description="steps at which a stage begins, rising from 0", unit="steps")
    values: tuple[float, ...] = option(description="value of each stage")
    _step: int = PrivateAttr(0)

    def model_post_init(self, context: Any) -> None:
        if not self.starts or self.starts[0] != 0 or any(b <= a for a, b in zip(self.starts, self.starts[1:])):  # noqa: B905
            raise ValueError(f"starts must rise from 0, got {list(self.starts)}")
        if len(self.starts) != len(self.values):
            raise ValueError(f"{len(self.starts)} starts and {len(self.values)} values")

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
    """A controller that moves its value after each step, by a metric of that step."""

    start: float = option(description="value of the first step")
    metric: str = option(description="name of the metric that it follows, as it stands in metrics.jsonl")
    target: float = option(description="what the metric shall be")
    low: float = option(0.0, "smallest value")
    high: float = option(math.inf, "largest value; .inf: there is none", allow_inf_nan=True)
    _value: float | None = PrivateAttr(None)

    @property
    def value(self) -> float:
        return self.start if self._value is None else self._value

    @property
    def extremes(self) -> tuple[float, float]:
        return min(self.low, self.start), max(self.high, self.start)

    def check(self, ge: float = -math.inf, gt: float = -math.inf, le: float = math.inf, lt: float = math.inf) -> None:
        try:
            super().check(ge, gt, le, lt)
        except ValueError as error:
            low, _ = self.extremes
            raise ValueError(f"{error}; set `{'low' if low < ge or low <= gt else 'high'}`, its bound") from None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        measured = measured_metric(self.metric, metrics)
        if math.isfinite(measured):
            self._value = min(max(self.moved(measured), self.low), self.high)

    @abstractmethod
    def moved(self, measured: float) -> float:
        """The next value, before it is kept within its bounds."""

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load(self, state: dict[str, float]) -> None:
        self._value = state["value"]


class Adaptive(Follower):
    """A coefficient that grows while the metric is above its target and shrinks while it is below, such as that of a
    KL penalty."""

    equation: ClassVar[str] = "value (1 + rate clip(metric / target - 1, -0.2, 0.2))"
    source: ClassVar[str] = "Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with rate = rollouts / horizon"
    type: str = "adaptive"
    start: float = option(description="value of the first step", gt=0)
    target: float = option(description="what the metric shall be", gt=0)
    rate: float = option(0.1, "how quickly it follows; 0.2 x rate is the largest relative change a step", gt=0)

    def moved(self, measured: float) -> float:
        return self.value * (1 + self.rate * min(max(measured / self.target - 1, -0.2), 0.2))


class Additive(Follower):
    """A coefficient that grows by `rate` while the metric is below its target and shrinks by it while it is above, such
    as that of an entropy bonus."""

    equation: ClassVar[str] = "value + rate sign(target - metric)"
    source: ClassVar[str] = "Skywork-OR1's adaptive entropy control, arXiv 2505.22312"
    type: str = "additive"
    rate: float = option(description="change a step", gt=0)

    def moved(self, measured: float) -> float:
        return self.value + self.rate * ((measured < self.target) - (measured > self.target))


class Multiplier(Follower):
    """A dual variable: the price of a metric that is above its limit, by a PID controller on the violation."""

    equation: ClassVar[str] = "max(0, k_p e + k_i sum(e) + k_d max(0, e - e before)), e = metric - target"
    source: ClassVar[str] = "Stooke et al. 2020, arXiv 2007.03964; with k_i alone it is dual ascent"
    type: str = "multiplier"
    start: float = option(0.0, "value of the first step", ge=0)
    k_p: float = option(0.0, "gain of the violation itself", ge=0)
    k_i: float = option(0.01, "gain of its sum over the steps, which does not fall below 0", ge=0)
    k_d: float = option(0.0, "gain of its growth", ge=0)
    _total: float = PrivateAttr(0.0)
    _before: float = PrivateAttr(0.0)

    def moved(self, measured: float) -> float:
        error = measured - self.target
        growth, self._before = max(0.0, error - self._before), error
        self._total = max(0.0, self._total + error)
        return max(0.0, self.start + self.k_p * error + self.k_i * self._total + self.k_d * growth)

    def state(self) -> dict[str, float]:
        return {"value": self.value, "total": self._total, "before": self._before}

    def load(self, state: dict[str, float]) -> None:
        self._value, self._total, self._before = state["value"], state["total"], state["before"]


class Band(Schedule):
    """A coefficient that grows by `factor` after each step in which the metric was out of its band, and shrinks by it
    towards `start` after each other one: a guard that raises the KL penalty."""

    equation: ClassVar[str] = "value factor outside low..high, else max(start, value / factor)"
    type: str = "band"
    start: float = option(description="value while all is well", gt=0)
    most: float = option(description="largest value", gt=0)
    metric: str = option(description="name of the metric that it watches, as it stands in metrics.jsonl")
    low: float = option(-math.inf, "least good value of the metric")
    high: float = option(math.inf, "largest good value of the metric")
    factor: float = option(2.0, "change a step", gt=1)
    _value: float | None = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        if self.low > self.high or (self.low, self.high) == (-math.inf, math.inf):
            raise ValueError(f"low={self.low:g} and high={self.high:g} are not a band")
        if self.most < self.start:
            raise ValueError(f"most={self.most:g} is below start={self.start:g}")

    @property
    def value(self) -> float:
        return self.start if self._value is None else self._value

    @property
    def extremes(self) -> tuple[float, float]:
        return self.start, self.most

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        measured = measured_metric(self.metric, metrics)
        if math.isfinite(measured):
            outside = not self.low <= measured <= self.high
            self._value = (
                min(self.value * self.factor, self.most) if outside else max(self.start, self.value / self.factor)
            )

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load(self, state: dict[str, float]) -> None:
        self._value = state["value"]


def measured_metric(name: str, metrics: Mapping[str, float]) -> float:
    """Raises UserError naming the metrics that there are."""
    if name not in metrics:
        known = ", ".join(sorted(other for other in metrics if not other.startswith(("time/", "control/"))))
        raise UserError(f"metric {name!r} is not a metric of this job, which has {known}")
    return metrics[name]


class Schedules:
    """All controls of a job that can change, by their keys."""

    def __init__(self, config: Section) -> None:
        controls = sections_in(config, Schedule)
        self._moving = {key: control for key, control in controls if not isinstance(control, Constant)}

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises UserError naming the key of a control that no metric feeds."""
        for key, control in self._moving.items():
            try:
                control.update(step, metrics)
            except UserError as error:
                raise UserError(f"{key}: {error}") from None

    def values(self) -> dict[str, float]:
        return {f"control/{key}": control.value for key, control in self._moving.items()}

    def state(self) -> dict[str, dict[str, float]]:
        return {key: control.state() for key, control in self._moving.items()}

    def load(self, state: Mapping[str, dict[str, float]]) -> None:
        for key, control in self._moving.items():
            control.load(state[key])
