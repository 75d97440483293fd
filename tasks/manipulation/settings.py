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
    """The task for whose simulator episodes are demonstrated."""

    settings: ManipulationSettings
    seed: int

    def make_simulator(self, rows: int) -> VectorSim:
        """Builds `rows` environments."""


class DemonstratedEpisodes(Choice):
    """Settings of a source of demonstrated episodes."""

    title: ClassVar[str] = "demonstrations"
    kinds: ClassVar[dict[str, str]] = {
        "expert": "mmrl.tasks.manipulation.settings:ExpertDemonstrations",
        "lerobot": "mmrl.tasks.manipulation.settings:LeRobotDemonstrations",
    }
    type: str = "expert"

    @abstractmethod
    def prompts(self, task: DemonstratingTask, starts: EpisodeSource) -> Source:
        """Returns prompts with an observation and the actions that followed it. Raises UserError if there are none.

        starts: the start states of training, of which an expert uses the first.
        """

    def sample(self, episodes: int) -> DemonstratedEpisodes:
        """Returns settings for a check before training, with about `episodes` episodes of each task where an episode
        takes time to record; else these settings."""
        return self


class ExpertDemonstrations(DemonstratedEpisodes):
    """Episodes of the simulator's scripted expert."""

    test: ClassVar[str] = "tests/tasks/test_manipulation.py"
    type: str = "expert"
    episodes: int = option(200, "episodes of each task", ge=1)
    noise: float = option(0.0, "standard deviation of Gaussian noise on the executed actions", ge=0)
    perturbation: float = option(
        0.0,
        "probability at each action that a perturbation begins: one random action, uniform in [-1, 1], is executed in "
        "place of the expert's next ones",
        ge=0,
        lt=1,
    )
    perturbation_length: int = option(5, "length of a perturbation", unit="actions", ge=1)
    successful: bool = option(True, "leave out episodes that fail")
    actions: Literal["expert", "executed"] = option(
        "expert", "the actions to learn: those of the expert, or those executed, with noise and perturbations"
    )

    def sample(self, episodes: int) -> ExpertDemonstrations:
        return self.model_copy(update={"episodes": min(self.episodes, episodes)})

    def prompts(self, task: DemonstratingTask, starts: EpisodeSource) -> Source:
        """Records `episodes` episodes of the expert for each task, and returns a prompt for each of their steps."""
        from mmrl.tasks.manipulation.episodes import Disturbance, EpisodeDemonstrations, record_expert

        prompts = [starts[i] for i in range(self.episodes * len(task.settings.tasks))]
        start_states = [(p.metadata["task"], p.metadata["seed"]) for p in prompts]
        with task.make_simulator(min(task.settings.rows, len(start_states))) as sim:
            disturbance = Disturbance(self.noise, self.perturbation, self.perturbation_length)
            recorded = record_expert(
                sim,
                start_states,
                disturbance=disturbance,
                successful_only=self.successful,
                seed=task.seed,
                record_executed=self.actions == "executed",
            )
        return EpisodeDemonstrations(recorded)


class LeRobotDemonstrations(DemonstratedEpisodes):
    """A dataset in LeRobot's format, versions 2.0 to 3.0."""

    test: ClassVar[str] = "tests/tasks/test_lerobot.py"
    type: str = "lerobot"
    path: str = option(description="folder of the dataset")
    episodes: int | list[int] | None = option(
        None, "number of first episodes, or a list of episode numbers; default: all"
    )
    split: str | None = option(
        None, "a split of the dataset, or all; default: train if it exists and `episodes` is not a list, else all"
    )
    max_bad_share: float = option(
        0.0, "share of episodes that may be unusable; they are logged and left out", ge=0, le=1
    )
    camera: str | list[str] | None = option(
        None,
        "feature of the images, or a list with one for each of the simulator's cameras, in their order; default: the "
        "only one",
    )
    state: str = option("observation.state", "feature of the state")
    action: str = option("action", "feature of the actions")
    memory: float = option(
        4.0, "decoded images are kept in memory if all of them need at most this; 0: never", unit="GiB", ge=0
    )

    @field_validator("episodes")
    @classmethod
    def _check_episodes(cls, episodes: int | list[int] | None) -> int | list[int] | None:
        if isinstance(episodes, int) and episodes < 1:
            raise ValueError(f"episodes must be at least 1, or a list of episode numbers, not {episodes}")
        if isinstance(episodes, list) and (not episodes or min(episodes) < 0 or len(set(episodes)) < len(episodes)):
            raise ValueError(f"episodes must be one or more different numbers, 0 or above, not {episodes}")
        return episodes

    def prompts(self, task: DemonstratingTask, starts: EpisodeSource) -> Source:
        """Reads the dataset, and returns a prompt for each step of its episodes. A simulator is built for its
        dimensions only."""
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
                selection=EpisodeSelection(self.episodes, self.split, self.max_bad_share),
                memory_gib=self.memory,
                action_dim=simulator.action_dim,
                state_dim=simulator.state_dim,
                image_shape=simulator.image_shape,
                cameras=cameras,
            )
        )


class ManipulationSettings(TaskSettings):
    """Episodes of a robot in a simulator. The run's seed selects the start states of training, `eval_seed` the held-out
    ones; these are always different."""

    test: ClassVar[str] = "tests/tasks/test_manipulation.py"
    type: str = "manipulation"
    simulator: str = option("tabletop", "a shipped simulator, or a class of your own as package.module:Class")
    options: dict[str, Any] = option({}, "options of the simulator; `mmrl methods SIMULATOR` lists them")
    tasks: tuple[str, ...] = option(("reach",), "tasks of the simulator to train on", min_length=1)
    eval_tasks: tuple[str, ...] | None = option(None, "held-out tasks; default: as `tasks`", min_length=1)
    rows: int = option(128, "parallel environments of a rank", ge=1)
    workers: int = option(0, "processes that run the simulator; 0: it runs in the rank's process", ge=0)
    python: str | None = option(
        None,
        "Python interpreter of the workers, for a simulator in another virtual environment; mmrl must be importable "
        "there, but not its dependencies; default: the rank's interpreter",
    )
    ray: str | None = option(
        None, "Ray cluster whose hosts run the workers: HOST:PORT of its head, or auto; default: this host"
    )
    turns: int = option(
        1, "parts into which environments are divided: one part steps while the policy acts for another", ge=1
    )
    deadline_s: float = option(
        120.0,
        "time after which a worker without an answer is replaced and its episodes are lost; with workers=0 there is a "
        "warning, and the run ends after ten times as long",
        unit="s",
        gt=0,
    )
    train_size: int = option(1_000_000, "training start states", ge=1)
    eval_size: int = option(500, "held-out start states", ge=1)
    eval_seed: int = option(0, "seed of the first held-out start state", ge=0, lt=1_000_000)
    instructions: Literal["own", "shuffled"] = option(
        "own", "shuffled: each episode has the instruction of another episode, to test whether the policy follows it"
    )
    demonstrations: DemonstratedEpisodes | None = option(
        None, "demonstrations for algorithm.type=supervised and for rollout.extras=[demonstrations]"
    )
    rewards: list[RewardSpec] = option(
        [RewardSpec(name="mmrl.tasks.manipulation.rewards:success", label="success")],
        "rewards of an episode",
        min_length=1,
    )

    @model_validator(mode="after")
    def _check_workers(self) -> ManipulationSettings:
        if self.ray is not None and self.workers == 0:
            raise ValueError(f"ray={self.ray} is for workers, but workers=0; set workers to 1 or more")
        if self.python is not None and self.workers == 0:
            raise ValueError(f"python={self.python} is for workers, but workers=0; set workers to 1 or more")
        if self.turns > max(self.workers, 1):
            raise ValueError(
                f"turns={self.turns} needs at least as many workers, but workers={self.workers}; raise workers, or "
                "lower turns"
            )
        return self

    def build(self, seed: int) -> Task:
        return load_attribute("mmrl.tasks.manipulation.task:Manipulation")(self, seed)
