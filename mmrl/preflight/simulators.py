"""Probes of a simulator: starts that follow from seeds, what earns success, whether random actions do."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mmrl.preflight.alarms import Alarm, one_line, some
from mmrl.rollouts import Prompt
from mmrl.sims import VectorSim
from mmrl.sims.vector.simulator import Observation

SEEDS = (11, 12, 13, 14)


ROW = re.compile(r"environment \d+ \(task (\S+), seed \d+\)")


class Complaints(logging.Handler):
    """Collects what a simulator warned of while it was tried, one alarm for each kind."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Context in which warnings of simulators are collected in `texts`."""
        logger = logging.getLogger("mmrl.sims")
        logger.addHandler(self)
        try:
            with warnings.catch_warnings(record=True) as records:
                warnings.simplefilter("always")
                yield
        finally:
            logger.removeHandler(self)
        self.texts += [str(one.message) for one in records if one.category is RuntimeWarning]

    @property
    def alarms(self) -> list[Alarm]:
        texts = dict.fromkeys(ROW.sub(r"an environment (task \1)", one_line(text)) for text in self.texts)
        return [Alarm("simulator", "warned", text) for text in texts]


def probe_starts(sim: VectorSim, task: str) -> Iterator[Alarm]:
    """Finds starts that differ between two resets with one seed, and instructions that say nothing."""
    rows = len(sim)
    seeds = [SEEDS[i % len(SEEDS)] for i in range(rows)]
    first = sim.reset(seeds, [task] * rows)
    again = sim.reset(seeds, [task] * rows)
    if not _same(first, again):
        yield Alarm(
            "simulator",
            "warned",
            f"two resets with the same seed begin with another observation in the task {task!r}: the rollouts of a "
            "group would have different starts; reset(seed=...) has to decide them",
        )
    if not all(text.strip() for text in again.instructions):
        yield Alarm(
            "simulator",
            "warned",
            f"the task {task!r} has an empty instruction; set task.options.instruction to what the policy shall do",
        )


def probe_instructions(episodes: Sequence[Prompt]) -> Iterator[Alarm]:
    """Finds demonstrations that do not say what they show."""
    silent = [episode.id for episode in episodes if not episode.text.strip()]
    if silent:
        yield Alarm(
            "demonstrations",
            "warned",
            f"the instruction is empty in {some(silent)} ({len(silent)} of {len(episodes)} episodes); name their task "
            "in the data set, or leave them out",
        )


def probe_chunk(chunk: int, options: Mapping[str, Any]) -> Iterator[Alarm]:
    """Finds chunks of actions that are longer than an episode. options: of the simulator."""
    longest = options.get("max_steps")
    if isinstance(longest, int) and chunk > longest:
        yield Alarm(
            "simulator",
            "warned",
            f"action.chunk={chunk} is longer than an episode, task.options max_steps={longest}: the policy sees the "
            "first observation alone; lower action.chunk",
        )


def probe_success(sim: VectorSim, task: str, steps: int) -> Iterator[Alarm]:
    """Finds tasks in which random actions always succeed, at once or in the end, or that never end in time."""
    rows, rng = len(sim), np.random.default_rng(0)
    sim.reset([SEEDS[i % len(SEEDS)] + i for i in range(rows)], [task] * rows)
    success, first = np.zeros(rows, bool), np.zeros(rows, bool)
    for number in range(steps):
        if not sim.running.any():
            break
        step = sim.step(rng.uniform(-1, 1, (rows, 1, sim.simulator.action_dim)).astype(np.float32))
        reached = step.success.reshape(rows, -1).any(1)
        first |= reached & (number == 0)
        success |= reached
    if first.all():
        yield Alarm(
            "simulator",
            "warned",
            f"every episode of {task!r} has success at the first step of random actions: look at what "
            "task.options.success names",
        )
    elif success.all():
        yield Alarm(
            "simulator",
            "warned",
            f"random actions have success in every episode of {task!r}: there is nothing to learn, or success "
            "(task.options.success) is not what was meant",
        )


def _same(one: Observation, other: Observation) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(_arrays(one), _arrays(other), strict=True)
    )


def _arrays(observation: Observation) -> Sequence[Any]:
    return [np.asarray(observation.images), np.asarray(observation.state)]
