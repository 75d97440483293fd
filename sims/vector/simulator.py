"""One vector interface for every simulator: seeds and tasks in; images, state and instructions out.

A simulator implements how rows of episodes start and step (`Simulator`); `VectorSim` adds what is the same for all of
them: the end of an episode, inactive rows, checks of actions, counts of lost episodes.
"""

from __future__ import annotations

import difflib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import UserError, describe_error
from mmrl.sims.vector.checks import (
    SimulatorFault,
    check_facts,
    checked_actions,
    lost_transition,
    mark_nonfinite,
    misfit,
)
from mmrl.sims.vector.transitions import Simulator, Transition, cameras_of
from mmrl.sims.vector.watch import CallWatch

__all__ = ["Observation", "Simulator", "Step", "Transition", "VectorSim", "nearest"]

MOST_IDLE = 2  # chunks in a row of which nothing is executed
LONGEST = 10_000  # actions of an episode


@dataclass
class Observation:
    """The observations of B environments; the arrays belong to the caller."""

    images: NDArray[np.uint8]  # [B, height, width, 3], RGB
    state: NDArray[np.float32]  # [B, S] proprioception
    instructions: list[str]  # B
    cameras: tuple[str, ...] = ("camera",)  # whose images stand side by side in `images`, from the left

    def image(self, camera: str) -> NDArray[np.uint8]:
        """Returns the images of one camera, [B, height, width / cameras, 3]. Raises UserError for an unknown one."""
        if camera not in self.cameras:
            raise UserError(f"no camera {camera!r}{nearest(camera, self.cameras)}; there are {', '.join(self.cameras)}")
        width = self.images.shape[2] // len(self.cameras)
        left = self.cameras.index(camera) * width
        return self.images[:, :, left : left + width]

    def __len__(self) -> int:
        return len(self.instructions)

    def select(self, rows: Sequence[int] | NDArray) -> Observation:
        """Returns the observation of `rows` (indices, or [B] bool), in that order."""
        index = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows, dtype=np.int64)
        return Observation(self.images[index], self.state[index], [self.instructions[i] for i in index], self.cameras)


@dataclass
class Step:
    """The result of `VectorSim.step`. `reward` to `valid` are [B, C] as in `Transition`; a row that was not active has
    valid False and 0 everywhere."""

    observation: Observation  # a truncated return is bootstrapped from that of its last step
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    dropped: NDArray[np.bool_]  # [B], whether the simulator raised: the whole episode is to be discarded

    @property
    def ended(self) -> NDArray[np.bool_]:
        """Mask [B] of the environments whose episode ended in this step, dropped ones included."""
        return self.terminated.any(1) | self.truncated.any(1) | self.dropped


class VectorSim:
    """B environments that persist across training steps, stepped by chunks of actions.

    An ended row stays as it ended, ignores actions and costs nothing until `reset` or `restart`; within a chunk nothing
    is executed after the end.

    shares: rows that move independently of one another, so that `step` may be called for them from threads of their
        own; None: all rows are one share.
    counters: nan_actions (numbers that were not finite), dropped_episodes, restarts (workers).

    An episode is dropped where the simulator reports or raises an error, gives a state or reward that is not finite,
    executes nothing of two chunks in a row without an end, or comes to no end in LONGEST actions. What the simulator
    gives must have the shapes and kinds of `Transition`: a first transition without them is a
    UserError, later ones cost the episodes.

    Environments with one seed and one task are a group: the simulator starts them from the seed, never from a copied
    state, so their first observations are equal bit for bit.
    """

    def __init__(
        self,
        simulator: Simulator,
        *,
        shares: Sequence[NDArray[np.int64]] | None = None,
        name: str | None = None,
        patience_s: float | None = None,
    ):
        """name: name of the simulator in messages; None: its class. patience_s: seconds that a reset or a step may take
        before a warning; None: no warning, for simulators that have deadlines of their own."""
        self.name = name or type(simulator).__name__
        check_facts(self.name, simulator)
        self.simulator = simulator
        self.cameras = cameras_of(simulator)
        self.shares = [np.arange(simulator.count)] if shares is None else list(shares)
        self.counters = Counter(nan_actions=0, dropped_episodes=0, restarts=0)
        self.seeds: list[int] = []  # B, of the running episodes
        self.tasks: list[str] = []  # B
        self._running = np.zeros(simulator.count, bool)
        self._idle = np.zeros(simulator.count, np.int64)  # chunks in a row of which nothing was executed
        self._actions_taken = np.zeros(simulator.count, np.int64)  # in the running episode
        self._watch = CallWatch(self.name, patience_s)
        self._fitted: set[str] = set()  # "reset" or "step", of which a first transition was valid
        self._begun = False  # whether any episode ever started
        self._observation: Observation | None = None
        self._lock = threading.Lock()  # guards what the shares have in common

    def __len__(self) -> int:
        return self.simulator.count

    @property
    def running(self) -> NDArray[np.bool_]:
        """Mask [B] of the environments that are inside an episode."""
        return self._running.copy()

    def reset(self, seeds: Sequence[int], tasks: Sequence[str]) -> Observation:
        """Starts an episode in the first len(seeds) rows, at most B; the others are idle and show black images.

        Raises UserError for a wrong number of seeds or tasks, a negative seed or an unknown task, and if no episode has
        ever started and none does now; later a reset may lose all of them.
        """
        if not 0 < len(seeds) <= len(self) or len(tasks) != len(seeds):
            raise UserError(
                f"this simulator has {len(self)} environments, but got {len(seeds)} seeds and {len(tasks)} tasks"
            )
        self._check_starts(seeds, tasks)
        self.seeds, self.tasks = [int(seed) for seed in seeds], list(tasks)
        shape = self.simulator.image_shape
        self._observation = Observation(
            np.zeros((len(self), *shape), np.uint8),
            np.zeros((len(self), self.simulator.state_dim), np.float32),
            [""] * len(self),
            self.cameras,
        )
        self._running[:] = False
        dropped = self._start(np.arange(len(seeds)))
        self._begun |= not all(dropped)
        if not self._begun and dropped[0] is not None:
            raise UserError(
                f"simulator {self.name!r}: no environment could be reset; the first says: {describe_error(dropped[0])}"
            ) from dropped[0]
        return self.observation()

    def restart(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Observation:
        """Starts new episodes in `rows` whose last one has ended, while the other rows stay as they are.

        Raises UserError for a row that is inside an episode or had none, and for seeds and tasks as `reset`.
        """
        with self._lock:
            busy = [row for row in rows if row >= len(self.seeds) or self._running[row]]
            if busy:
                raise UserError(f"environment {busy[0]} can not restart: it is inside an episode, or had none")
            self._check_starts(seeds, tasks)
            for row, seed, task in zip(rows, seeds, tasks, strict=True):
                self.seeds[row], self.tasks[row] = int(seed), task
            self._start(np.asarray(rows, dtype=np.int64))
            return self.observation()

    def step(self, actions: ArrayLike, active: ArrayLike | None = None) -> Step:
        """Executes a chunk of `actions` [B, C, A] in the rows that are `active` ([B] bool; None: all) and running.

        Numbers that are not finite become 0 and are counted. An environment whose simulator raises loses its episode:
        its row is `dropped`, has valid False, and stays ended.
        Raises UserError for actions of another shape.
        """
        shown, chunk, rows = self._checked(active), self._actions(actions), self._rows(active)
        bad = ~np.isfinite(chunk[rows])
        out = Transition.empty(len(self), chunk.shape[1], self.simulator.image_shape, self.simulator.state_dim)
        dropped = np.zeros(len(self), bool)
        transition = self._step(rows, np.where(bad, 0.0, chunk[rows])) if len(rows) else None
        with self._lock:
            self.counters["nan_actions"] += int(bad.sum())
            if transition is not None:
                dropped[rows] = lost = self._count_lost(rows, transition)
                for name in ("reward", "terminated", "truncated", "success", "valid"):
                    getattr(out, name)[rows[~lost]] = getattr(transition, name)[~lost]
                shown.images[rows[~lost]], shown.state[rows[~lost]] = transition.images[~lost], transition.state[~lost]
            self._running &= ~(out.terminated.any(1) | out.truncated.any(1) | dropped)
            flags = (out.reward, out.terminated, out.truncated, out.success, out.valid, dropped)
            return Step(self.observation(), *flags)

    def expert(self, active: ArrayLike | None = None, *, length: int = 1) -> NDArray[np.float32]:
        """Returns the next `length` actions [B, length, A] of the scripted expert; 0 for rows that are not active and
        after the end of an episode. Raises UserError where the simulator has no expert."""
        self._checked(active)
        actions = np.zeros((len(self), length, self.simulator.action_dim), np.float32)
        rows = self._rows(active)
        if len(rows):
            wanted = (len(rows), length, self.simulator.action_dim)
            try:
                actions[rows] = checked_actions(self.name, self.simulator.expert(rows.tolist(), length), wanted)
            except UserError:
                raise
            except Exception as error:
                self.drop(rows, f"its expert failed: {describe_error(error)}")
        return actions

    def drop(self, rows: NDArray[np.int64], why: str) -> None:
        """Drops the running episodes of `rows` and counts them."""
        with self._lock:
            for row in rows:
                self._report_loss(int(row), SimulatorFault(why))
            self._running[rows] = False

    def observation(self) -> Observation:
        """Returns a copy of the present observations of all environments; ended ones keep their last image."""
        now = self._checked(None)
        return Observation(now.images.copy(), now.state.copy(), list(now.instructions), self.cameras)

    def close(self) -> None:
        """Frees renderers, threads and processes; the simulator cannot be used afterwards."""
        self._watch.close()
        self.simulator.close()

    def __enter__(self) -> VectorSim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_starts(self, seeds: Sequence[int], tasks: Sequence[str]) -> None:
        """Raises UserError for an unknown task and a negative seed."""
        for task in tasks:
            if task not in self.simulator.tasks:
                names = ", ".join(self.simulator.tasks)
                raise UserError(f"unknown task {task!r}{nearest(task, self.simulator.tasks)}; known: {names}")
        if any(seed < 0 for seed in seeds):
            raise UserError(f"seeds must not be negative, but one is {min(seeds)}")

    def _checked(self, active: ArrayLike | None) -> Observation:
        if self._observation is None:
            raise UserError("reset(seeds, tasks) must be called before any other method of a simulator")
        if active is not None and (np.shape(active) != (len(self),) or np.asarray(active).dtype != bool):
            raise UserError(f"active must be bool of shape ({len(self)},), not {np.shape(active)}")
        return self._observation

    def _rows(self, active: ArrayLike | None) -> NDArray[np.int64]:
        return np.flatnonzero(self._running if active is None else self._running & np.asarray(active))

    def _actions(self, actions: ArrayLike) -> NDArray[np.float64]:
        chunk = np.asarray(actions, dtype=np.float64)
        wanted = (len(self), self.simulator.action_dim)
        if chunk.ndim != 3 or (chunk.shape[0], chunk.shape[2]) != wanted or chunk.shape[1] == 0:
            raise UserError(
                f"actions must have shape [environments, chunk, action] = [{wanted[0]}, C, {wanted[1]}] with C at "
                f"least 1, not {list(chunk.shape)}"
            )
        return chunk

    def _start(self, rows: NDArray[np.int64]) -> list[Exception | None]:
        """Starts episodes in `rows` from self.seeds and self.tasks; returns the exception of each row, or None."""
        assert self._observation is not None
        seeds, tasks = [self.seeds[row] for row in rows], [self.tasks[row] for row in rows]
        started = self._call_simulator(
            "reset", len(rows), None, lambda: self.simulator.reset(rows.tolist(), seeds, tasks)
        )
        lost = self._count_lost(rows, started)
        self._running[rows], self._idle[rows], self._actions_taken[rows] = ~lost, 0, 0
        self._observation.images[rows], self._observation.state[rows] = started.images, started.state
        for row in rows[~lost]:
            self._observation.instructions[row] = self._instruction(int(row))
        return started.errors

    def _instruction(self, row: int) -> str:
        text = self.simulator.instruction(row)
        if not isinstance(text, str):
            raise UserError(f"simulator {self.name!r}: instruction must give text, not {type(text).__name__}")
        return text

    def _step(self, rows: NDArray[np.int64], chunk: NDArray[np.float64]) -> Transition:
        """Executes a chunk [row, action, number] in `rows`. Rows that do nothing MOST_IDLE times, or do not end in
        LONGEST actions, get an error."""
        length = chunk.shape[1]
        transition = self._call_simulator("step", len(rows), length, lambda: self.simulator.step(rows.tolist(), chunk))
        ended: NDArray[np.bool_] = np.any(transition.terminated | transition.truncated, axis=1)
        self._idle[rows] = np.where(transition.valid.any(1) | ended, 0, self._idle[rows] + 1)
        self._actions_taken[rows] += transition.valid.sum(1)
        for i, row in enumerate(rows):
            if transition.errors[i] is None and self._idle[row] >= MOST_IDLE:
                transition.errors[i] = SimulatorFault(f"it executed nothing of {MOST_IDLE} chunks in a row")
            elif transition.errors[i] is None and not ended[i] and self._actions_taken[row] > LONGEST:
                transition.errors[i] = SimulatorFault(f"no end after {self._actions_taken[row]} actions")
        return transition

    def _call_simulator(self, call: str, rows: int, length: int | None, ask: Callable[[], Transition]) -> Transition:
        """Runs `ask`, a reset or step of the simulator. Returns its transition if that is valid, else one in which
        every row has an error. Raises UserError for an invalid first transition."""
        try:
            with self._watch.over(call):
                transition = ask()
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            fault = error if isinstance(error, Exception) else SimulatorFault(describe_error(error))
            return lost_transition(rows, length or 0, self.simulator, fault)
        if (problem := misfit(transition, rows, length, self.simulator)) is None:
            self._fitted.add(call)
            mark_nonfinite(transition)
            return transition
        if call not in self._fitted:
            raise UserError(f"simulator {self.name!r}: {call} {problem}")
        return lost_transition(rows, length or 0, self.simulator, SimulatorFault(f"{call} {problem}"))

    def _count_lost(self, rows: NDArray[np.int64], transition: Transition) -> NDArray[np.bool_]:
        """Counts restarts, reports rows with an error, and returns which these are, [row] bool."""
        self.counters["restarts"] += transition.restarts
        for row, error in zip(rows, transition.errors, strict=True):
            if error is not None:
                self._report_loss(int(row), error)
        return np.array([error is not None for error in transition.errors], dtype=bool)

    def _report_loss(self, row: int, error: Exception) -> None:
        """Warns that a row lost its episode, and why."""
        self.counters["dropped_episodes"] += 1
        warnings.warn(
            f"environment {row} (task {self.tasks[row]}, seed {self.seeds[row]}) of simulator {self.name} lost its "
            f"episode: {describe_error(error)}",
            RuntimeWarning,
            stacklevel=4,
        )


def nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
