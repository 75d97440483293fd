"""The tabletop as a simulator: one physics model and state per row, worker threads that step and render them."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.sims.mujoco import scene
from mmrl.sims.mujoco.arm import FINGER_TRAVEL, HIGH, HOME, LOW, inverse_kinematics
from mmrl.sims.mujoco.control import CONTROLS
from mmrl.sims.mujoco.gl import Renderer, choose_backend
from mmrl.sims.mujoco.tasks import COLOURS, TASKS, TabletopScene, TabletopTask, TableView, held
from mmrl.sims.vector.simulator import Transition, nearest

STATE_DIM, PRIVILEGED_DIM, ACTION_DIM = 5, 10, 4
DRAWS = 10_000  # random scenes that are tried at most to find a valid one
LEASH = 0.05  # metres that the setpoint may run ahead of a blocked arm
UNSTABLE = [  # MuJoCo's warnings of positions, velocities or accelerations that are not finite or too large
    int(kind)
    for kind in (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)
]
CAMERA_TARGET = np.array([0.405, 0.0, 0.05])
CAMERA_POSITION = np.array([0.95, 0.0, 0.8])


class TabletopRow:
    """A row of the tabletop: its model (with colors, pads and camera), its physics state and its episode."""

    def __init__(self, model: mujoco.MjModel, colours: list[str], control: str, shaped: bool, end_on_success: bool):
        """model: is copied, since each episode changes colors and positions in it. Others: see `Tabletop`."""
        self.model, self.data = copy.copy(model), mujoco.MjData(model)
        self.colours, self.shaped, self.end_on_success = colours, shaped, end_on_success
        self.control = CONTROLS[control]
        self.cubes = np.array([model.body(f"cube{i}").id for i in range(_cubes(model))])
        self.cube_geoms = [model.geom(f"cube{i}").id for i in range(len(self.cubes))]
        self.pads = [model.geom(f"pad{i}").id for i in range(scene.PADS)]
        self.cube_joints = [int(model.body(int(cube)).jntadr[0]) for cube in self.cubes]
        self.tip = model.site("tip").id
        self.task: TabletopTask = TASKS["reach"]
        self.scene: TabletopScene
        self.setpoint, self.closing, self.steps = HOME.copy(), False, 0

    def reset(self, seed: int, name: str) -> None:
        """Starts the episode of a seed in the task `name`."""
        # with the task in the seed, tasks do not share their scenes
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.task = TASKS[name]
        self.scene = self._draw(rng)
        mujoco.mj_resetData(self.model, self.data)
        self.setpoint, self.closing, self.steps = HOME + rng.uniform(-0.02, 0.02, 3), False, 0
        self.data.qpos[: scene.JOINTS] = inverse_kinematics(self.setpoint)
        self.data.qpos[scene.JOINTS : scene.JOINTS + 2] = FINGER_TRAVEL
        for joint, (x, y) in zip(self.cube_joints, self.scene.cubes, strict=True):
            yaw, start = rng.uniform(-0.15, 0.15), self.model.jnt_qposadr[joint]
            self.data.qpos[start : start + 7] = [x, y, scene.CUBE, np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]
        self._paint(rng)
        self._place_camera(rng)
        self._control()
        # The actuators smooth their targets over time; here they begin at the targets.
        self.data.act[:] = self.data.ctrl[: scene.JOINTS]
        mujoco.mj_forward(self.model, self.data)

    def _draw(self, rng: np.random.Generator) -> TabletopScene:
        """Samples a scene of the task. Raises RuntimeError if none of DRAWS samples is valid."""
        for _ in range(DRAWS):
            drawn = self.task.draw(rng, len(self.cubes), self.colours)
            if drawn is not None:
                return drawn
        raise RuntimeError(
            f"no valid scene with {len(self.cubes)} cubes in {DRAWS} random draws; lower task.options.objects"
        )

    def _paint(self, rng: np.random.Generator) -> None:
        """Sets the colors of the scene, with random shades, and the positions of its pads."""

        def shade(colour: str) -> NDArray:
            """Returns a random shade of a color, opaque: [RGBA], 0 to 1."""
            return np.append(np.clip(np.array(COLOURS[colour]) + rng.uniform(-0.06, 0.06, 3), 0, 1), 1)

        for geom, colour in zip(self.cube_geoms, self.scene.cube_colours, strict=True):
            self.model.geom_rgba[geom] = shade(colour)
        for i, geom in enumerate(self.pads):
            shown = i < len(self.scene.pads)  # others are transparent
            self.model.geom_rgba[geom] = shade(self.scene.pad_colours[i]) if shown else 0
            if shown:
                self.model.geom_pos[geom, :2] = self.scene.pads[i]
        table = self.model.geom("table").id
        self.model.geom_rgba[table, :3] = 0.5 + rng.uniform(-0.06, 0.06) + rng.uniform(-0.02, 0.02, 3)

    def _place_camera(self, rng: np.random.Generator) -> None:
        """Sets the camera's position and the point it looks at, both with a random displacement."""
        position, target = CAMERA_POSITION + rng.uniform(-0.015, 0.015, 3), CAMERA_TARGET + rng.uniform(-0.01, 0.01, 3)
        back = (position - target) / np.linalg.norm(position - target)
        right = np.cross([0, 0, 1], back)
        right /= np.linalg.norm(right)
        # columns of the camera's rotation matrix: its right, up and backward directions
        self.model.cam_pos[0] = position
        mujoco.mju_mat2Quat(self.model.cam_quat[0], np.stack([right, np.cross(back, right), back], axis=1).ravel())

    def act(self, action: NDArray) -> None:
        """Executes one control step with an action [4] of `control`; action[3] > 0 closes, < 0 opens, 0 changes
        nothing."""
        tip = self.data.site_xpos[self.tip]
        wanted = self.control.setpoint_after(self.setpoint, action, self.task.step)
        # at most LEASH away from the fingertips, and within their box
        self.setpoint = np.clip(np.clip(wanted, tip - LEASH, tip + LEASH), LOW, HIGH)
        self.closing = bool(action[3] > 0) if action[3] != 0 else self.closing
        self._control()
        mujoco.mj_step(self.model, self.data, scene.SUBSTEPS)
        mujoco.mj_forward(self.model, self.data)
        self.steps += 1
        if self.data.warning.number[UNSTABLE].any():
            raise RuntimeError(
                f"the physics became unstable at control step {self.steps} (MuJoCo reports positions or velocities "
                "that are not finite or too large), so the episode is lost; make actions smaller if this happens often"
            )

    def _control(self) -> None:
        """Sets the targets of all joints from the setpoint and the command of the gripper."""
        self.data.ctrl[: scene.JOINTS] = inverse_kinematics(self.setpoint)
        self.data.ctrl[scene.JOINTS :] = 0.0 if self.closing else FINGER_TRAVEL

    def view(self) -> TableView:
        """Returns what success, progress and experts read of the physics state."""
        cubes = self.data.xpos[self.cubes].copy()
        # on the first pad, or in scenes without pads on top of cube 1
        goal = np.append(self.scene.pads[0], scene.CUBE) if len(self.scene.pads) else cubes[1] + [0, 0, 2 * scene.CUBE]
        return TableView(
            tip=self.data.site_xpos[self.tip].copy(),
            opening=float(self.data.qpos[scene.JOINTS : scene.JOINTS + 2].mean() / FINGER_TRAVEL),
            closing=self.closing,
            cubes=cubes,
            speed=float(np.linalg.norm(self.data.cvel[self.cubes[0], 3:])),
            goal=goal,
        )

    def state(self) -> NDArray[np.float32]:
        """Returns [5]: the fingertips within their box, -1 to 1 (3); the gripper's opening, 0 to 1; 1 if it is
        commanded to close, else -1."""
        view = self.view()
        tip = 2 * (view.tip - LOW) / (HIGH - LOW) - 1
        return np.array([*tip, view.opening, 1.0 if view.closing else -1.0], dtype=np.float32)

    def run(self, actions: NDArray, out: Transition, i: int) -> None:
        """Executes `actions` [C, 4] until the episode ends and writes row `i` of `out`, all but the image."""
        before = self.task.progress(self.view()) if self.shaped else 0.0
        for c, action in enumerate(actions):
            self.act(action)
            view = self.view()
            success = self.task.success(view)
            out.valid[i, c], out.success[i, c] = True, success
            if self.shaped:
                after = self.task.progress(view)
                out.reward[i, c], before = after - before, after
            out.reward[i, c] += success
            out.terminated[i, c] = success and self.end_on_success
            out.truncated[i, c] = not out.terminated[i, c] and self.steps >= self.task.max_steps
            if out.terminated[i, c] or out.truncated[i, c]:
                break

    def plan(self, length: int, spare: mujoco.MjData, out: NDArray) -> None:
        """Writes the expert's next actions into `out` [length, 4] and leaves the rows after the episode's end as they
        are. The actions are executed in `spare`, a scratch copy of the physics state."""
        mujoco.mj_copyData(spare, self.model, self.data)
        saved = self.data, self.setpoint, self.closing, self.steps
        self.data = spare
        try:
            for c in range(min(length, self.task.max_steps - self.steps)):
                out[c] = self.control.action(self.setpoint, self.task.expert(self.view()), self.task.step)
                if c + 1 < length:  # the last planned action need not be executed
                    self.act(out[c].astype(np.float64))
                    if self.end_on_success and self.task.success(self.view()):
                        break
        finally:
            self.data, self.setpoint, self.closing, self.steps = saved


def _cubes(model: mujoco.MjModel) -> int:
    """Returns the number of cubes in a model."""
    return sum(1 for i in range(model.nbody) if model.body(i).name.startswith("cube"))


def privileged_state(view: TableView) -> NDArray[np.float32]:
    """Returns the state that a camera cannot measure exactly, [10]; see `Tabletop` for its numbers."""
    cube = view.cubes[0]
    # times 10: metres to decimetres; held / 10 times 10 is 0 or 1
    return np.array([*(cube - view.tip), *(view.goal - cube), *cube, held(view) / 10], np.float32) * 10


class RenderThread:
    """A thread with its own renderer, and with spare physics data in which experts plan."""

    def __init__(self, model: mujoco.MjModel, image_size: int):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tabletop")
        self.spare = mujoco.MjData(model)
        self.renderer: Renderer = self._pool.submit(Renderer, model, choose_backend(), image_size).result()

    def submit(self, function: Callable[..., None], *arguments: object) -> Future[None]:
        """Calls function(self, *arguments) in the thread."""
        return self._pool.submit(function, self, *arguments)

    def close(self) -> None:
        self._pool.submit(self.renderer.close).result()
        self._pool.shutdown()


class Tabletop:
    """An arm on a table with coloured cubes and pads; tasks reach, push, lift, pick_and_place and stack.

    An action is [4]: three numbers for the fingertips, along x (away from the arm, towards the camera), y (to the right
    in the image) and z (up), and the gripper (above 0 closes, below opens, 0 leaves it). 20 actions make a second.
    The state is [5], see `TabletopRow.state`.

    image_size: height and width of the images, in pixels.
    objects: cubes on the table, 2 to 4.
    colours: names from COLOURS, at least 2.
    control: meaning of the three numbers: "delta", the displacement of the fingertips, -1 to 1 for up to 3 cm each;
        "position", their target, -1 to 1 from corner to corner of their box, to which they move 3 cm at most. In the
        task push it is 1.6 cm instead of 3.
    reward: "sparse" gives 1 at every step that is solved; "shaped" adds the gain in progress (0 to 1) of that step.
    end_on_success: whether the first success ends the episode; otherwise it continues until its time is up.
    privileged: whether [10] numbers follow in the state that no camera measures: the vector from the fingertips to
        cube 0 (3), from there to its goal (3) and its position (3), in decimetres, and whether it is held. They are
        meant for critics alone: action.privileged=10.
    threads: number of threads that step and render, on which results do not depend. 0: one per processor.
    """

    action_dim = ACTION_DIM
    tasks = tuple(TASKS)

    def __init__(
        self,
        count: int,
        *,
        image_size: int = 64,
        objects: int = 3,
        colours: Sequence[str] = tuple(COLOURS),
        control: Literal["delta", "position"] = "delta",
        reward: Literal["sparse", "shaped"] = "sparse",
        end_on_success: bool = True,
        privileged: bool = False,
        threads: int = 0,
    ):
        if image_size < 8:
            raise UserError(f"tabletop: image_size must be at least 8 pixels, not {image_size}")
        if not 2 <= objects <= 4:
            raise UserError(f"tabletop: objects must be 2 to 4, not {objects}")
        if control not in CONTROLS:
            raise UserError(f"tabletop: control must be 'delta' or 'position', not {control!r}")
        if reward not in ("sparse", "shaped"):
            raise UserError(f"tabletop: reward must be 'sparse' or 'shaped', not {reward!r}")
        for colour in colours:
            if colour not in COLOURS:
                names = ", ".join(COLOURS)
                raise UserError(f"tabletop: unknown colour {colour!r}{nearest(colour, COLOURS)}; known: {names}")
        if len(set(colours)) < 2:
            raise UserError(f"tabletop: colours must be at least 2 different colours, not {list(colours)}")
        if threads < 0:
            raise UserError(f"tabletop: threads must not be negative, but is {threads}")
        self.count, self.image_shape = count, (image_size, image_size, 3)
        self.state_dim = STATE_DIM + PRIVILEGED_DIM * privileged
        model = scene.compile_model(objects, image_size)
        self._worlds = [
            TabletopRow(model, list(colours), control, reward == "shaped", end_on_success) for _ in range(count)
        ]
        threads = min(count, threads or len(os.sched_getaffinity(0)))
        self._workers = [RenderThread(model, image_size) for _ in range(threads)]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`, with its seed and task. Returns their first observations, and the error
        of each row that failed."""
        out = Transition.empty(len(rows), 0, self.image_shape, self.state_dim)

        def start(worker: RenderThread, i: int) -> None:
            """Starts the i-th of the requested episodes."""
            world = self._worlds[rows[i]]
            world.reset(seeds[i], tasks[i])
            self._show(worker, world, out, i)

        out.errors = self._each(start, len(rows))
        return out

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        """Executes a chunk of actions [row, chunk, action] in `rows`. Returns observations, rewards and ends of
        episodes, and the error of each row that failed."""
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, self.state_dim)

        def run(worker: RenderThread, i: int) -> None:
            """Executes the i-th chunk of actions."""
            world = self._worlds[rows[i]]
            world.run(actions[i], out, i)
            self._show(worker, world, out, i)

        out.errors = self._each(run, len(rows))
        return out

    def instruction(self, row: int) -> str:
        return self._worlds[row].scene.instruction

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns the expert's next `length` actions in each of `rows`, [row, length, 4]; zeros after the episode's
        end."""
        actions = np.zeros((len(rows), length, ACTION_DIM), np.float32)
        errors = self._each(lambda worker, i: self._worlds[rows[i]].plan(length, worker.spare, actions[i]), len(rows))
        for error in errors:
            if error is not None:
                raise error
        return actions

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _show(self, worker: RenderThread, world: TabletopRow, out: Transition, i: int) -> None:
        """Writes the state and the rendered image of `world` into row i of `out`."""
        state = world.state()
        out.state[i] = state if self.state_dim == STATE_DIM else np.append(state, privileged_state(world.view()))
        worker.renderer.render(world.model, world.data, out.images[i])

    def _each(self, function: Callable[[RenderThread, int], None], n: int) -> list[Exception | None]:
        """Calls function(worker, i) for i < n, distributed over the render threads. Returns the exception of each call,
        or None. Raises UserError after `close`."""
        if not self._workers:
            raise UserError("tabletop: this simulator was closed; build a new one")
        errors: list[Exception | None] = [None] * n

        def share(worker: RenderThread, indices: range) -> None:
            """Calls `function` for the indices of one thread."""
            for i in indices:
                try:
                    function(worker, i)
                except Exception as error:  # of one row; the others continue, and `VectorSim` counts it
                    errors[i] = error

        count = len(self._workers)
        for future in [worker.submit(share, range(w, n, count)) for w, worker in enumerate(self._workers)]:
            future.result()
        return errors
