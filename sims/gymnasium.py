"""Any gymnasium vector environment as a simulator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.sims.spaces import ObservationReader, as_rgb, bounds_of, converter_of, folded, info_flags, misfit, names
from mmrl.sims.vector.simulator import Transition

_log = logging.getLogger(__name__)
RENDER, TERMINATED = "render", "terminated"
DEFAULT_TASK = "default"  # the name of the task if an environment has only one


class GymnasiumSimulator:
    """A gymnasium vector environment as a simulator (see `mmrl.sims.vector.transitions.Simulator`).

    env: an environment id, or a function `count -> VectorEnv`.
    image: what the policy sees: "render" for the result of render(), "" for an observation that is an image, or the
        name of an image in the observation. A nested image has a dotted name (pixels.top); a list of names is for
        several cameras; None: there is no image.
    state: names of states in the observation, likewise; None: the full observation if it is a Box, else nothing.
    instruction: one text for all episodes; a dict has an instruction for each of several tasks, and the task's name is
        passed to the environments as options={"task": name}.
    mission: the key of the instruction in a Dict observation, for environments whose instruction differs by episode.
    expert: a function that makes an expert of one environment: a callable that takes the last executed action (None at
        the start of an episode) and returns the next one. It needs a `SyncVectorEnv`.
    success: the key in info that says whether the task is solved, or "terminated" if each termination is a success. It
        has no default, since failures such as falls terminate episodes too.
    max_steps: truncates episodes after so many steps; None: only the environment does.
    kwargs: further arguments of the environment, if `env` is an id.
    fold_seeds: whether seeds are mapped below 2^31, see `mmrl.sims.spaces.folded`.

    Gymnasium steps all environments together. Rows whose episode has ended are stepped with zero actions, which takes
    time, and a running row cannot be left out. If one environment raises, the episodes of all rows are dropped.
    """

    def __init__(
        self,
        count: int,
        *,
        env: str | Callable[..., VectorEnv],
        image: str | Sequence[str] | None = RENDER,
        state: str | Sequence[str] | None = None,
        instruction: str | Mapping[str, str] = "",
        mission: str | None = None,
        expert: Callable[[gymnasium.Env], Callable[[Any], Any]] | None = None,
        success: str | None = None,
        max_steps: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        fold_seeds: bool = True,
    ):
        """Makes the environments, and resets them once for the shapes of their observations. Arguments: see the class.
        Raises UserError for options that do not fit the environment."""
        if success is None:
            raise UserError(
                f"gymnasium: task.options.success is missing; set it to the key of info that says whether {env!r} is "
                "solved, or to terminated if each termination of an episode is a success"
            )
        if mission is not None and instruction:
            raise UserError(
                f"gymnasium: task.options has both mission={mission} and an instruction; set one of them to null: with "
                "mission each episode has its own instruction, which the observation contains"
            )
        self._name = env if isinstance(env, str) else type(env).__name__
        self._env = _make(env, count, dict(kwargs or {}), renders=image == RENDER)
        self.count, self._image, self._success, self._fold = count, image, success, fold_seeds
        space = self._env.single_observation_space
        self._reader = ObservationReader(space, None if image == RENDER else names(image), names(state))
        self.cameras = self._reader.cameras if len(self._reader.cameras) > 1 else ("camera",)
        self._max_steps = max_steps
        if max_steps is not None and max_steps < 1:
            raise UserError(f"gymnasium: max_steps must be at least 1, not {max_steps}")
        self._success_checked = success == TERMINATED  # whether the key was seen in info, or the user was warned
        self._instructions = {DEFAULT_TASK: instruction} if isinstance(instruction, str) else dict(instruction)
        self.tasks = tuple(self._instructions)
        self._converter = converter_of(env, self._env.single_action_space)
        self.action_dim, self.action_bounds = self._converter.dim, bounds_of(self._env.single_action_space)
        self._mission, self._missions = mission, ["" for _ in range(count)]
        self._make_expert = expert
        self._experts: dict[int, Callable[[Any], Any]] = {}  # by row, of the running episodes
        self._last_actions: list[Any] = [None for _ in range(count)]  # the last executed action of each row's episode
        self._task, self._steps = ["" for _ in range(count)], np.zeros(count, np.int64)
        self._running = np.zeros(count, bool)  # rows with a running episode
        self._needs_reset = np.zeros(count, bool)  # rows whose environment has ended and was not reset
        images, states = self._observe(self._first_observation())
        self.image_shape, self.state_dim = images.shape[1:], states.shape[1]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`, with its seed and task. Returns their first observations, and an error
        for all rows if an environment raised."""
        out = Transition.empty(len(rows), 0, self.image_shape, self.state_dim)
        try:
            for task in dict.fromkeys(tasks):
                indices = [i for i in range(len(rows)) if tasks[i] == task]
                images, states = self._restart([rows[i] for i in indices], [seeds[i] for i in indices], task)
                for i in indices:
                    out.images[i], out.state[i] = images[rows[i]], states[rows[i]]
        except UserError:
            raise
        except Exception as error:  # gymnasium does not say which environment raised
            out.errors = [error] * len(rows)
        return out

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        """Executes a chunk of actions [row, chunk, action] in `rows`. Returns observations, rewards and ends of
        episodes, and an error for all rows if an environment raised."""
        if missing := [row for row in rows if not self._running[row]]:
            raise UserError(
                f"gymnasium steps all environments at once, but {missing} were inactive in an earlier step; reset them"
            )
        # Episodes of other rows are lost, since their environments are stepped, too.
        self._running &= np.isin(np.arange(self.count), rows)
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, self.state_dim)
        try:
            for column in range(actions.shape[1]):
                if self._running.any():
                    self._advance(list(rows), actions[:, column], out, column)
        except UserError:
            raise
        except Exception as error:
            out.errors = [error] * len(rows)
            self._running[:], self._needs_reset[:] = False, True
        return out

    def instruction(self, row: int) -> str:
        return self._instructions[self._task[row]] if self._mission is None else self._missions[row]

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns the expert's next action in each of `rows`, [row, 1, action]. Raises UserError if there is no expert,
        or if `length`, the number of actions to plan, is not 1."""
        vector = self._env.unwrapped
        if self._make_expert is None:
            raise UserError("this gymnasium environment has no expert; set task.options.expert")
        if not isinstance(vector, SyncVectorEnv):
            raise UserError(f"task.options.expert needs a SyncVectorEnv, not {type(vector).__name__}")
        if length != 1:
            raise UserError(
                f"a gymnasium expert plans one action at a time; length (action.chunk) must be 1, not {length}"
            )
        for row in rows:
            if row not in self._experts:
                self._experts[row] = self._make_expert(vector.envs[row])
        planned = [self._experts[row](self._last_actions[row]) for row in rows]
        return np.stack([self._converter.from_env(action)[None] for action in planned])

    def close(self) -> None:
        self._env.close()

    def _restart(self, rows: list[int], seeds: Sequence[int | None], task: str) -> tuple[NDArray, NDArray]:
        """Resets the environments of `rows`, each with its seed, to one task. Returns images [row, height, width, 3]
        and states [row, state] of all rows."""
        mask = np.zeros(self.count, bool)
        row_seeds: list[int | None] = [None] * self.count
        for row, seed in zip(rows, seeds, strict=True):
            row_seeds[row] = folded(seed) if self._fold and seed is not None else seed
            mask[row], self._task[row] = True, task
        options: dict[str, Any] = {}
        if not mask.all():
            if not isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
                raise UserError(
                    f"gymnasium: {type(self._env.unwrapped).__name__} cannot reset single environments; use a "
                    "SyncVectorEnv or AsyncVectorEnv"
                )
            options["reset_mask"] = mask
        if self.tasks != (DEFAULT_TASK,):
            options["task"] = task
        observation, _ = self._env.reset(seed=row_seeds, options=options)  # type: ignore[arg-type]
        self._running |= mask
        self._needs_reset &= ~mask
        self._steps[mask] = 0
        for row in rows:
            self._last_actions[row] = None
            self._experts.pop(row, None)
            if self._mission is not None:
                self._missions[row] = self._mission_text(observation, row)
        return self._observe(observation)

    def _advance(self, rows: list[int], actions: NDArray, out: Transition, column: int) -> None:
        """Steps all environments once with `actions` [len(rows), action], and writes a column of `out` for the rows
        with a running episode."""
        mode = self._env.metadata["autoreset_mode"]
        if mode is AutoresetMode.DISABLED and self._needs_reset.any():
            ended = np.flatnonzero(self._needs_reset).tolist()  # such environments must not be stepped
            running = self._running.copy()
            self._restart(ended, [None] * len(ended), self._task[ended[0]] or self.tasks[0])
            self._running = running  # the rows that were reset have no episode: they are only stepped along
        all_actions = np.zeros((self.count, self.action_dim))
        all_actions[rows] = actions
        executed = self._converter.to_env(all_actions)
        observation, reward, terminated, truncated, info = self._step(executed)
        for row in rows:
            self._last_actions[row] = executed[row]
        images, states = self._observe(observation)
        self._steps += 1
        if self._max_steps is not None:
            truncated = truncated | (self._steps >= self._max_steps)
        solved = terminated if self._success == TERMINATED else info_flags(info, self._success, self.count)
        self._needs_reset = np.asarray(terminated | truncated)
        self._success_checked |= self._success in info
        if not self._success_checked and self._needs_reset.any():
            self._success_checked = True
            _log.warning(
                "gymnasium: an episode ended, but info never had the key %r of task.options.success, so no episode is "
                "a success; info has the keys: %s",
                self._success,
                ", ".join(name for name in info if not name.startswith("_")) or "none",
            )
        for i, row in enumerate(rows):
            if self._running[row]:
                out.images[i], out.state[i], out.reward[i, column] = images[row], states[row], reward[row]
                out.valid[i, column], out.success[i, column] = True, bool(solved[row])
                out.terminated[i, column] = terminated[row]
                out.truncated[i, column] = truncated[row] and not terminated[row]
                self._running[row] = not self._needs_reset[row]

    def _first_observation(self) -> Any:
        """Resets all environments. Raises UserError if gymnasium cannot join their observations to a batch."""
        try:
            return self._env.reset(seed=0)[0]
        except (TypeError, ValueError) as error:
            vector = self._env.unwrapped
            wrong = (
                misfit(vector.single_observation_space, vector.envs[0]) if isinstance(vector, SyncVectorEnv) else None
            )
            if wrong is None:
                raise
            raise UserError(f"gymnasium environment {self._name!r}: {wrong}") from error

    def _step(self, executed: NDArray) -> tuple[Any, ...]:
        """Steps all environments with one action each. Raises UserError if step() returns 4 values."""
        try:
            return self._env.step(executed)
        except ValueError as error:
            if "expected 5, got 4" not in str(error):
                raise
            raise UserError(
                f"gymnasium environment {self._name!r}: step() returns 4 values, as before Gymnasium 0.26; it must "
                "return 5: observation, reward, terminated, truncated, info"
            ) from error

    def _mission_text(self, observation: object, row: int) -> str:
        """Returns a row's instruction from the observation. Raises UserError if it is not there."""
        keys = observation if isinstance(observation, dict) else {}
        if self._mission not in keys:
            raise UserError(
                f"gymnasium observation has no key {self._mission!r}; its keys: {', '.join(keys) or 'none'}; set "
                "task.options.mission to one of them, or to null"
            )
        return str(keys[self._mission][row])

    def _observe(self, observation: Any) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Returns images [row, height, width, 3] and states [row, state] of an observation. Raises UserError if there
        is no image."""
        state = self._reader.read_state(observation, self.count)
        if self._image is None:
            return np.zeros((self.count, 0, 0, 3), np.uint8), state
        if self._image != RENDER:
            return self._reader.read_images(observation), state
        rendered: Any = self._env.render()
        if rendered is None or any(image is None for image in rendered):
            raise UserError(
                f"gymnasium environment {self._name!r}: render() gives no image; set task.options.image to the name of "
                "an image in the observation, or to null if the policy sees no images"
            )
        return as_rgb(np.stack(rendered), "render()"), state


def _make(env: Any, count: int, kwargs: dict[str, Any], *, renders: bool) -> VectorEnv:
    """Makes a vector environment of `count` environments, from an id or by a function. renders: whether an environment
    made from an id gets render_mode="rgb_array". Raises UserError for an unknown id, and for an autoreset mode that
    hides the ends of episodes."""
    if not isinstance(env, str):
        vector_env = env(count, **kwargs)
    else:
        try:
            vector_env = gymnasium.make_vec(
                env,
                count,
                vectorization_mode="sync",
                vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
                **({"render_mode": "rgb_array"} if renders else {}) | kwargs,
            )
        except gymnasium.error.Error as error:
            raise UserError(f"gymnasium environment {env!r}: {error}") from error
        except TypeError as error:
            if "render_mode" not in str(error):
                raise
            raise UserError(
                f"gymnasium environment {env!r} does not accept render_mode, so render() gives no image; set "
                "task.options.image to the name of an image in the observation, or to null"
            ) from error
    if vector_env.num_envs != count:
        raise UserError(f"gymnasium: the vector environment must have {count} environments, not {vector_env.num_envs}")
    if vector_env.metadata.get("autoreset_mode") not in (AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP):
        raise UserError(
            "gymnasium: make the vector environment with autoreset_mode DISABLED or NEXT_STEP; others hide how an "
            "episode ended"
        )
    return vector_env
