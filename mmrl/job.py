"""Runs a job from Python, as `mmrl train`, `mmrl eval` and `mmrl sample` do: for notebooks and programs."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mmrl import trainer
from mmrl.build import build_engine, build_generator, build_policy, build_task
from mmrl.checkpoints import check_run_dir, check_warm_start
from mmrl.checkpoints.data import record
from mmrl.checkpoints.starting import read_origin
from mmrl.children.processes import run_command, stopped_by
from mmrl.collection.checks import check_batch
from mmrl.collection.collector import sampled_by, synced
from mmrl.config import Config, configure, load, to_yaml
from mmrl.engine import Engine, Heartbeat, Ranks, applied, end_with_launcher, start_distributed, take_device
from mmrl.engine.launcher import NOT_MET, meeting_place
from mmrl.errors import UserError, describe_error
from mmrl.evaluation.evaluate import Journal, evaluate
from mmrl.evaluation.search import SearchingPolicy
from mmrl.preflight.fitting import try_sources
from mmrl.preflight.quick import probe_policy, probe_quickly
from mmrl.protocols.parts import Responding
from mmrl.report.lock import await_free, check_free, owner_of
from mmrl.report.records import RunRecord, read_run
from mmrl.report.run import Run, writing
from mmrl.report.trackers import check_trackers
from mmrl.rollouts import Sample
from mmrl.runtime.logging import quieten_environment
from mmrl.runtime.progress import weights_read
from mmrl.settings import plain, sections_in
from mmrl.settings.origins import WeightsOrigin
from mmrl.workers.local import without_workers

log = logging.getLogger(__name__)
EachStep = Callable[[int, Mapping[str, float]], None]


class RunEnded(UserError):
    """Raised where the run directory holds this very run, complete."""


class WarmStartStopped(UserError):
    """Raised where the signal `signum` stopped the warm start."""

    def __init__(self, path: str, signum: int) -> None:
        self.signum, name = signum, signal.Signals(signum).name
        super().__init__(f"{name} stopped the warm start {path}; the same command goes on with it")


class Job:
    """The task, the policy and the engine of a configuration, inside a `with` block.

        with Job(load("recipe.yaml", ["steps=20"])) as job:
            job.train(lambda step, metrics: print(step, metrics.get("accuracy")))
            print(job.evaluate())

    `task`, `policy` and `ranks` exist inside the block. A warm start runs first; `config` is the one after it.
    With several processes every one of them runs the block, as torchrun starts them.
    """

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        """trains: build an optimizer too, and refuse a run directory that is in use or complete."""
        self.config = config
        self._trains, self._parts = trains, ExitStack()
        self._engine: Engine | None = None
        self._heartbeat: Heartbeat | None = None  # of several ranks
        self._trainer: trainer.Trainer | None = None

    @classmethod
    def of(cls, model: str | Path, config: str | Path | None = None, overrides: Sequence[str] = ()) -> Job:
        """Returns a job that evaluates and samples with the weights in `model`: a run directory, a folder of weights,
        or a name on a hub. config: a YAML file; optional for a run directory and for weights that a run wrote.

        Raises UserError for a run that is not complete, and for weights without a configuration.
        """
        origin = [f"model.path={json.dumps(weights(str(model)))}", "model.build=null", "model.warm_start=null"]
        return cls(config_for(Path(model), config, [*overrides, *origin]), trains=False)

    def __enter__(self) -> Job:
        end_with_launcher()
        take_device()
        quieten()
        with ExitStack() as parts, self._named():
            self._build(parts)
            self._parts = parts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._parts.__exit__(kind, error, traceback)

    def _build(self, parts: ExitStack) -> None:
        """Builds the parts of the job in order: task, policy, engine, generator; what has to be closed goes on `parts`.
        Raises UserError."""
        if self._trains:
            self.config = warm_started(self.config)
            check_start(self.config)
            self._announce(parts)
        else:
            self.config = without_workers(self.config)
        config = self.config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.engine.deterministic:
            use_deterministic_kernels()
        torch.manual_seed(config.seed)
        self.task = build_task(config)
        if self._trains and self.task.train is None:
            raise UserError("the task has no questions to train on, only held-out ones; name them in task.data")
        if self._trains and launched()[0] == 0:
            for alarm in probe_quickly(config, self.task):
                log.warning("%s", alarm.text)
        self.policy = build_policy(config, self.task)
        if launched()[0] == 0:
            for alarm in probe_policy(self.policy):
                log.warning("%s", alarm.text)
            if self._trains:
                try_sources(self.task, config.evaluation.prompts)
        self.ranks: Ranks
        if self._trains:
            with nullcontext() if self._heartbeat is None else self._heartbeat.meeting():
                start_distributed(config.engine.timeout)
            self.ranks = self._engine = build_engine(config, self.policy)
            if self._heartbeat is not None:
                self._engine.watch(self._heartbeat)
        else:
            self.ranks = Ranks()
        # In order also after an error: gloo's thread otherwise aborts the interpreter and hides the message.
        parts.callback(self.ranks.close)
        if self._engine is None:
            self.policy.module.to(self.ranks.device)
        else:
            check_batch(config, self.ranks.world)
        self.generator = build_generator(config, self.policy, self.task, self.ranks)
        if self.generator is not None:
            parts.callback(self.generator.close)
        if self._engine is not None:
            parts.callback(self._engine.release)

    def train(self, each_step: EachStep | None = None) -> RunRecord:
        """Trains to the last step, or until a signal. Returns the record of the run directory.

        each_step: called on every rank with number and metrics of each finished step and of each evaluation, whose
        metrics begin with evaluation/. Raises UserError as `mmrl train` prints it.
        """
        if self._engine is None or self._trainer is not None:
            raise UserError("this job can not train: it was made for weights that are finished, or has trained already")
        folder = Path(self.config.run_dir)
        try:
            run = Run(
                folder,
                to_yaml(self.config),
                writes=self.ranks.rank == 0,
                log=self.config.log,
                on_step=each_step,
            )
        except OSError as error:
            raise UserError(f"run_dir={folder} can not be written: {error}") from None
        try:
            if run.writes:
                with writing(folder):
                    record(folder, plain(self.config))
            with self._named():
                self._trainer = trainer.Trainer(self.config, self.policy, self.task, self._engine, run, self.generator)
            with recorded_end(run, self._trainer), self._named():
                if self.config.checkpoint.resume:
                    self._trainer.resume()
                self._trainer.train()
        finally:
            run.close()
        return read_run(folder)

    def _announce(self, parts: ExitStack) -> None:
        """Has the other ranks know that this one has come up, before anything that takes long."""
        rank, world = launched()
        if world > 1:
            with writing(Path(self.config.run_dir)):
                self._heartbeat = Heartbeat(Path(self.config.run_dir), rank, world, self.config.engine.timeout)
            parts.callback(self._heartbeat.close)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raises UserError for an error whose cause is a rank that has ended, or ranks that do not meet."""
        try:
            yield
        except RuntimeError as error:  # the message depends on the backend
            if self._heartbeat is not None and (dead := self._heartbeat.dead()) is not None:
                raise UserError(f"{dead} has ended: {str(error).splitlines()[0]}") from error
            if isinstance(error, NOT_MET):
                raise UserError(f"ranks do not meet at {meeting_place()}: {str(error).splitlines()[0]}") from error
            raise

    def stop(self) -> None:
        """Ends the training after this step, for `each_step` to call, on any rank: it saves a checkpoint, and `train`
        returns. A job with the same run directory goes on from there. Raises UserError where nothing trains."""
        if self._trainer is None:
            raise UserError("stop() is for a job that trains; call it in each_step")
        self._trainer.ends = True

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return 0 if self._trainer is None else self._trainer.step

    @property
    def stopped(self) -> int:
        """The number of the signal that ended the training before its last step; 0 without one."""
        return 0 if self._trainer is None else self._trainer.stopping

    @property
    def accuracies(self) -> dict[str, float]:
        """Held-out accuracy of the evaluations while training, by step."""
        return {} if self._trainer is None else self._trainer.accuracies

    def evaluate(self, prompts: int | None = None) -> dict[str, float]:
        """Returns metrics on the first `prompts` held-out prompts (default: evaluation.prompts), as they are logged."""
        return self.measure(prompts)[0]

    def sample(self, prompts: int = 16) -> list[Sample]:
        """Returns samples of the first held-out prompts; with several ranks those of this one."""
        return self.measure(prompts)[1]

    def measure(
        self, prompts: int | None = None, journal: Journal | None = None
    ) -> tuple[dict[str, float], list[Sample], list[float]]:
        """Returns metrics, samples, and the accuracy of each sample, with the averaged weights where there are any.
        journal: a record of episodes that were played before, which are not repeated."""
        count = self.config.evaluation.prompts if prompts is None else prompts
        ema = None if self._trainer is None else self._trainer.ema
        with applied(ema), synced(self.generator):
            return evaluate(self._answering(), self.task, self.ranks, count, self.config, journal)

    def _answering(self) -> Responding:
        """Returns what responds to prompts: the policy, its workers, or, in a job that does not train, the search of
        sample.search."""
        search = None if self._trains else self.config.sample.search
        if search is not None:
            return SearchingPolicy(self.policy, self.task, search)
        return sampled_by(self.policy, self.generator)


# --- before a run ---


def launched() -> tuple[int, int]:
    """Returns rank and number of ranks from the launcher's environment variables. Raises UserError."""
    ranks = {}
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise UserError(f"{name}={text} in the environment is not a number of ranks; start several with torchrun")
        ranks[name] = int(text)
    rank, world = ranks["RANK"], ranks["WORLD_SIZE"]
    if rank >= world:
        raise UserError(f"RANK={rank} in the environment is beyond WORLD_SIZE={world}; start several with torchrun")
    return rank, world


def check_start(config: Config) -> None:
    """Raises UserError where a run of this configuration can neither start nor resume. Fast: loads no model."""
    rank, world = launched()
    folder = Path(config.run_dir)
    check_batch(config, world)
    if rank == 0:
        check_free(folder)
    if check_run_dir(folder, plain(config)):
        raise RunEnded(f"run_dir={folder} has reached its end already; raise steps, or name another run_dir")
    check_trackers(config.log)


def warm_started(config: Config) -> Config:
    """Returns the configuration with model.path set to the final weights of its warm start. Runs or resumes the warm
    start, and the recipes of second models such as teachers, where their weights are missing. Raises UserError if such
    a run fails, if there are several ranks, or if the weights are those of another configuration."""
    if config.model.warm_start is not None:
        finish_run("model.warm_start", config.model.warm_start)
    for key, origin in sections_in(config, WeightsOrigin):
        if origin.recipe is not None:
            finish_run(f"{key}.recipe", origin.recipe)
    return after_warm_start(config)


def finish_run(key: str, path: str) -> None:
    """Runs or resumes the recipe that `key` names, unless its final weights are there. Raises UserError as
    `warm_started`."""
    final = Path(load(path).run_dir) / "final"
    before = plain(after_warm_start(load(path)))
    if check_warm_start(final, before, path):
        return
    if launched()[1] > 1:
        raise UserError(f"{key}={path}: {final} is missing; run it first, as one process: mmrl train {path}")
    _run_first(key, path, final, before)


def _run_first(key: str, path: str, final: Path, config: dict[str, Any]) -> None:
    """Runs or resumes the recipe `path` that `key` names, whose configuration is `config`; waits for a job that does so
    already. Raises UserError where it fails, WarmStartStopped where a signal stops it."""
    while not check_warm_start(final, config, path):
        if await_free(final.parent, f"its final weights are what {key}={path} asks for"):
            continue
        print(f"{'warm start' if key == 'model.warm_start' else key}: mmrl train {path}", flush=True)
        if signum := stopped_by(run_command([sys.executable, "-m", "mmrl", "train", path, "checkpoint.resume=auto"])):
            raise WarmStartStopped(path, signum)
        if not check_warm_start(final, config, path) and owner_of(final.parent) is None:  # else another was quicker
            raise UserError(f"{key}={path} failed; see above")


def before_warm_start(config: Config) -> Config:
    """Returns the configuration with the initial model of its warm start, if that has not been run; else unchanged. It
    has the same shapes, which is enough for a dry run. Raises UserError for a warm start with another configuration."""
    path = config.model.warm_start
    if path is None:
        return config
    first = load(path)
    if check_warm_start(Path(first.run_dir) / "final", plain(after_warm_start(first)), path):
        return config
    begun = before_warm_start(first).model
    print(f"model.warm_start={path} has not been run: this step begins with what it begins with", flush=True)
    origin = {"path": begun.path, "build": begun.build, "warm_start": begun.warm_start}
    return config.model_copy(update={"model": config.model.model_copy(update=origin)})


def after_warm_start(config: Config) -> Config:
    """Returns the configuration with model.path set to the final weights of its warm start."""
    if config.model.warm_start is None:
        return config
    final = Path(load(config.model.warm_start).run_dir) / "final"
    model = config.model.model_copy(update={"path": str(final), "warm_start": None})
    return config.model_copy(update={"model": model})


def use_deterministic_kernels() -> None:
    """Makes every operation of torch give the same bits each time, or raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS asks for
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def quieten() -> None:
    """Replaces the progress bars of libraries by mmrl's, also where the libraries are imported already."""
    from transformers.utils.logging import set_tqdm_hook

    quieten_environment()
    set_tqdm_hook(weights_read)


# --- after a run ---


@contextmanager
def recorded_end(run: Run, training: trainer.Trainer) -> Iterator[None]:
    """Records in the run directory how the training in the block ended."""

    def at() -> str:
        return f"step {training.step} of {training.config.steps}"

    try:
        yield
    except BaseException as error:  # recorded and raised again
        text = str(error) if isinstance(error, UserError) else describe_error(error)
        run.end("failed", f"It ended at {at()} with an error: {text}")
        raise
    if training.stopping:
        name = signal.Signals(training.stopping).name
        run.end("stopped", f"{name} stopped it at {at()}; it has saved, and the same command goes on.")
    elif training.ends and training.step < training.config.steps:
        run.end("stopped", f"The program stopped it at {at()}; it has saved, and the same program goes on.")
    else:
        run.end("finished", f"It reached its end, step {training.step}.")


def weights(model: str) -> str:
    """Returns the folder of a run's final weights, or `model` itself where it is not a run directory.

    Raises UserError for a run that is not complete.
    """
    final = Path(model) / "final"
    if not final.is_dir() and (Path(model) / "metrics.jsonl").is_file():
        best = Path(model) / "best"
        instead = f"; {best} holds the best weights so far" if best.is_dir() else ""
        raise UserError(f"{model} is a run that has not reached its end: {final} is missing{instead}")
    return str(final if final.is_dir() else model)


def config_for(model: Path, config: str | Path | None, overrides: Sequence[str]) -> Config:
    """Returns the configuration in the file `config`; without one that of the run in `model`, or of the run that wrote
    the weights in `model`. Raises UserError where there is none."""
    if config is not None:
        return load(config, list(overrides))
    if (model / "config.yaml").is_file():
        return load(model / "config.yaml", list(overrides))
    origin = read_origin(model)
    if origin is None:
        raise UserError(f"{model} has no configuration of its own; give one, as in: mmrl eval {model} recipe.yaml")
    return configure(origin["config"], list(overrides))
