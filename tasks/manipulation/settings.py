"""Settings of the manipulation task."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import field_validator, model_validator

from mmrl.rewards.settings import RewardSpec
from mmrl.runtime.installation import extra_command
from mmrl.settings import Choice, load_attribute, option
from mmrl.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from mmrl.protocols.parts import Source, Task
    from mmrl.sims import VectorSim
    from mmrl.tasks.manipulation.episodes import EpisodeSource


class DemonstratingTask(Protocol):
    """The task in whose simulator episodes are demonstrated."""

    settings: ManipulationSettings
    seed: int

    def make_simulator(self, rows: int) -> VectorSim: ...


class DemonstratedEpisodes(Choice):
    """A source of demonstrated episodes."""

    title: ClassVar[str] = "demonstrations"
    kinds: ClassVar[dict[str, str]] = {
        "expert": "mmrl.tasks.manipulation.settings:ExpertDemonstrations",
        "lerobot": "mmrl.tasks.manipulation.settings:LeRobotDemonstrations",
    }
    type: str = "expert"

    @abstractmethod
    def prompts(self, task: DemonstratingTask, starts: EpisodeSource) -> Source:
        """Returns prompts that carry an observation and the actions that followed it. Raises UserError where there are
        none."""


class ExpertDemonstrations(DemonstratedEpisodes):
    """Episodes of the simulator's scripted expert."""

    test: ClassVar[str] = "tests/tasks/test_manipulation.py"
    type: str = "expert"
    episodes: int = option(200, "episodes of each task", ge=1)
    noise: float = option(0.0, "standard deviation of noise on executed actions; recorded actions have none", ge=0)
    perturbation: float = option(
        0.0,
        "chance at each action that a random one, uniform in [-1, 1], is executed in place of the expert's next ones, "
        "which are still those that are shown",
        ge=0,
        lt=1,
    )
    perturbation_length: int = option(5, "for how many actions", unit="actions", ge=1)
    successful: bool = option(True, "leave out episodes that fail")
    actions: Literal["expert", "executed"] = option(
        "expert", "which are shown: what the expert wanted, or what was executed, noise and perturbations included"
    )

    def prompts(self, task: DemonstratingTask, starts: EpisodeSource) -> Source:
        from mmrl.tasks.manipulation.episodes import Disturbance, EpisodeDemonstrations, record_expert

        prompts = [starts[i] for i in range(self.episodes * len(task.settings.tasks))]
        start_states = [(p.metadata["task"], p.metadata["seed"]) for p in prompts]
        with task.make_simulator(min(task.settings.rows, len(start_states))) as sim:
            disturbance = Disturbance(self.noise, self.perturbation, self.perturbation_length)
            recorded = record_expert(
                sim,
                start_states,
                disturbance=disturbance,
                successful=self.successful,
                seed=task.seed,
                executed=self.actions == "executed",
            )
        return EpisodeDemonstrations(recorded)


class LeRobotDemonstrations(DemonstratedEpisodes):
    """A data set in LeRobot's format, 2.0 to 3.0."""

    test: ClassVar[str] = "tests/tasks/test_lerobot.py"
    type: str = "lerobot"
    path: str = option(description="folder of the data set")
    episodes: int | list[int] | None = option(None, "the first N, or a list of episode numbers; default: all")
    split: str | None = option(
        None, "one of the data set's splits, or all; default: train where it has that, and no numbers are listed"
    )
    max_bad_share: float = option(
        0.0, "share of episodes that may be unusable; they are named and left out", ge=0, le=1
    )
    camera: str | list[str] | None = option(
        None,
        "feature of the images, or one for each of the simulator's cameras, in their order; default: the only one",
    )
    state: str = option("observation.state", "feature of the state")
    action: str = option("action", "feature of the actions")
    memory: float = option(4.0, "if its images need more, they are decoded each time they are seen", unit="GiB", ge=0)

    @field_validator("episodes")
    @classmethod
    def _check_episodes(cls, episodes: int | list[int] | None) -> int | list[int] | None:
        if isinstance(episodes, int) and episodes < 1:
            raise ValueError(f"episodes must be at least 1, or a list of episode numbers, not {episodes}")
        if isinstance(episodes, list) and (not episodes or min(episodes) < 0 or len(set(episodes)) < len(episodes)):
            raise ValueError(f"episodes must be different episode numbers from 0 on, not {episodes}")
        return episodes

    def prompts(self, task: DemonstratingTask, starts: EpisodeSource) -> Source:
        from mmrl.errors import UserError
        from mmrl.tasks.manipulation.episodes import EpisodeDemonstrations
        from mmrl.tasks.manipulation.selection import EpisodeSelection

        try:
            from mmrl.tasks.manipulation import lerobot
        except ModuleNotFoundError as error:
            raise UserError(
                f"task.demonstrations.type=lerobot: {error}; {extra_command('mujoco', 'parquet')}"
            ) from error
        with task.make_simulator(1) as sim:
            simulator, cameras = sim.simulator, sim.cameras
        return EpisodeDemonstrations(
            lerobot.load(
                self.path,
                lerobot.DatasetColumns(self.camera, self.state, self.action),
                chosen=EpisodeSelection(self.episodes, self.split, self.max_bad_share),
                memory=self.memory,
                action_dim=simulator.action_dim,
                state_dim=simulator.state_dim,
                image_shape=simulator.image_shape,
                cameras=cameras,
            )
        )


class ManipulationSettings(TaskSettings):
    """Episodes in a simulator. Training episodes start from seeds that follow the run's seed, held-out ones from
    `eval_seed` on; they never meet."""

    test: ClassVar[str] = "tests/tasks/test_manipulation.py"
    type: str = "manipulation"
    simulator: str = option("tabletop", "a shipped simulator, or one's own as package.module:Class")
    options: dict[str, Any] = option({}, "options of the simulator")
    tasks: tuple[str, ...] = option(("reach",), "of the simulator", min_length=1)
    eval_tasks: tuple[str, ...] | None = option(
        None, "tasks of the held-out start states; default: `tasks`", min_length=1
    )
    rows: int = option(128, "environments at once on a rank", ge=1)
    workers: int = option(0, "processes of their own for the simulator; 0: in this one", ge=0)
    python: str | None = option(
        None,
        "interpreter of the workers, for a simulator with an environment of its own; mmrl must be importable there, "
        "its dependencies need not; default: this one",
    )
    ray: str | None = option(
        None, "put the workers on hosts of this Ray cluster: HOST:PORT of its head, or auto; default: on this host"
    )
    turns: int = option(
        1, "groups of workers that take turns: one group steps while the policy computes actions for another", ge=1
    )
    deadline_s: float = option(
        120.0, "time after which a silent worker is replaced and its episodes are lost", unit="s", gt=0
    )
    train_size: int = option(1_000_000, "start states to train on", ge=1)
    eval_size: int = option(500, "held-out start states", ge=1)
    eval_seed: int = option(0, "the first of the held-out start states", ge=0, lt=1_000_000)
    instructions: Literal["own", "shuffled"] = option(
        "own", "shuffled: every episode shows the instruction of another one, to see whether a policy listens"
    )
    demonstrations: DemonstratedEpisodes | None = option(
        None, "demonstrations for algorithm.type=supervised and for rollout.extras=[demonstrations]"
    )
    rewards: list[RewardSpec] = option(
        [RewardSpec(name="mmrl.tasks.manipulation.rewards:success", label="success")],
        "what an episode earns",
        min_length=1,
    )

    @model_validator(mode="after")
    def _check_workers(self) -> ManipulationSettings:
        if self.ray is not None and self.workers == 0:
            raise ValueError(f"ray={self.ray} places workers; workers=0")
        if self.python is not None and self.workers == 0:
            raise ValueError(f"python={self.python} runs workers; set workers to 1 or more")
        if self.turns > max(self.workers, 1):
            raise ValueError(f"turns={self.turns} needs as many workers; workers={self.workers}")
        return self

    def build(self, seed: int) -> Task:
        return load_attribute("mmrl.tasks.manipulation.task:Manipulation")(self, seed)
