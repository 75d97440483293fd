"""Meta-World's fifty tasks (Yu et al. 2019; version 3) as a simulator, with their scripted experts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
from metaworld.policies import ENV_POLICY_MAP
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.sims.metaworld.tasks import INSTRUCTIONS
from mmrl.sims.mujoco.gl import Renderer, choose_backend
from mmrl.sims.vector.rows import EnvironmentRows
from mmrl.sims.vector.simulator import Transition, nearest

MAX_STEPS = 500  # Meta-World raises an error if an episode is longer
MAX_GEOMS = 1000  # geometries that the renderer has room for
ACTION_DIM, STATE_DIM, ROBOT_DIM = 4, 39, 4
CAMERAS = ("corner", "corner2", "corner3", "corner4")  # mounted upside down


class MetaWorld:
    """Meta-World's tasks as a simulator, under Meta-World's ids, such as reach-v3.

    An action is [4], -1 to 1: the hand's displacement along x, y and z, and the fingers (above 0 closes). The seed
    determines the positions of objects and goals.

    observation: "state": all 39 numbers of Meta-World, with the goal, and images of 0 x 0 pixels; "rgb": the image of
        `camera`, the hand's position and the opening of its fingers.
    image_size: height and width of the images, in pixels.
    camera: corner, corner2, corner3 or corner4.
    reward: "sparse": 1 at each step after which the task is solved; "dense": Meta-World's reward divided by 10.
    end_on_success: whether the first success ends the episode.
    max_steps: of an episode, up to 500.

    metaworld pins a version of mujoco that mmrl's other parts do not work with. Install it in a virtual environment of
    its own, and set `python` of `mmrl.sims.build` to the interpreter there.
    """

    action_dim, tasks = ACTION_DIM, tuple(INSTRUCTIONS)

    def __init__(
        self,
        count: int,
        *,
        observation: Literal["state", "rgb"] = "state",
        image_size: int = 64,
        camera: str = "corner2",
        reward: Literal["sparse", "dense"] = "sparse",
        end_on_success: bool = True,
        max_steps: int = MAX_STEPS,
    ):
        for name, value, options in (
            ("observation", observation, ("state", "rgb")),
            ("camera", camera, CAMERAS),
            ("reward", reward, ("sparse", "dense")),
        ):
            if value not in options:
                raise UserError(
                    f"metaworld: unknown {name} {value!r}{nearest(value, options)}; known: {', '.join(options)}"
                )
        if not 1 <= max_steps <= MAX_STEPS:
            raise UserError(f"metaworld: max_steps must be 1 to {MAX_STEPS}, not {max_steps}")
        if image_size < 8:
            raise UserError(f"metaworld: image_size must be at least 8 pixels, not {image_size}")
        self._shows_images, self._size, self._camera = observation == "rgb", image_size, camera
        self._dense, self._end_on_success, self._max_steps = reward == "dense", end_on_success, max_steps
        self.count, self.state_dim = count, ROBOT_DIM if self._shows_images else STATE_DIM
        self.image_shape = (image_size, image_size, 3) if self._shows_images else (0, 0, 3)
        self._rows = EnvironmentRows[MetaWorldRow](count)
        self._renderers: dict[str, Renderer] = {}  # by task: all models of a task have the same meshes

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`, with its seed and task. Returns their first observations, and the error
        of each row that failed."""
        out = Transition.empty(len(rows), 0, self.image_shape, self.state_dim)

        def start(i: int, row: int) -> None:
            """Starts the i-th of the requested episodes in `row`; makes its environment unless it has the task
            already."""
            playing = self._rows.get(row)
            if playing is None or playing.task != tasks[i]:
                self._rows[row] = playing = MetaWorldRow(tasks[i])
            playing.start(seeds[i])
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
        return INSTRUCTIONS[self._rows[row].task]

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns the expert's next `length` actions in each of `rows`, [row, length, 4]; zeros after the episode's
        end."""
        actions = np.zeros((len(rows), length, ACTION_DIM), np.float32)
        for i, row in enumerate(rows):
            playing = self._rows[row]
            playing.plan(actions[i, : self._max_steps - playing.steps], self._end_on_success)
        return actions

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._rows, self._renderers = EnvironmentRows(self.count), {}

    def _play(self, playing: MetaWorldRow, actions: NDArray, out: Transition, i: int) -> None:
        """Executes actions [chunk, 4] until the episode ends, and writes row i of `out`."""
        for c, action in enumerate(actions):
            success, reward = playing.act(action)
            out.valid[i, c], out.success[i, c] = True, success
            out.reward[i, c] = reward / 10 if self._dense else success  # Meta-World's dense rewards go up to 10
            out.terminated[i, c] = success and self._end_on_success
            out.truncated[i, c] = not out.terminated[i, c] and playing.steps >= self._max_steps
            if out.terminated[i, c] or out.truncated[i, c]:
                break

    def _show(self, playing: MetaWorldRow, out: Transition, i: int) -> None:
        """Writes the state, and the rendered image if there are images, into row i of `out`."""
        out.state[i] = playing.observation[: self.state_dim]
        if self._shows_images:
            model = playing.env.model
            if playing.task not in self._renderers:
                self._renderers[playing.task] = Renderer(model, choose_backend(), self._size, MAX_GEOMS)
            camera = model.camera(self._camera).id
            # flipped along both axes, since the cameras are mounted upside down
            self._renderers[playing.task].render(model, playing.env.data, out.images[i, ::-1, ::-1], camera)


class MetaWorldRow:
    """An environment of one task with its running episode."""

    def __init__(self, task: str):
        """Makes the environment and the expert of a task."""
        self.task, self.env = task, ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"](seed=0)
        self.env._freeze_rand_vec, self.env.seeded_rand_vec = False, True  # else every episode starts like the first
        self._expert = ENV_POLICY_MAP[task]()
        quality = self.env.model.vis.quality
        quality.shadowsize = quality.offsamples = 0  # nearly the whole cost of an image on a CPU
        self.env.model.light_castshadow[:] = 0
        self.observation, self.steps = np.zeros(STATE_DIM), 0

    def start(self, seed: int) -> None:
        """Starts the episode of a seed."""
        self.env.seed(seed)
        self.observation, _ = self.env.reset()
        self.steps = 0

    def act(self, action: NDArray) -> tuple[bool, float]:
        """Executes an action [4]. Returns whether the task is then solved, and Meta-World's reward, 0 to 10."""
        self.observation, reward, _, _, info = self.env.step(np.clip(action, -1, 1).astype(np.float32))
        self.steps += 1
        return bool(info["success"]), float(reward)

    def plan(self, out: NDArray, end_on_success: bool) -> None:
        """Writes the expert's next actions into `out` [n, 4]. To plan them it executes them, and then restores the
        state."""
        attributes = vars(self.env)
        before = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in attributes.items()}
        observation, steps = self.observation, self.steps
        self.env.data = copy.copy(self.env.data)
        for c in range(len(out)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the expert warns if it asks for more than the hand can do
                out[c] = np.clip(self._expert.get_action(self.observation), -1, 1)
            # the last planned action need not be executed
            if c + 1 < len(out) and self.act(out[c])[0] and end_on_success:
                break
        attributes.update(before)
        self.observation, self.steps = observation, steps
