"""ManiSkill's tasks as a simulator: one scene a row on the CPU, one scene for all rows on a GPU."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from mani_skill.envs.utils.system import backend
from mani_skill.utils import download_asset
from mani_skill.utils.common import flatten_state_dict
from mani_skill.utils.registration import REGISTERED_ENVS
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.runtime.devices import device_name
from mmrl.sims.maniskill.alone import use_lone_classes
from mmrl.sims.maniskill.driver import choose_device
from mmrl.sims.maniskill.experts import EXPERTS
from mmrl.sims.maniskill.tasks import INSTRUCTIONS
from mmrl.sims.vector.simulator import Transition, nearest

if TYPE_CHECKING:
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.utils.registration import EnvSpec

OBSERVATIONS = ("state", "rgb", "video")
RENDERED_ALWAYS = {"PushT-v1"}  # tasks that need visual shapes even if nothing is rendered
ASSETS = "python -m mani_skill.utils.download_asset"


class ManiSkill:
    """Tasks of ManiSkill 3 (Tao et al. 2024) by their ids, as a simulator.

    tasks: ids of tasks with the same action space. INSTRUCTIONS lists those with an instruction. observation: "state":
    ManiSkill's full state, with the positions of objects and goals, and images of 0 x 0 pixels; "rgb": the image of
    `camera`, and the state of robot and goal only; "video": as "state", with the images of the camera of RecordEpisode,
    which show goals too. image_size: height and width of the images, in pixels. camera: for "rgb"; None: the task's
    first camera. control_mode: ManiSkill's controller, which says what an action means; None: the robot's default.
    Actions are clipped at its bounds. reward: "sparse": 1 at each step after which the task is solved; "dense":
    ManiSkill's reward, normalized to 0..1. end_on_success: whether the first success ends the episode; otherwise only
    failure and the time limit do. max_steps: the time limit; None: ManiSkill's for the task. sim_backend: "physx_cpu",
    or "physx_cuda" for all rows in one scene on the GPU. instructions: instructions by task, in addition to or in place
    of INSTRUCTIONS.

    States are padded with zeros to the longest one of all tasks. On the CPU an episode depends only on its task and
    seed. On the GPU start states do, but contacts may differ between rows by rounding errors. There all rows step
    together, so they have one task at a time, and a running row cannot be left out. Observations are copied to the CPU.
    The GPU backend has not been tested yet.

    Raises UserError for an unknown task, observation, camera or control mode, for missing assets, and if no Vulkan
    driver works.
    """

    @torch.inference_mode()  # ManiSkill's tasks make tensors at each step, and need no gradients
    def __init__(
        self,
        count: int,
        *,
        tasks: Sequence[str] = ("PickCube-v1",),
        observation: Literal["state", "rgb", "video"] = "state",
        image_size: int = 64,
        camera: str | None = None,
        control_mode: str | None = None,
        reward: Literal["sparse", "dense"] = "sparse",
        end_on_success: bool = True,
        max_steps: int | None = None,
        sim_backend: Literal["physx_cpu", "physx_cuda"] = "physx_cpu",
        instructions: Mapping[str, str] | None = None,
    ):
        by_task = INSTRUCTIONS | dict(instructions or {})
        _check("observation", observation, OBSERVATIONS)
        _check("reward", reward, ("sparse", "dense"))
        _check("sim_backend", sim_backend, ("physx_cpu", "physx_cuda"))
        if image_size < 1:
            raise UserError(f"maniskill: image_size must be at least 1 pixel, not {image_size}")
        if sim_backend == "physx_cuda" and not torch.cuda.is_available():
            raise UserError("maniskill: sim_backend=physx_cuda needs a CUDA device; set sim_backend=physx_cpu")
        recipe = Recipe(observation, image_size, camera, control_mode, reward, sim_backend)
        rows = 1 if sim_backend == "physx_cpu" else count
        self.count, self.tasks = count, tuple(tasks)
        self._instructions = {task: by_task[task] for task in self.tasks if task in by_task}
        for task in self.tasks:
            _spec(task)
            if task not in by_task:
                raise UserError(
                    f"maniskill: mmrl has no instruction for {task}; set instructions={{{task}: ...}} in task.options"
                )
        self._blocks = [
            RowBlock(range(first, first + rows), recipe, max_steps, end_on_success) for first in range(0, count, rows)
        ]
        shapes = {task: self._blocks[0].shapes(task) for task in self.tasks}
        self.action_dim, _, self.image_shape = shapes[self.tasks[0]]
        for task, (action_dim, _, image_shape) in shapes.items():
            if (action_dim, image_shape) != (self.action_dim, self.image_shape):
                raise UserError(
                    f"maniskill: {self.tasks[0]} and {task} cannot be trained together: their actions have "
                    f"{self.action_dim} and {action_dim} numbers, their images {self.image_shape} and {image_shape}; "
                    "train each in a run of its own"
                )
        self.state_dim = max(state_dim for _, state_dim, _ in shapes.values())

    @torch.inference_mode()
    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        """Starts an episode in each of `rows`, with its seed and task. Returns their first observations, and the error
        of each row that failed."""
        out = Transition.empty(len(rows), 0, self.image_shape, self.state_dim)
        for block, indices in self._shares(rows):
            block.reset(
                [rows[i] for i in indices], [seeds[i] for i in indices], [tasks[i] for i in indices], out, indices
            )
        return out

    @torch.inference_mode()
    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        """Executes a chunk of actions [row, chunk, action] in `rows`. Returns observations, rewards and ends of
        episodes, and the error of each row that failed."""
        out = Transition.empty(len(rows), actions.shape[1], self.image_shape, self.state_dim)
        for block, indices in self._shares(rows):
            block.step([rows[i] for i in indices], actions[indices], out, indices)
        return out

    def instruction(self, row: int) -> str:
        return self._instructions[self._blocks[row // len(self._blocks[0].rows)].task]

    @torch.inference_mode()
    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        """Returns the expert's next action in each of `rows`, [row, 1, action]. Raises UserError if there is no expert,
        or if `length`, the number of actions to plan, is not 1."""
        if length != 1:
            raise UserError(
                f"maniskill's experts plan one action at a time; length (action.chunk) must be 1, not {length}"
            )
        blocks = [(self._blocks[row // len(self._blocks[0].rows)], row) for row in rows]
        return np.stack([block.expert(row) for block, row in blocks])[:, None]

    def close(self) -> None:
        for block in self._blocks:
            block.close()

    def _shares(self, rows: Sequence[int]) -> list[tuple[RowBlock, list[int]]]:
        """Groups `rows` by their block. Returns each block with the indices into `rows` of its rows."""
        shares: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            shares.setdefault(row // len(self._blocks[0].rows), []).append(i)
        return [(self._blocks[b], indices) for b, indices in shares.items()]


@dataclass(frozen=True)
class Recipe:
    """The options of ManiSkill's environments, as in `ManiSkill`."""

    observation: str
    image_size: int
    camera: str | None
    control_mode: str | None
    reward: str
    sim_backend: str

    def make(self, task: str, rows: int) -> BaseEnv:
        """Makes the environment of a task with `rows` scenes. Raises UserError if it does not support the options."""
        spec, renderer = _spec(task), self._renderer(task)
        # "pci:0" is the renderer on a CPU. ManiSkill splits names at the colon, so `_renderer` calls it "software".
        backend.render_backend_name_mapping["software"] = "pci:0"
        download_asset.prompt_yes_no = _assets_missing(task)
        size = {"width": self.image_size, "height": self.image_size}
        try:
            with redirect_stdout(io.StringIO()), objects_kept_from_collection():  # what it prints is in the error too
                return spec.make(
                    num_envs=rows,
                    obs_mode=self._observation_mode(spec.cls.SUPPORTED_OBS_MODES),
                    # sparse rewards are computed from success
                    reward_mode=None if self.reward == "sparse" else "normalized_dense",
                    control_mode=self.control_mode,
                    sim_backend=device_name(self.sim_backend) if self.sim_backend == "physx_cuda" else self.sim_backend,
                    render_backend=renderer,
                    sensor_configs=size,
                    human_render_camera_configs=size,
                )
        except (NotImplementedError, AssertionError, KeyError) as error:
            raise UserError(f"maniskill: {task} cannot be made with {self._options_text()}: {error!r}") from error

    def _observation_mode(self, supported: Sequence[str]) -> str:
        """Returns ManiSkill's name of the observations; a task without textures has its first mode for images."""
        if self.observation != "rgb":
            return "state"
        return "rgb" if "any_textures" in supported else supported[0]

    def _renderer(self, task: str) -> str:
        """Returns ManiSkill's name of the renderer for a task; "none" if nothing is rendered."""
        device = choose_device()  # needed for materials even where nothing is shown
        if self.observation == "state" and task not in RENDERED_ALWAYS:
            return "none"
        return "software" if device == "pci:0" else device

    def _options_text(self) -> str:
        return f"observation={self.observation}, control_mode={self.control_mode}, reward={self.reward}"


class RowBlock:
    """Rows that share one ManiSkill environment and so step together; on the CPU that is a single row."""

    def __init__(self, rows: range, recipe: Recipe, max_steps: int | None, end_on_success: bool):
        """rows: the numbers of the rows that are simulated together. recipe: makes their environments. Others: see
        `ManiSkill`."""
        self.rows, self.recipe, self.max_steps, self.end_on_success = rows, recipe, max_steps, end_on_success
        self.task = ""
        self._envs: dict[str, BaseEnv] = {}
        self._live = np.zeros(len(rows), bool)  # rows with a running episode
        self._steps = np.zeros(len(rows), np.int64)  # of each row's episode

    def shapes(self, task: str) -> tuple[int, int, tuple[int, int, int]]:
        """Returns the dimensions of a task's actions and states, and the shape of its images. Raises UserError if its
        actions are not one array."""
        images, state = self._observe(self._env(task))
        shape = self._env(task).single_action_space.shape
        if shape is None or len(shape) != 1:
            raise UserError(
                f"maniskill: {task} does not accept a flat action, only {self._env(task).single_action_space}; "
                "choose another control_mode or task"
            )
        return shape[0], state.shape[1], images.shape[1:]

    def reset(
        self, rows: list[int], seeds: list[int], tasks: list[str], out: Transition, indices: Sequence[int]
    ) -> None:
        """Starts episodes in `rows`, and writes their observations to `out` at `indices`."""
        local = [row - self.rows.start for row in rows]  # positions of the rows in this block
        remaining = self._live.copy()  # rows that play on
        remaining[local] = False
        if len({*tasks} | ({self.task} if remaining.any() else set())) > 1:
            raise UserError("maniskill: on a GPU all environments must play the same task; set task.tasks to one task")
        self.task = tasks[0]
        try:
            env = self._env(self.task)
            # one by one: random numbers depend on how many rows are reset at once
            for row, seed in zip(local, seeds, strict=True):
                env.reset(
                    seed=[_folded(seed)] * len(self.rows), options={"env_idx": torch.tensor([row], device=env.device)}
                )
                self._live[row], self._steps[row] = True, 0
            if not env.gpu_sim_enabled:  # at each reset, since some tasks then build a new scene
                use_lone_classes(env)
            self._show(env, local, out, indices)
        except UserError:
            raise
        except Exception as error:
            self._lose(error, out, indices)

    def step(self, rows: list[int], actions: NDArray[np.float64], out: Transition, indices: Sequence[int]) -> None:
        """Executes a chunk of actions [row, chunk, action] in `rows`, and writes the results to `out` at `indices`."""
        local = np.array(rows) - self.rows.start
        if missing := (local[~self._live[local]] + self.rows.start).tolist():
            raise UserError(
                f"maniskill: on a GPU all steps are joint, but {missing} were inactive in an earlier step; reset them"
            )
        moved = np.zeros(len(self._live), bool)
        moved[local] = True
        self._live &= moved  # episodes left out are lost, for they move too
        try:
            env, info = self._env(self.task), None
            for c in range(actions.shape[1]):
                playing = self._live[local]
                if not playing.any():
                    break
                info = self._advance(env, local, actions[:, c], playing, out, np.asarray(indices), c)
            self._show(env, local, out, indices, info)
        except Exception as error:
            self._lose(error, out, indices)

    def expert(self, row: int) -> NDArray[np.float32]:
        """Returns the expert's next action [action]. Raises UserError if there is no expert."""
        if (self.task, self.recipe.control_mode) not in EXPERTS:
            available = ", ".join(f"{task} with control_mode={mode}" for task, mode in EXPERTS)
            raise UserError(
                f"maniskill: no expert for {self.task} with control_mode={self.recipe.control_mode}; known: {available}"
            )
        return EXPERTS[self.task, self.recipe.control_mode](self._env(self.task), row - self.rows.start)

    def close(self) -> None:
        for env in self._envs.values():
            env.close()
        self._envs = {}

    def _advance(
        self,
        env: BaseEnv,
        local: NDArray,
        actions: NDArray,
        playing: NDArray,
        out: Transition,
        indices: NDArray,
        c: int,
    ) -> dict[str, Any]:
        """Executes one control step, and writes column `c` of `out`. local, actions, playing, indices: the rows'
        positions in this block, their actions, which have a running episode, and their rows of `out`. Returns
        ManiSkill's info for the observation, which is computed at the end of a chunk only: to evaluate the scene twice
        is slow, and in some tasks not deterministic."""
        box = env.single_action_space
        padded = np.zeros((len(self.rows), *box.shape), np.float32)
        padded[local[playing]] = np.clip(actions[playing], box.low, box.high)
        action = env._step_action(torch.as_tensor(padded, device=env.device))
        env._elapsed_steps += 1
        info = env.get_info()
        self._steps[local] += playing
        never = np.zeros(len(self.rows), bool)
        success = _host(info["success"])[local] if "success" in info else never[local]
        failure = _host(info["fail"])[local] if "fail" in info else never[local]
        if self.recipe.reward == "dense":
            reward = _host(env.get_reward(obs=None, action=action, info=info))[local]
        else:
            reward = success.astype(np.float32)
        terminated = failure | (success & self.end_on_success)
        truncated = ~terminated & (self._steps[local] >= self._limit())
        running = indices[playing]
        out.valid[running, c], out.reward[running, c], out.success[running, c] = True, reward[playing], success[playing]
        out.terminated[running, c], out.truncated[running, c] = terminated[playing], truncated[playing]
        self._live[local] &= ~(terminated | truncated)
        return info

    def _limit(self) -> float:
        """Returns the number of control steps after which an episode is truncated."""
        return self.max_steps or _spec(self.task).max_episode_steps or np.inf

    def _env(self, task: str) -> BaseEnv:
        if task not in self._envs:
            self._envs[task] = self.recipe.make(task, len(self.rows))
        return self._envs[task]

    def _show(
        self,
        env: BaseEnv,
        local: Sequence[int] | NDArray,
        out: Transition,
        indices: Sequence[int],
        info: dict[str, Any] | None = None,
    ) -> None:
        """Writes images and states of the rows at positions `local` into `out` at `indices`."""
        images, state = self._observe(env, info)
        out.images[indices], out.state[indices, : state.shape[1]] = images[local], state[local]

    def _observe(
        self, env: BaseEnv, info: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Returns images [row, height, width, 3] and states [row, state] of all rows. Without `info`
        ManiSkill evaluates the scene."""
        observation = env.get_obs(info, unflattened=True)
        parts = {name: observation[name] for name in ("agent", "extra")}
        state = _host(flatten_state_dict(parts, use_torch=True, device=env.device)).astype(np.float32)
        if self.recipe.observation == "rgb":
            cameras = observation["sensor_data"]
            camera = self.recipe.camera or next(iter(cameras))
            if camera not in cameras:
                raise UserError(
                    f"maniskill: no camera {camera!r}{nearest(camera, cameras)}; known: {', '.join(cameras)}"
                )
            return _host(cameras[camera]["rgb"]), state
        if self.recipe.observation == "video":
            return _host(env.render_rgb_array()), state
        return np.zeros((len(self.rows), 0, 0, 3), np.uint8), state

    def _lose(self, error: Exception, out: Transition, indices: Sequence[int]) -> None:
        """Gives up the environment, which raised `error`: its state is undefined, so the episodes of all rows end.

        Sets the error of the requested rows, which are at `indices` of `out`. The next reset makes a new environment.
        """
        self._live[:] = False
        self._envs.pop(self.task, None)
        for i in indices:
            out.errors[i] = error


@contextmanager
def objects_kept_from_collection() -> Iterator[None]:
    """Exempts all existing objects from garbage collection. ManiSkill runs a collection for each scene, and traversing
    all objects of a training process takes longer than making the scene."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _spec(task: str) -> EnvSpec:
    """Returns ManiSkill's registration of `task`. Raises UserError for an unknown one."""
    if task not in REGISTERED_ENVS:
        near = nearest(task, REGISTERED_ENVS)
        raise UserError(f"maniskill: unknown task {task!r}{near}; tasks with an instruction: {', '.join(INSTRUCTIONS)}")
    return REGISTERED_ENVS[task]


def _assets_missing(task: str) -> Callable[[str], bool]:
    """Returns a replacement for ManiSkill's question at the terminal whether to download assets: it raises UserError
    instead."""

    def refuse(question: str) -> bool:
        """Raises UserError with the names of the assets, which are cut out of ManiSkill's question."""
        assets = question.split(" which could not")[0].split(" available for")[0]
        robot = question.split()[1] if question.startswith("Robot") else task
        raise UserError(f"maniskill: {task}: {assets}, which are not installed; get them with: {ASSETS} {robot}")

    return refuse


def _folded(seed: int) -> int:
    """Maps a seed to one below 2^32, which NumPy's legacy generator needs. Seeds below 2^31 stay, larger ones map to
    2^31 and above."""
    return seed if seed < 1 << 31 else (1 << 31) + seed % (1 << 31)


def _check(name: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise UserError(f"maniskill: unknown {name} {value!r}{nearest(value, options)}; known: {', '.join(options)}")


def _host(tensor: torch.Tensor) -> NDArray:
    """Copies a tensor to the CPU as an array."""
    return tensor.detach().cpu().numpy()
