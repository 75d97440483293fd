"""Metrics of a step over all ranks, monitors that end a run in which nothing is learned, and the printed lines."""

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
from mmrl.report.intervals import wilson
from mmrl.rollouts import FRESH, Rollouts
from mmrl.runtime.progress import time_left_text
from mmrl.training.throughput import FLOPS, Workload

UNSCORED = "unscored"  # share of the rollouts of a step whose reward is unknown; "unscored/NAME": of one component
FLAT = "advantages/zero_variance_groups"  # share of the groups whose rewards are all equal
KIB_IN_GIB = 2**20
MAXIMA = ("_gap", "/staleness")  # endings of metric names; the maximum of such a metric is reported too


class Metrics:
    """Collects the metrics of a step on this rank; `result` averages them over all ranks at the end of the step."""

    def __init__(self, engine: Ranks, workload: Workload | None = None) -> None:
        """workload: the policy's units of work and operations; None: throughput is not reported."""
        self.engine, self.workload = engine, workload
        self._parts: dict[str, list[Tensor]] = defaultdict(list)  # [sum, count, maximum], on the device of the values
        self._totals: set[str] = set()  # names of metrics that are totals, not means
        self._scalars: dict[str, float] = {}
        self._times: dict[str, float] = defaultdict(float)
        self._busy: dict[str, float] = defaultdict(float)  # seconds without waiting for other ranks
        self._work: dict[str, float] = defaultdict(float)  # units of work, and floating-point operations by phase
        self._started = time.perf_counter()

    def add(self, name: str, values: Tensor, *, sums: bool = False, where: Tensor | None = None) -> None:
        """Adds values of a metric, of any shape. The metric is their mean without NaN, or with `sums` their total over
        all ranks. where: bool, of the same shape; entries where it is False are left out.

        Values are not read in this call, since that would wait for the GPU.
        """
        self.add_all({name: values}, where=where, sums=sums)

    def add_all(self, columns: dict[str, Tensor], *, where: Tensor | None = None, sums: bool = False) -> None:
        """Adds several metrics with values of one shape on one device, in a few operations for all."""
        values = torch.stack([column.detach().flatten().double() for column in columns.values()])
        counted = torch.ones_like(values, dtype=torch.bool) if sums else ~values.isnan()
        if where is not None:
            counted &= where.to(values.device).flatten()
        finite = values.where(counted, 0.0)
        maxima = finite.amax(1) if values.shape[1] else finite.sum(1)  # without values, the sum is 0
        # maxima are reported only of metrics that are never negative
        rows = torch.stack([finite.sum(1), counted.sum(1), maxima.clamp(min=0.0)], 1)
        for name, row in zip(columns, rows.unbind(), strict=True):
            self._parts[name].append(row)
        if sums:
            self._totals.update(columns)

    @property
    def _flops(self) -> float:
        """Returns the floating-point operations so far; 0 without a workload."""
        return 0.0 if self.workload is None else self.workload.work.flops

    def add_counts(self, counts: Mapping[str, float]) -> None:
        """Adds counts of this rank to totals over all ranks."""
        for name, count in counts.items():
            self.add(name, torch.tensor([count]), sums=True)

    def add_rollouts(self, rollouts: Rollouts, task: Task) -> None:
        """Adds the units of work of all rollouts, and metrics of the fresh ones (not demonstrations or replayed ones):
        rewards, shares of unscored rollouts, accuracy and the task's measures."""
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
        """Sets metrics that are equal on all ranks, or of this rank alone."""
        self._scalars.update(values)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context that measures the time and the operations of a phase of the step, such as "rollout"."""
        self.engine.mark(name)
        started, waited, flops = time.perf_counter(), self.engine.waited, self._flops
        yield
        self._work[f"{name}{FLOPS}"] += self._flops - flops
        elapsed = time.perf_counter() - started
        self._times[name] += elapsed
        self._busy[name] += elapsed - (self.engine.waited - waited)

    def result(self) -> dict[str, float]:
        """Returns the step's metrics over all ranks by name: means, maxima (names with _max), scalars, times in seconds
        and throughput. A collective."""
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
        for name in everyone[0][3]:  # names of peak memory
            times[name] = max(memory[name] for *_, memory, _ in everyone)
        times["time/step"] = time.perf_counter() - self._started
        if self.workload is not None:
            times |= self.workload.rates([work for *_, work in everyone], [busy for _, _, busy, *_ in everyone], times)
        return {**means, **self._scalars, **times}

    def read(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Returns (sum, count) by name and maxima by name, of this rank. Copies the values from each device once."""
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parts in self._parts.items():
            for part in parts:
                by_device[part.device].append((name, part))
        sums, maxima = dict[str, tuple[float, float]](), dict[str, float]()
        for named in by_device.values():
            rows = torch.stack([part for _, part in named]).tolist()
            for (name, _), (part_sum, part_count, part_maximum) in zip(named, rows, strict=True):
                total, count = sums.get(name, (0.0, 0.0))
                # The counts of a total add up to 1 over the ranks, so that sum / count is the total.
                new_count = 1.0 / self.engine.world if name in self._totals else count + part_count
                sums[name] = (total + part_sum, new_count)
                if name.endswith(MAXIMA) and part_count:
                    maxima[name] = max(maxima.get(name, 0.0), part_maximum)
        return sums, maxima


def peak_memory() -> dict[str, float]:
    """Returns the peak memory of this process so far, in GiB: of the host, and of its GPU."""
    peaks = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_IN_GIB}
    if torch.cuda.is_initialized():
        peaks["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peaks


def stragglers(times: list[dict[str, float]]) -> dict[str, float]:
    """Returns metrics of the seconds that ranks worked in each phase: maximum, median, and the slowest rank's number.
    times: for each rank, seconds by phase."""
    metrics = {}
    for name in times[0] if len(times) > 1 else ():
        seconds = [rank[name] for rank in times]
        metrics[f"time/{name}_max"] = max(seconds)
        metrics[f"time/{name}_median"] = median(seconds)
        metrics[f"time/{name}_slowest"] = float(seconds.index(max(seconds)))
    return metrics


class UnscoredMonitor:
    """Ends a run in which no rollout is scored for several steps in a row.

    steps: consecutive steps without a scored rollout.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps, self.steps = max_steps, 0

    def state(self) -> int:
        return self.steps

    def load(self, state: int) -> None:
        self.steps = state

    def judge(self, step: int, values: dict[str, float], reasons: Mapping[str, str] | None = None) -> None:
        """Raises UserError after `max_steps` steps in a row without a scored rollout. values: metrics over all ranks,
        so that all ranks raise. reasons: why a reward could not score a rollout, by reward name."""
        if UNSCORED not in values:
            return
        self.steps = self.steps + 1 if values[UNSCORED] == 1.0 else 0
        if self.steps >= self.max_steps:
            shares = {n.removeprefix(f"{UNSCORED}/"): v for n, v in values.items() if n.startswith(f"{UNSCORED}/")}
            unscored = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share > 0)
            causes = "; ".join(f"{name}: {reason}" for name, reason in (reasons or {}).items() if shares.get(name))
            raise UserError(
                f"step {step}: no rollout could be scored in {self.steps} steps in a row (unscored by reward: "
                f"{unscored}). {causes or 'The warnings above say why'}. Correct the rewards or the answers in the "
                "data, or raise rollout.max_unscored_steps"
            )


class ZeroGradientMonitor:
    """Warns of, and then ends, a run whose gradient is exactly 0 for many steps in a row: rewards never differ within a
    group, a weight is 0, or a mask excludes everything. Also warns where all groups have equal rewards, so that only
    loss terms change the weights.

    steps: consecutive steps with gradient 0. flat_steps: consecutive steps in which all groups had equal rewards.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps, self.steps, self.flat_steps = max_steps, 0, 0

    def state(self) -> list[int]:
        return [self.steps, self.flat_steps]

    def load(self, state: list[int]) -> None:
        self.steps, self.flat_steps = state

    def judge(self, step: int, values: dict[str, float]) -> str | None:
        """Returns a warning after max_steps / 5 steps in a row with gradient 0 or equal rewards, else None. Raises
        UserError after `max_steps`. values: metrics over all ranks, so that all ranks raise."""
        self.steps = self.steps + 1 if values.get("grad_norm") == 0.0 else 0  # missing if updates were skipped
        self.flat_steps = self.flat_steps + 1 if values.get(FLAT) == 1.0 else 0
        warn_after = max(1, self.max_steps // 5)
        if self.flat_steps == warn_after and not self.steps:
            return (
                f"step {step}: all rollouts of each group had equal rewards in {warn_after} steps in a row, so that "
                "only loss terms changed the weights. Try prompts that are neither too easy nor too hard, a larger "
                "rollout.group_size, or partial credit"
            )
        if self.steps not in (warn_after, self.max_steps):
            return None
        rewards = [f"{n.removeprefix('reward/')} {v:.3g}" for n, v in values.items() if n.startswith("reward/")]
        problem = (
            f"step {step}: nothing was learned in {self.steps} steps in a row, because the gradient was 0 (mean "
            f"rewards: {', '.join(rewards) or 'none'}). Groups in which all rewards are equal have no learning signal: "
            "check the tables in samples/, the rewards and their weights, and the masks"
        )
        if self.steps < self.max_steps:
            return f"{problem}; the run ends after {self.max_steps} such steps (rollout.max_idle_steps)"
        raise UserError(f"{problem}; or raise rollout.max_idle_steps")


def step_line(step: int, steps: int, values: dict[str, float], seconds_left: float | None = None) -> str:
    """Returns the printed line of a step: rewards, main metrics, shares of groups without signal and of unscored
    rollouts, and speed. seconds_left: estimated time until the end of the run."""
    main_metrics = [
        ("acc", "accuracy"),
        ("loss", "loss"),
        ("grad", "grad_norm"),
        ("ent", "entropy"),
        ("len", "response/length"),
    ]
    parts = [f"{n.removeprefix('reward/')} {v:.3f}" for n, v in values.items() if n.startswith("reward/")]
    parts += [f"{short} {values[name]:.3f}" for short, name in main_metrics if name in values]
    missing = [("no signal", FLAT), (UNSCORED, UNSCORED)]
    parts += [f"{word} {values[name]:.0%}" for word, name in missing if values.get(name, 0) > 0]
    if lost := lost_episodes(values):
        parts.append(f"{lost} lost")
    parts += [f"{values['time/step']:.2f}s", f"{values['throughput/rollouts_per_second']:.0f} rollouts/s"]
    parts += [f"MFU {values['throughput/mfu']:.0%}"] if "throughput/mfu" in values else []
    parts += [time_left_text(seconds_left)] if seconds_left else []
    return f"step {step}/{steps}  {'  '.join(parts)}"


def evaluation_line(step: int, values: dict[str, float]) -> str:
    """Returns the printed line of an evaluation: accuracy with its standard error, the share of unscored rollouts and
    the number of lost episodes."""
    unscored, lost = values["evaluation/unscored"], lost_episodes(values, "evaluation/")
    missing = [f"{unscored:.1%} could not be scored"] if unscored else []
    missing += [f"{lost} lost"] if lost else []
    note = f" ({', '.join(missing)})" if missing else ""
    if "evaluation/accuracy" not in values:
        return f"evaluation at step {step}: no held-out accuracy{note}"
    accuracy, n = values["evaluation/accuracy"], round(values["evaluation/n"])
    uncertainty = f" ± {values['evaluation/standard_error']:.4f}"
    if accuracy in (0.0, 1.0):  # the standard error is 0, which would look certain however few prompts there were
        low, high = wilson(round(accuracy * n), n)
        uncertainty = f" (95 % interval {low:.2f} to {high:.2f})"
    return f"evaluation at step {step}: held-out accuracy {accuracy:.4f}{uncertainty} on {n}{note}"


def lost_episodes(values: dict[str, float], prefix: str = "") -> int:
    """Returns the number of episodes and conversations that were lost because a simulator or an environment failed."""
    return round(sum(values.get(prefix + name, 0.0) for name in ("simulator/dropped", "environment/lost")))
