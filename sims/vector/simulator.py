"""The vector interface of all simulators: seeds and tasks in; images, states and instructions out.

A simulator implements how episodes start and step (`Simulator`). `VectorSim` adds what is common to all simulators:
ends of episodes, inactive rows, checks of actions, and counts of lost episodes.
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
from mmrl.runtime.user_code import settings_restored
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

MAX_IDLE_CHUNKS = 2  # consecutive chunks of which no action is executed
MAX_ACTIONS = 10_000  # of an episode


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
    """The result of `VectorSim.step`. `reward` to `valid` are [B, C] as in `Transition`; in rows that were not active
    they are 0 or False."""

    observation: Observation  # after the step; the return of a truncated episode is bootstrapped from it
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
    """B environments that persist across training steps, and step by chunks of actions.

    After the end of an episode a row keeps its last observation and ignores actions until `reset` or `restart`. The
    rest of a chunk is not executed after the end.

    simulator: steps the environments.
    shares: sets of rows that different threads may step at the same time; None: all rows are one share.
    name: the simulator's name in messages; None: its class's name.
    patience_s: seconds after which a warning is logged if a call of the simulator has not returned; after ten times as
        long, this process ends. None: never, for simulators with deadlines of their own.
    counters: nan_actions (numbers that were not finite), dropped_episodes, restarts (of workers).

    An episode is dropped if the simulator reports or raises an error, gives a state or reward that is not finite,
    executes no action of MAX_IDLE_CHUNKS consecutive chunks, or does not end within MAX_ACTIONS actions. Transitions
    must have the shapes and types of `Transition`: if the first one does not, UserError is raised; later, the episodes
    are dropped.

    Environments with the same seed and task are a group: their first observations are equal bit for bit.
    """

    def __init__(
        self,
        simulator: Simulator,
        *,
        shares: Sequence[NDArray[np.int64]] | None = None,
        name: str | None = None,
        patience_s: float | None = None,
    ):
        """shares: rows that step together; None: all rows do. name: for messages. patience_s: seconds after which a
        warning says that a call of the simulator takes long; None: never."""
        self.name = name or type(simulator).__name__
        check_facts(self.name, simulator)
        self.simulator = simulator
        self.cameras = cameras_of(simulator)
        self.shares = [np.arange(simulator.count)] if shares is None else list(shares)
        self.counters = Counter(nan_actions=0, dropped_episodes=0, restarts=0)
        self.seeds: list[int] = []  # of each row's episode
        self.tasks: list[str] = []  # of each row's episode
        self._running = np.zeros(simulator.count, bool)
        self._idle_chunks = np.zeros(simulator.count, np.int64)  # consecutive chunks without an executed action
        self._actions_taken = np.zeros(simulator.count, np.int64)  # in the running episode
        self._watch = CallWatch(self.name, patience_s)
        self._validated: set[str] = set()  # calls (reset, step) that have given a valid transition
        self._any_started = False  # whether any episode ever started
        self._observation: Observation | None = None
        self._lock = threading.Lock()  # guards the state that shares have in common

    def __len__(self) -> int:
        return self.simulator.count

    @property
    def running(self) -> NDArray[np.bool_]:
        """Mask [B] of the environments that are inside an episode."""
        return self._running.copy()

    def reset(self, seeds: Sequence[int], tasks: Sequence[str]) -> Observation:
        """Starts an episode in each of the first len(seeds) rows, at most B. The others are idle, with black images.

        Raises UserError for a wrong number of seeds or tasks, a negative seed or an unknown task. If no episode can be
        started it raises UserError too, unless one has started before; then these episodes are dropped.
        """
        if not 0 < len(seeds) <= len(self) or len(tasks) != len(seeds):
            raise UserError(
                f"reset() of {len(self)} environments needs 1 to {len(self)} seeds and as many tasks, not {len(seeds)} "
                f"seeds and {len(tasks)} tasks"
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
        self._any_started |= not all(dropped)
        if not self._any_started and dropped[0] is not None:
            raise UserError(
                f"simulator {self.name!r}: no environment could be reset; the first error: {describe_error(dropped[0])}"
            ) from dropped[0]
        return self.observation()

    def restart(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Observation:
        """Starts new episodes in `rows`, whose episodes have ended, while other rows continue.

        Raises UserError for a row with a running episode or none so far, and for seeds and tasks as `reset`.
        """
        with self._lock:
            busy = [row for row in rows if row >= len(self.seeds) or self._running[row]]
            if busy:
                why = "it never had an episode" if busy[0] >= len(self.seeds) else "its episode is running"
                raise UserError(f"environment {busy[0]} cannot restart: {why}")
            self._check_starts(seeds, tasks)
            for row, seed, task in zip(rows, seeds, tasks, strict=True):
                self.seeds[row], self.tasks[row] = int(seed), task
            self._start(np.asarray(rows, dtype=np.int64))
            return self.observation()

    def step(self, actions: ArrayLike, active: ArrayLike | None = None) -> Step:
        """Executes a chunk of `actions` [B, C, A] in the rows that are running and `active` ([B] bool; None: all).

        Numbers that are not finite are replaced by 0 and counted. A row whose simulator fails is `dropped`: its episode
        ends, and valid is False. Raises UserError for actions of another shape.
        """
        current, chunk, rows = self._checked(active), self._actions(actions), self._rows(active)
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
                current.images[rows[~lost]] = transition.images[~lost]
                current.state[rows[~lost]] = transition.state[~lost]
            self._running &= ~(out.terminated.any(1) | out.truncated.any(1) | dropped)
            flags = (out.reward, out.terminated, out.truncated, out.success, out.valid, dropped)
            return Step(self.observation(), *flags)

    def expert(self, active: ArrayLike | None = None, *, length: int = 1) -> NDArray[np.float32]:
        """Returns the next `length` actions of the scripted expert, [B, length, A]; 0 for rows that are not active or
        not running. Raises UserError if the simulator has no expert."""
        self._checked(active)
        actions = np.zeros((len(self), length, self.simulator.action_dim), np.float32)
        rows = self._rows(active)
        if len(rows):
            shape = (len(rows), length, self.simulator.action_dim)
            try:
                with self._watch.over("call of the expert"):
                    proposed = self.simulator.expert(rows.tolist(), length)
                actions[rows] = checked_actions(self.name, proposed, shape)
            except UserError:
                raise
            except Exception as error:
                self.drop(rows, f"its expert failed: {describe_error(error)}")
        return actions

    def drop(self, rows: NDArray[np.int64], reason: str) -> None:
        """Ends the running episodes of `rows` as dropped, counts them, and warns with the reason."""
        with self._lock:
            for row in rows:
                self._report_loss(int(row), SimulatorFault(reason))
            self._running[rows] = False

    def observation(self) -> Observation:
        """Returns a copy of the current observations of all environments; ended ones keep their last one."""
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
        """Returns the current observation. Raises UserError before the first reset, and if `active` is not [B] bool."""
        if self._observation is None:
            raise UserError("reset(seeds, tasks) must be called before any other method of a simulator")
        if active is not None and (np.shape(active) != (len(self),) or np.asarray(active).dtype != bool):
            flags = np.asarray(active)
            raise UserError(f"active must be bool of shape ({len(self)},), not {flags.dtype} of shape {flags.shape}")
        return self._observation

    def _rows(self, active: ArrayLike | None) -> NDArray[np.int64]:
        """Returns the indices of the rows that are running and `active`."""
        return np.flatnonzero(self._running if active is None else self._running & np.asarray(active))

    def _actions(self, actions: ArrayLike) -> NDArray[np.float64]:
        """Returns actions as an array. Raises UserError unless they are [B, C, A] with C at least 1."""
        chunk = np.asarray(actions, dtype=np.float64)
        num_envs, action_dim = len(self), self.simulator.action_dim
        if chunk.ndim != 3 or (chunk.shape[0], chunk.shape[2]) != (num_envs, action_dim) or chunk.shape[1] == 0:
            raise UserError(
                f"actions must have shape [environments, chunk, action] = [{num_envs}, C, {action_dim}] with C at "
                f"least 1, not {list(chunk.shape)}"
            )
        return chunk

    def _start(self, rows: NDArray[np.int64]) -> list[Exception | None]:
        """Starts episodes in `rows` with self.seeds and self.tasks. Returns the error of each row, or None."""
        assert self._observation is not None
        seeds, tasks = [self.seeds[row] for row in rows], [self.tasks[row] for row in rows]
        started = self._call_simulator(
            "reset", len(rows), None, lambda: self.simulator.reset(rows.tolist(), seeds, tasks)
        )
        lost = self._count_lost(rows, started)
        self._running[rows], self._idle_chunks[rows], self._actions_taken[rows] = ~lost, 0, 0
        self._observation.images[rows], self._observation.state[rows] = started.images, started.state
        for row in rows[~lost]:
            self._observation.instructions[row] = self._instruction(int(row))
        return started.errors

    def _instruction(self, row: int) -> str:
        """Returns the instruction of a row. Raises UserError if the simulator gives no text."""
        text = self.simulator.instruction(row)
        if not isinstance(text, str):
            raise UserError(f"simulator {self.name!r}: instruction must give text, not {type(text).__name__}")
        return text

    def _step(self, rows: NDArray[np.int64], chunk: NDArray[np.float64]) -> Transition:
        """Executes a chunk [row, action, number] in `rows`. A row gets an error if it exceeds MAX_IDLE_CHUNKS or
        MAX_ACTIONS."""
        length = chunk.shape[1]
        transition = self._call_simulator("step", len(rows), length, lambda: self.simulator.step(rows.tolist(), chunk))
        ended: NDArray[np.bool_] = np.any(transition.terminated | transition.truncated, axis=1)
        self._idle_chunks[rows] = np.where(transition.valid.any(1) | ended, 0, self._idle_chunks[rows] + 1)
        self._actions_taken[rows] += transition.valid.sum(1)
        for i, row in enumerate(rows):
            if transition.errors[i] is None and self._idle_chunks[row] >= MAX_IDLE_CHUNKS:
                transition.errors[i] = SimulatorFault(f"it executed no action in {MAX_IDLE_CHUNKS} chunks in a row")
            elif transition.errors[i] is None and not ended[i] and self._actions_taken[row] > MAX_ACTIONS:
                transition.errors[i] = SimulatorFault(
                    f"its episode has not ended after {self._actions_taken[row]} actions"
                )
        return transition

    def _call_simulator(self, call: str, rows: int, length: int | None, ask: Callable[[], Transition]) -> Transition:
        """Runs `ask`, which calls the simulator's reset or step. Returns its transition if that is valid, else one in
        which each row has an error. Raises UserError if the first transition is invalid.

        call: "reset" or "step"; rows, length: the transition's number of rows and actions (None: a reset).
        """
        try:
            with self._watch.over(call), settings_restored(f"simulator {self.name}"):
                transition = ask()
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            fault = error if isinstance(error, Exception) else SimulatorFault(describe_error(error))
            return lost_transition(rows, length or 0, self.simulator, fault)
        if (problem := misfit(transition, rows, length, self.simulator)) is None:
            self._validated.add(call)
            mark_nonfinite(transition)
            return transition
        if call not in self._validated:
            raise UserError(f"simulator {self.name!r}: {call} {problem}")
        return lost_transition(rows, length or 0, self.simulator, SimulatorFault(f"{call} {problem}"))

    def _count_lost(self, rows: NDArray[np.int64], transition: Transition) -> NDArray[np.bool_]:
        """Counts restarts of workers and rows with an error, and warns of these rows. Returns which they are, [row]
        bool."""
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
    """Returns " (did you mean ...?)" with the name most similar to `name`, or "" if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
