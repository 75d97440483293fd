"""Metrics of a step over all ranks, and the line that is printed of them."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from mmrl.core.advantages import combined_reward
from mmrl.engine import Ranks
from mmrl.errors import UserError
from mmrl.protocols.parts import Task
from mmrl.rollouts import FRESH, Rollouts
from mmrl.runtime.progress import time_left_text
from mmrl.training.throughput import FLOPS, Workload

UNSCORED = "unscored"  # share of the rollouts of a step whose reward is unknown; "unscored/NAME": of one component
FLAT = "advantages/zero_variance_groups"  # share of the groups whose rewards are all equal
KIB_IN_GIB = 2**20
MAXIMA = ("_gap", "/staleness")  # endings of names whose maximum is reported too


class Metrics:
    """Sums and counts of a step's metrics, averaged over all ranks once, at its end."""

    def __init__(self, engine: Ranks, workload: Workload | None = None) -> None:
        """workload: of the policy; None: rates of it are not reported."""
        self.engine, self.workload = engine, workload
        self._parts: dict[str, list[Tensor]] = defaultdict(list)  # [sum, count, maximum], where the values are
        self._totals: set[str] = set()  # names whose values are parts of a total
        self._scalars: dict[str, float] = {}
        self._times: dict[str, float] = defaultdict(float)
        self._busy: dict[str, float] = defaultdict(float)  # seconds without waiting for other ranks
        self._work: dict[str, float] = defaultdict(float)  # units, and operations by phase
        self._started = time.perf_counter()

    def add(self, name: str, values: Tensor, *, sums: bool = False, where: Tensor | None = None) -> None:
        """Adds values to average, without NaN; with `sums` they are added to a total instead. where: bool, of the same
        shape; entries where it is False are left out.

        No value is read in this call: on a GPU that would synchronise.
        """
        self.add_all({name: values}, where=where, sums=sums)

    def add_all(self, columns: dict[str, Tensor], *, where: Tensor | None = None, sums: bool = False) -> None:
        """Adds several metrics with values of one shape on one device, in a few operations for all."""
        values = torch.stack([column.detach().flatten().double() for column in columns.values()])
        counted = torch.ones_like(values, dtype=torch.bool) if sums else ~values.isnan()
        if where is not None:
            counted &= where.to(values.device).flatten()
        finite = values.where(counted, 0.0)
        most = finite.amax(1) if values.shape[1] else finite.sum(1)
        rows = torch.stack([finite.sum(1), counted.sum(1), most.clamp(min=0.0)], 1)
        for name, row in zip(columns, rows.unbind(), strict=True):
            self._parts[name].append(row)
        if sums:
            self._totals.update(columns)

    @property
    def _flops(self) -> float:
        return 0.0 if self.workload is None else self.workload.work.flops

    def add_counts(self, counts: Mapping[str, float]) -> None:
        """Adds counts of this rank to totals over all ranks."""
        for name, count in counts.items():
            self.add(name, torch.tensor([count]), sums=True)

    def add_rollouts(self, rollouts: Rollouts, task: Task) -> None:
        """Adds units of work, and rewards, accuracy and the task's measures of scored rollouts; of fresh ones only."""
        if self.workload is not None:
            self._work |= self.workload.work.units(rollouts)
        if rollouts.rewards is None:
            return
        fresh = rollouts if rollouts.origin is None else rollouts.select(rollouts.origin == FRESH)
        assert fresh.rewards is not None
        for k, name in enumerate(task.reward_names):
            self.add(f"reward/{name}", fresh.rewards[:, k])
            self.add(f"{UNSCORED}/{name}", fresh.rewards[:, k].isnan().float())
        total = combined_reward(fresh.rewards, torch.tensor(task.reward_weights))
        self.add(UNSCORED, total.isnan().float())
        for name, measured in task.measures(fresh.samples, fresh.group).items():
            self.add(name, measured)
        if fresh.accuracy is not None:
            self.add("accuracy", fresh.accuracy)

    def set(self, values: dict[str, float]) -> None:
        self._scalars.update(values)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.engine.mark(name)
        started, waited, flops = time.perf_counter(), self.engine.waited, self._flops
        yield
        self._work[f"{name}{FLOPS}"] += self._flops - flops
        elapsed = time.perf_counter() - started
        self._times[name] += elapsed
        self._busy[name] += elapsed - (self.engine.waited - waited)

    def result(self) -> dict[str, float]:
        """Returns the step's metrics over all ranks: means, maxima (_max), scalars, and times in seconds. A
        collective."""
        everyone = self.engine.gather((*self.read(), dict(self._busy), peak_memory(), dict(self._work)))
        merged: dict[str, list[float]] = {}
        for sums, maxima, *_ in everyone:
            for name, (total, count) in sums.items():
                entry = merged.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
            for name, value in maxima.items():
                self._scalars[name + "_max"] = max(self._scalars.get(name + "_max", 0.0), value)
        means = {name: total / count for name, (total, count) in merged.items() if count > 0}
        times = {f"time/{name}": value for name, value in self._times.items()}
        times |= stragglers([busy for _, _, busy, *_ in everyone])
        for name in everyone[0][3]:
            times[name] = max(memory[name] for *_, memory, _ in everyone)
        times["time/step"] = time.perf_counter() - self._started
        if self.workload is not None:
            times |= self.workload.rates([work for *_, work in everyone], [busy for _, _, busy, *_ in everyone], times)
        return {**means, **self._scalars, **times}

    def read(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Returns sums with counts, and maxima, by name; one copy from each device."""
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parts in self._parts.items():
            for part in parts:
                by_device[part.device].append((name, part))
        sums, maxima = dict[str, tuple[float, float]](), dict[str, float]()
        for named in by_device.values():
            rows = torch.stack([part for _, part in named]).tolist()
            for (name, _), (total, count, most) in zip(named, rows, strict=True):
                before, counted = sums.get(name, (0.0, 0.0))
                sums[name] = (before + total, 1.0 / self.engine.world if name in self._totals else counted + count)
                if name.endswith(MAXIMA) and count:
                    maxima[name] = max(maxima.get(name, 0.0), most)
        return sums, maxima


def peak_memory() -> dict[str, float]:
    """Returns the peak memory of this process so far, in GiB: of the host, and of its GPU."""
    peaks = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_IN_GIB}
    if torch.cuda.is_initialized():
        peaks["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peaks


def stragglers(times: list[dict[str, float]]) -> dict[str, float]:
    """Returns the maximum, the median and the slowest rank of the seconds that the ranks worked in each phase."""
    metrics = {}
    for name in times[0] if len(times) > 1 else ():
        seconds = [rank[name] for rank in times]
        metrics[f"time/{name}_max"] = max(seconds)
        metrics[f"time/{name}_median"] = median(seconds)
        metrics[f"time/{name}_slowest"] = float(seconds.index(max(seconds)))
    return metrics


class UnscoredMonitor:
    """Counts consecutive steps in which no rollout was scored, so that nothing could be learned."""

    def __init__(self, most: int) -> None:
        self.most, self.steps = most, 0

    def judge(self, step: int, values: dict[str, float], reasons: Mapping[str, str] | None = None) -> None:
        """Raises UserError after `most` steps in a row without a scored rollout; it names the rewards at fault.
        values: metrics over all ranks, so that all ranks raise. reasons: by reward, why it did not score a rollout."""
        if UNSCORED not in values:
            return
        self.steps = self.steps + 1 if values[UNSCORED] == 1.0 else 0
        if self.steps >= self.most:
            shares = {n.removeprefix(f"{UNSCORED}/"): v for n, v in values.items() if n.startswith(f"{UNSCORED}/")}
            lost = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share > 0)
            why = "; ".join(f"{name}: {reason}" for name, reason in (reasons or {}).items() if shares.get(name))
            raise UserError(
                f"step {step}: no rollout could be scored in {self.steps} steps in a row (unscored by reward: {lost}). "
                f"{why or 'The warnings above say why'}. Mend the rewards or their answers, or raise "
                "rollout.max_unscored_steps"
            )


class ZeroGradientMonitor:
    """Counts consecutive steps whose gradient was exactly 0, so that nothing was learned: rewards that never differ
    within a group, a weight of 0, a mask that excludes everything. Also counts consecutive steps in which no group had
    a signal, so that only loss terms may have moved the weights."""

    def __init__(self, most: int) -> None:
        self.most, self.steps, self.flat = most, 0, 0

    def judge(self, step: int, values: dict[str, float]) -> str | None:
        """Returns a warning after a fifth of `most` such steps. Raises UserError after `most`; `values` are of all
        ranks, so all ranks raise."""
        self.steps = self.steps + 1 if values.get("grad_norm") == 0.0 else 0  # absent: updates were skipped
        self.flat = self.flat + 1 if values.get(FLAT) == 1.0 else 0
        first = max(1, self.most // 5)
        if self.flat == first and not self.steps:
            return (
                f"step {step}: the rewards taught nothing in {first} steps in a row: all rollouts of a group had "
                "the same; only loss terms moved the weights. Try prompts that are neither too easy nor too hard, "
                "a larger rollout.group_size, or partial credit"
            )
        if self.steps not in (first, self.most):
            return None
        rewards = [f"{n.removeprefix('reward/')} {v:.3g}" for n, v in values.items() if n.startswith("reward/")]
        why = (
            f"step {step}: nothing was learned in {self.steps} steps in a row, for the gradient was 0 (mean rewards: "
            f"{', '.join(rewards) or 'none'}). Rewards that are all equal within each group teach nothing: check the "
            "tables in samples/, the rewards and their weights, and what rollouts are masked"
        )
        if self.steps < self.most:
            return f"{why}; the run ends after {self.most} such steps (rollout.max_idle_steps)"
        raise UserError(f"{why}; or raise rollout.max_idle_steps")


def step_line(step: int, steps: int, values: dict[str, float], left: float | None = None) -> str:
    """Formats the line of a step: main metrics, shares without signal or score, speed. left: seconds until the last
    step."""
    shown = [
        ("acc", "accuracy"),
        ("loss", "loss"),
        ("grad", "grad_norm"),
        ("ent", "entropy"),
        ("len", "response/length"),
    ]
    parts = [f"{n.removeprefix('reward/')} {v:.3f}" for n, v in values.items() if n.startswith("reward/")]
    parts += [f"{short} {values[name]:.3f}" for short, name in shown if name in values]
    missing = [("no signal", FLAT), (UNSCORED, UNSCORED)]
    parts += [f"{word} {values[name]:.0%}" for word, name in missing if values.get(name, 0) > 0]
    if lost := lost_episodes(values):
        parts.append(f"{lost} lost")
    parts += [f"{values['time/step']:.2f}s", f"{values['throughput/rollouts_per_second']:.0f} rollouts/s"]
    parts += [f"MFU {values['throughput/mfu']:.0%}"] if "throughput/mfu" in values else []
    parts += [time_left_text(left)] if left else []
    return f"step {step}/{steps}  {'  '.join(parts)}"


def evaluation_line(step: int, values: dict[str, float]) -> str:
    """Formats the line of an evaluation: accuracy with its standard error, and what was not scored."""
    unscored, lost = values["evaluation/unscored"], lost_episodes(values, "evaluation/")
    missing = [f"{unscored:.1%} could not be scored"] if unscored else []
    missing += [f"{lost} lost"] if lost else []
    without = f" ({', '.join(missing)})" if missing else ""
    if "evaluation/accuracy" not in values:
        return f"evaluation at step {step}: no held-out accuracy{without}"
    accuracy, error = values["evaluation/accuracy"], values["evaluation/standard_error"]
    return (
        f"evaluation at step {step}: held-out accuracy {accuracy:.4f} ± {error:.4f} on {values['evaluation/n']:.0f}"
        f"{without}"
    )


def lost_episodes(values: dict[str, float], prefix: str = "") -> int:
    """Returns the number of episodes and conversations that a simulator or an environment lost."""
    return round(sum(values.get(prefix + name, 0.0) for name in ("simulator/dropped", "environment/lost")))
