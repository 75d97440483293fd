"""Probes of a simulator: whether seeds determine initial states, and whether random actions already succeed."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mmrl.preflight.alarms import Alarm, abbreviate, one_line
from mmrl.rollouts import Prompt
from mmrl.sims import VectorSim
from mmrl.sims.vector.simulator import Observation

SEEDS = (11, 12, 13, 14)  # of the episodes that are tried
# How a warning of `VectorSim` names a row; without number and seed, warnings of several rows are equal.
ROW = re.compile(r"environment \d+ \(task (\S+), seed \d+\)")


class SimulatorWarnings(logging.Handler):
    """Collects the warnings of a simulator, logged or by `warnings`, and makes one alarm of all equal ones."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Context that adds log records of `mmrl.sims`, and RuntimeWarnings, which simulators issue, to `texts`.
        Warnings of other categories are left out."""
        logger = logging.getLogger("mmrl.sims")
        logger.addHandler(self)
        try:
            with warnings.catch_warnings(record=True) as records:
                warnings.simplefilter("always")
                yield
        finally:
            logger.removeHandler(self)
        self.texts += [str(record.message) for record in records if record.category is RuntimeWarning]

    @property
    def alarms(self) -> list[Alarm]:
        texts = dict.fromkeys(ROW.sub(r"an environment (task \1)", one_line(text)) for text in self.texts)
        return [Alarm("simulator", "warned", text) for text in texts]


def probe_starts(sim: VectorSim, task: str) -> Iterator[Alarm]:
    """Yields alarms if two resets with the same seed differ, or an instruction is empty. task: its name."""
    rows = len(sim)
    seeds = [SEEDS[i % len(SEEDS)] for i in range(rows)]
    first = sim.reset(seeds, [task] * rows)
    again = sim.reset(seeds, [task] * rows)
    if not _equal(first, again):
        yield Alarm(
            "simulator",
            "warned",
            f"two resets with the same seed give different observations in the task {task!r}: the rollouts of a group "
            "would have different initial states; let reset(seed=...) determine the state",
        )
    if not all(text.strip() for text in again.instructions):
        yield Alarm(
            "simulator",
            "warned",
            f"the task {task!r} has an empty instruction; set task.options.instruction to what the policy should do",
        )


def probe_instructions(episodes: Sequence[Prompt]) -> Iterator[Alarm]:
    """Yields an alarm for demonstrations without an instruction."""
    without_instruction = [episode.id for episode in episodes if not episode.text.strip()]
    if without_instruction:
        yield Alarm(
            "demonstrations",
            "warned",
            f"the instruction is empty in {abbreviate(without_instruction)} ({len(without_instruction)} of "
            f"{len(episodes)} episodes); name their task in the data set, or leave them out",
        )


def probe_chunk(chunk: int, options: Mapping[str, Any]) -> Iterator[Alarm]:
    """Yields an alarm if a chunk of actions is longer than an episode.

    chunk: actions that are executed before the next observation. options: the simulator's.
    """
    max_steps = options.get("max_steps")
    if isinstance(max_steps, int) and chunk > max_steps:
        yield Alarm(
            "simulator",
            "warned",
            f"action.chunk={chunk} is longer than an episode, task.options={{max_steps: {max_steps}}}: the policy "
            "would see the first observation only; lower action.chunk",
        )


def probe_success(sim: VectorSim, task: str, steps: int) -> Iterator[Alarm]:
    """Yields an alarm if random actions succeed in every episode of a task, at the first step or later.

    steps: the maximum number of actions.
    """
    rows, rng = len(sim), np.random.default_rng(0)
    sim.reset([SEEDS[i % len(SEEDS)] + i for i in range(rows)], [task] * rows)
    success, success_at_once = np.zeros(rows, bool), np.zeros(rows, bool)
    for step_index in range(steps):
        if not sim.running.any():
            break
        step = sim.step(rng.uniform(-1, 1, (rows, 1, sim.simulator.action_dim)).astype(np.float32))
        reached = step.success.reshape(rows, -1).any(1)
        success_at_once |= reached & (step_index == 0)
        success |= reached
    if success_at_once.all():
        yield Alarm(
            "simulator",
            "warned",
            f"random actions succeed at the first step of every episode of {task!r}; check the condition that "
            "task.options.success names",
        )
    elif success.all():
        yield Alarm(
            "simulator",
            "warned",
            f"random actions succeed in every episode of {task!r}: there is nothing to learn; check the condition that "
            "task.options.success names",
        )


def _equal(observation: Observation, other: Observation) -> bool:
    """Returns whether images and states of two observations are equal; NaN equals NaN."""
    pairs = zip(_arrays(observation), _arrays(other), strict=True)
    return all(np.array_equal(one, two, equal_nan=one.dtype.kind == "f") for one, two in pairs)


def _arrays(observation: Observation) -> Sequence[Any]:
    """Returns images and states of an observation."""
    return [np.asarray(observation.images), np.asarray(observation.state)]
