"""OGBench's scene (arXiv 2410.20092) as a simulator: an arm, a cube, two buttons, a drawer and a window."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.sims.mujoco.gl import Renderer, choose_backend
from mmrl.sims.spaces import folded
from mmrl.sims.vector.rows import EnvironmentRows
from mmrl.sims.vector.simulator import Transition, nearest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns that there is no display
    from ogbench.manipspace.envs.scene_env import SceneEnv
    from ogbench.manipspace.oracles.markov.button_markov import ButtonMarkovOracle
    from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle
    from ogbench.manipspace.oracles.markov.drawer_markov import DrawerMarkovOracle
    from ogbench.manipspace.oracles.markov.window_markov import WindowMarkovOracle

EXPERTS: dict[str, Any] = {
    "button": ButtonMarkovOracle,
    "drawer": DrawerMarkovOracle,
    "window": WindowMarkovOracle,
    "cube": CubeMarkovOracle,
}
ACTION_DIM, SCENE_DIM, ROBOT_DIM, GOAL_DIM = 5, 40, 19, 3
CENTRE, METRES = np.array([0.425, 0.0, 0.0]), 10.0  # origin and scale (per metre) of positions in OGBench's observation
TRIES = 1000  # worlds that are generated at most to find one with the task
STRIDE = 1 << 20  # between the seeds of these worlds
MAX_GEOMS = 400  # geometries that the renderer has room for
LEAST = 0.4  # minimum length of an expert's move, as a fraction of the maximum; shorter ones are hard to learn from


class OGBench:
    """OGBench's scene as a simulator. Tasks: press a button, open or close the drawer or the window, or move the cube
    to the mark.

    An action is [5], -1 to 1: the hand's displacement along x, y and z, its rotation, and the fingers (above 0 closes).
    The seed determines positions and the goal. Worlds whose drawer or window is locked are skipped if the task moves
    it.

    observation: "state": the 40 numbers of OGBench and the goal of the cube (0 in other tasks), and images of 0 x 0
        pixels; "rgb": an image from the front, and the robot's own 19 numbers.
    image_size: height and width of the images, in pixels.
    max_steps: of an episode.
    reward: "sparse": 1 for the step that solves the task; "shaped": in addition, by how many decimetres the step has
        shortened the path from the hand to the object and from there to its goal.
    sides: whether instructions name the side of a button and say open or close; otherwise the verb for a drawer or
        window is "move". The goal is always the opposite of the start, so that the state tells which is meant.
    """

    action_dim, tasks = ACTION_DIM, tuple(EXPERTS)

    def __init__(
        self,
        count: int,
        *,
        observation: Literal["state", "rgb"] = "state",
        image_size: int = 64,
        max_steps: int = 80,
        reward: Literal["sparse", "shaped"] = "sparse",
        sides: bool = True,
    ) -> None:
        if observation not in ("state", "rgb"):
            near = nearest(observation, ("state", "rgb"))
            raise UserError(f"ogbench: unknown observation {observation!r}{near}; known: state, rgb")
        if image_size < 8:
            raise UserError(f"ogbench: image_size must be at least 8 pixels, not {image_size}")
        if max_steps < 1:
            raise UserError(f"ogbench: max_steps must be at least 1, not {max_steps}")
        if reward not in ("sparse", "shaped"):
            raise UserError(f"ogbench: reward must be 'sparse' or 'shaped', not {reward!r}")
        self._shaped, self._sides = reward == "shaped", sides
        self._shows_images, self._size, self._max_steps = observation == "rgb", image_size, max_steps
        self.count, self.state_dim = count, ROBOT_DIM if self._shows_images else SCENE_DIM + GOAL_DIM
        self.image_shape = (image_size, image_size, 3) if self._shows_images else (0, 0, 3)
        self._rows = EnvironmentRows[OGBenchRow](count)
        self._worlds: dict[tuple[str, int], int] = {}  # task and seed: the seed of the world that has the task
        self._renderer: Renderer | None = None  # one for all: their models have the same meshes

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`, with its seed and task. Returns their first observations, and the error
        of each row that failed."""
        out = Transition.empty(len(rows), 0, self.image_shape, self.state_dim)

        def start(i: int, row: int) -> None:
            """Starts the i-th of the requested episodes in `row`, and stores which world had the task."""
            playing = self._rows.get(row) or OGBenchRow()
            self._rows[row] = playing
            key = (tasks[i], seeds[i])
            self._worlds[key] = playing.start(tasks[i], self._worlds.get(key, folded(seeds[i])))
            self._show(playing, out, i)

        return self._rows.each(rows, out, start)

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        """Executes a chunk of actions [row, chunk, action] in `rows`. Returns observations, rewards and ends of
        episodes, and the error of each row that failed."""
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, self.state_dim)

        def move(i: int, row: int) -> None:
            """Executes the i-th chunk of actions in `row`."""
            self._play(self._rows[row], actions[i], out, i)
            self._show(self._rows[row], out, i)

        return self._rows.each(rows, out, move)

    def instruction(self, row: int) -> str:
        return self._rows[row].instruction(self._sides)

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns the expert's next action in each of `rows`, [row, 1, 5]. Raises UserError if `length`, the number of
        actions to plan, is not 1."""
        if length != 1:
            raise UserError(
                f"OGBench's experts plan one action at a time; length (action.chunk) must be 1, not {length}"
            )
        return np.stack([self._rows[row].expert_action()[None] for row in rows])

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self._rows, self._renderer = EnvironmentRows(self.count), None

    def _play(self, playing: OGBenchRow, actions: NDArray, out: Transition, i: int) -> None:
        """Executes actions [chunk, 5] until the episode ends, and writes row i of `out`."""
        before = playing.path_length
        for c, action in enumerate(actions):
            success = playing.act(action)
            out.valid[i, c], out.success[i, c], out.reward[i, c] = True, success, float(success)
            if self._shaped:
                after = playing.path_length
                out.reward[i, c], before = out.reward[i, c] + METRES * (before - after), after
            out.terminated[i, c] = success
            out.truncated[i, c] = not success and playing.steps >= self._max_steps
            if success or out.truncated[i, c]:
                break

    def _show(self, playing: OGBenchRow, out: Transition, i: int) -> None:
        """Writes the state, and the rendered image if there are images, into row i of `out`."""
        out.state[i] = playing.state[: self.state_dim]
        if self._shows_images:
            model = playing.env.model
            if self._renderer is None:
                self._renderer = Renderer(model, choose_backend(), self._size, MAX_GEOMS)
            self._renderer.render(model, playing.env.data, out.images[i], model.camera("front_pixels").id)


class OGBenchRow:
    """An environment with its running episode."""

    def __init__(self) -> None:
        # In this mode a world has one task, and info says which.
        self.env = SceneEnv("scene", mode="data_collection", visualize_info=True)
        self.steps, self.observation, self.info = 0, np.zeros(SCENE_DIM), dict[str, Any]()
        self._expert: Any = None

    def start(self, task: str, seed: int) -> int:
        """Starts an episode in the first world with the task, beginning with the world of `seed`. Returns the seed of
        that world. Raises UserError after TRIES worlds."""
        for number in range(TRIES):
            world = (seed + number * STRIDE) % 2**32
            self.observation, self.info = self.env.reset(seed=world)
            if self.info["privileged/target_task"] == task and not self._locked(task):
                break
        else:
            raise UserError(f"ogbench: none of {TRIES} random worlds has task {task!r}; choose another seed or task")
        quality = self.env.model.vis.quality
        quality.shadowsize = quality.offsamples = 0  # nearly the whole cost of an image on a CPU
        self.steps, self._expert = 0, None
        return world

    def act(self, action: NDArray) -> bool:
        """Executes an action [5]. Returns whether the task is then solved."""
        self.observation, _, _, _, self.info = self.env.step(np.clip(action, -1, 1))
        self.steps += 1
        return bool(self.info["success"])

    def expert_action(self) -> NDArray[np.float32]:
        """Returns the expert's next action [5]."""
        if self._expert is None:
            self._expert = EXPERTS[self.info["privileged/target_task"]](env=self.env, min_norm=LEAST)
            before = np.random.get_state()  # reset samples from numpy's global generator, which must not change
            self._expert.reset(self.observation, self.info)
            np.random.set_state(before)
        return np.asarray(self._expert.select_action(self.observation, self.info), np.float32)

    def instruction(self, sides: bool = True) -> str:
        """Returns the instruction of the world. sides: whether it names the side or direction, see `OGBench`."""
        info, task = self.info, self.info["privileged/target_task"]
        if task == "button":
            return f"press the {('left', 'right')[info['privileged/target_button']]} button"
        if task == "cube":
            return "move the cube to the mark"
        if not sides:
            return f"move the {task}"
        opened = info[f"privileged/target_{task}_pos"][0] != 0
        return f"{'open' if opened else 'close'} the {task}"

    @property
    def state(self) -> NDArray[np.float64]:
        """The state [SCENE_DIM + GOAL_DIM], the robot's own numbers first."""
        goal = np.zeros(GOAL_DIM)
        if self.info["privileged/target_task"] == "cube":
            goal = METRES * (self.info["privileged/target_block_pos"] - CENTRE)
        return np.concatenate([self.observation, goal])

    @property
    def path_length(self) -> float:
        """The distance from the hand to the object to move, plus that from the object to its goal, in metres."""
        info, task = self.info, self.info["privileged/target_task"]
        hand = info["proprio/effector_pos"]
        if task == "button":
            return distance(hand, info["privileged/target_button_top_pos"])
        object_key, goal_key = "block_0_pos", "target_block_pos"
        if task != "cube":
            object_key, goal_key = f"{task}_handle_pos", f"target_{task}_handle_pos"
        position, goal = info[f"privileged/{object_key}"], info[f"privileged/{goal_key}"]
        return distance(hand, position) + distance(position, goal)

    def _locked(self, task: str) -> bool:
        """Returns whether the task's drawer or window is locked until a button is pressed."""
        lock = {"drawer": 0, "window": 1}.get(task)
        return lock is not None and self.info[f"privileged/button_{lock}_state"] == 0


def distance(a: NDArray, b: NDArray) -> float:
    return float(np.linalg.norm(a - b))
