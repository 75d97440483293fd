"""A step's numbers, over all ranks, and the line that tells them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from mmrl.engine import Ranks

MAXIMA = ("_gap", "/staleness")  # names of which the largest value is told besides


class Metrics:
    """Sums and counts of a step's numbers, made into means over all ranks once, at its end."""

    def __init__(self, engine: Ranks) -> None:
        self.engine = engine
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._times: dict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    def add(self, name: str, values: Tensor, *, sums: bool = False) -> None:
        """Values to average, NaN left out; with `sums` they are parts of a total instead."""
        known = values.detach().flatten().double()
        known = known if sums else known[~known.isnan()]
        total, count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total + float(known.sum()), 1.0 / self.engine.world if sums else count + known.numel())
        if name.endswith(MAXIMA) and known.numel():
            self._maxima[name] = max(self._maxima.get(name, 0.0), float(known.max()))

    def set(self, values: dict[str, float]) -> None:
        self._given.update(values)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._times[name] += time.perf_counter() - started

    def result(self) -> dict[str, float]:
        everyone = self.engine.gather((self._sums, self._maxima))
        merged: dict[str, list[float]] = {}
        for sums, maxima in everyone:
            for name, (total, count) in sums.items():
                entry = merged.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
            for name, value in maxima.items():
                self._given[name + "_max"] = max(self._given.get(name + "_max", 0.0), value)
        means = {name: total / count for name, (total, count) in merged.items() if count > 0}
        times = {f"time/{name}": value for name, value in self._times.items()}
        return {**means, **self._given, **times, "time/step": time.perf_counter() - self._started}


def step_line(step: int, steps: int, values: dict[str, float]) -> str:
    """One line a step: what moved and how fast."""
    shown = [
        ("acc", "accuracy"),
        ("loss", "loss"),
        ("grad", "grad_norm"),
        ("ent", "entropy"),
        ("len", "response/length"),
    ]
    parts = [f"{short} {values[name]:.3f}" for short, name in shown if name in values]
    rewards = [f"{n.removeprefix('reward/')} {v:.3f}" for n, v in values.items() if n.startswith("reward/")]
    speed = f"{values['throughput/rollouts_per_second']:.0f} rollouts/s"
    return f"step {step}/{steps}  " + "  ".join([*rewards, *parts, f"{values['time/step']:.2f}s", speed])
