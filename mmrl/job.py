"""Runs a job from Python: training, evaluation and sampling, as `mmrl train`, `mmrl eval` and `mmrl sample` do."""

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
from mmrl.build import build_engine, build_generator, build_policy, build_task, check_model
from mmrl.checkpoints import check_run_dir, check_warm_start
from mmrl.checkpoints.data import record
from mmrl.checkpoints.networks import read_networks
from mmrl.checkpoints.starting import read_origin
from mmrl.children.processes import run_command, stopped_by
from mmrl.collection.checks import check_batch
from mmrl.collection.collector import sampled_by, synced
from mmrl.config import Config, configure, load, to_yaml
from mmrl.engine import Engine, Heartbeat, Ranks, applied, end_with_launcher, select_device, start_distributed
from mmrl.engine.compilation import check_compiler
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
from mmrl.runtime.user_code import exits_refused, settings_restored
from mmrl.runtime.watchdog import reports_sudden_end
from mmrl.settings import plain, sections_in
from mmrl.settings.origins import WeightsOrigin
from mmrl.workers.local import without_workers

log = logging.getLogger(__name__)
EachStep = Callable[[int, Mapping[str, float]], None]


class RunEnded(UserError):
    """Raised where the run directory already holds this run and it is complete."""


class WarmStartStopped(UserError):
    """Raised where the signal `signum` stopped a warm start (a supervised run before RL)."""

    def __init__(self, path: str, signum: int) -> None:
        self.signum, name = signum, signal.Signals(signum).name
        super().__init__(f"{name} stopped the warm start {path}; run the same command again to resume it")


class Job:
    """The task, the policy and the engine of a configuration, inside a `with` block.

        with Job(load("recipe.yaml", ["steps=20"])) as job:
            job.train(lambda step, metrics: print(step, metrics.get("accuracy")))
            print(job.evaluate())

    `task`, `policy` and `ranks` exist inside the block. A warm start (a supervised run before RL) runs first; then
    `config` has its final weights as model.path. With several ranks, each process that torchrun starts runs the block.
    """

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        """trains: whether the job trains; then it builds an optimizer, and refuses a run directory that is in use or
        complete."""
        self.config = config
        self._trains, self._parts = trains, ExitStack()
        self._engine: Engine | None = None
        self._heartbeat: Heartbeat | None = None  # of several ranks
        self._trainer: trainer.Trainer | None = None

    @classmethod
    def from_weights(cls, model: str | Path, config: str | Path | None = None, overrides: Sequence[str] = ()) -> Job:
        """Returns a job that evaluates and samples, but does not train.

        model: a run directory, a folder of weights, or a name on the Hugging Face hub. config: a YAML file; optional
        for a run directory and for weights that a run wrote. overrides: dotted overrides such as "sample.search=null".

        Raises UserError for a run that is not complete, and for weights without a configuration.
        """
        model_keys = [f"model.path={json.dumps(weights_folder(str(model)))}"]
        model_keys += ["model.build=null", "model.warm_start=null"]
        return cls(config_for(Path(model), config, [*overrides, *model_keys]), trains=False)

    def __enter__(self) -> Job:
        """Builds the parts of the job. If that fails, closes those that exist already."""
        end_with_launcher()
        select_device()
        quieten()
        with ExitStack() as parts, self._explained_failures():
            if self._trains:
                parts.enter_context(exits_refused())
                parts.enter_context(reports_sudden_end(sudden_end_text(self.config.run_dir)))
            self._build(parts)
            self._parts = parts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._parts.__exit__(kind, error, traceback)

    def _build(self, parts: ExitStack) -> None:
        """Builds the parts of the job in order: task, policy, engine, generator. Pushes what must be closed onto
        `parts`. Raises UserError for a configuration or data that cannot be used."""
        if self._trains:
            self.config = run_warm_start(self.config)
            check_start(self.config)
            self._start_heartbeat(parts)
        else:
            self.config = without_workers(self.config)
            weights = str(self.config.model.path)
            played_with = read_networks(Path(weights))
            for measurement in self.config.needs.prepared:
                measurement.check_saved(played_with, weights)
        config = self.config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.engine.deterministic:
            use_deterministic_kernels()
        torch.manual_seed(config.seed)
        check_model(config.model)
        with settings_restored("the task or its rewards"):
            self.task = build_task(config)
        if self._trains and self.task.train is None:
            raise UserError("the task has no training prompts, only held-out ones; name a training file in task.data")
        first_rank = rank_and_world_size()[0] == 0
        if self._trains and first_rank:
            for alarm in probe_quickly(config, self.task):
                log.warning("%s", alarm.text)
        self.policy = build_policy(config, self.task)
        if first_rank:
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
        # Closed also after an error: gloo's thread otherwise aborts the interpreter and hides the message.
        parts.callback(self.ranks.close)
        if self._engine is None:
            self.policy.module.to(self.ranks.device)
            for measurement in config.needs.prepared:
                measurement.start_saved(self.policy, played_with, weights)
        else:
            check_batch(config, self.ranks.world)
        self.generator = build_generator(config, self.policy, self.task, self.ranks)
        if self.generator is not None:
            parts.callback(self.generator.close)
        if self._engine is not None:
            parts.callback(self._engine.release)

    def train(self, each_step: EachStep | None = None) -> RunRecord:
        """Trains to the last step, or until SIGTERM, SIGUSR1 or Ctrl-C. Returns the record of the run directory.

        each_step: called as each_step(step, metrics) on every rank, after each step and after each evaluation; names of
        evaluation metrics begin with "evaluation/". Raises UserError with the message that `mmrl train` prints.
        """
        if self._engine is None or self._trainer is not None:
            raise UserError(
                "this job cannot train: it was made by Job.from_weights or with trains=False, or it has trained "
                "already; make another Job of the configuration"
            )
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
            raise UserError(f"run_dir={folder} cannot be written: {error}; name another folder") from None
        try:
            if run.writes:
                with writing(folder):
                    record(folder, plain(self.config))
            with self._explained_failures():
                self._trainer = trainer.Trainer(self.config, self.policy, self.task, self._engine, run, self.generator)
            with record_end(run, self._trainer), self._explained_failures():
                if self.config.checkpoint.resume:
                    self._trainer.resume()
                self._trainer.train()
        finally:
            run.close()
        return read_run(folder)

    def _start_heartbeat(self, parts: ExitStack) -> None:
        """Starts the heartbeat of this rank if there are several ranks: the other ranks know that it has started,
        before it loads a model."""
        rank, world = rank_and_world_size()
        if world > 1:
            with writing(Path(self.config.run_dir)):
                self._heartbeat = Heartbeat(Path(self.config.run_dir), rank, world, self.config.engine.timeout)
            parts.callback(self._heartbeat.close)

    @contextmanager
    def _explained_failures(self) -> Iterator[None]:
        """Turns RuntimeErrors of torch.distributed into UserErrors that name the cause: a rank whose process has ended,
        or ranks that do not connect."""
        try:
            yield
        except RuntimeError as error:  # the message depends on the backend
            if self._heartbeat is not None and (dead := self._heartbeat.dead()) is not None:
                reason = str(error).splitlines()[0]
                raise UserError(f"{dead} has ended; look for the error in its output ({reason})") from error
            if isinstance(error, NOT_MET):
                raise UserError(
                    f"ranks do not connect at MASTER_ADDR:MASTER_PORT={meeting_place()}: {str(error).splitlines()[0]}; "
                    "check that all ranks run, have the same address, and can reach it"
                ) from error
            raise

    def stop(self) -> None:
        """Ends the training after this step: a checkpoint is saved, and `train` returns. Call it in `each_step`, on any
        rank. A later job with the same run directory resumes. Raises UserError where the job does
        not train."""
        if self._trainer is None:
            raise UserError("Job.stop() is for a job that trains; call it in each_step")
        self._trainer.stop_requested = True

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return 0 if self._trainer is None else self._trainer.step

    @property
    def stopped(self) -> int:
        """The number of the signal that ended the training before its last step; 0 if none did."""
        return 0 if self._trainer is None else self._trainer.stop_signal

    @property
    def accuracies(self) -> dict[str, float]:
        """Held-out accuracy of the evaluations during training, by step number as a string."""
        return {} if self._trainer is None else self._trainer.accuracies

    def evaluate(self, prompts: int | None = None) -> dict[str, float]:
        """Returns the metrics on the first `prompts` held-out prompts (default: evaluation.prompts), with the names
        that they have in the log."""
        return self.measure(prompts)[0]

    def sample(self, prompts: int = 16) -> list[Sample]:
        """Returns the samples for the first `prompts` held-out prompts; with several ranks, this rank's share."""
        return self.measure(prompts)[1]

    def measure(
        self, prompts: int | None = None, journal: Journal | None = None
    ) -> tuple[dict[str, float], list[Sample], list[float]]:
        """Evaluates on the first `prompts` held-out prompts (default: evaluation.prompts), after training with the EMA
        of the weights if there is one. Returns metrics, samples, and the accuracy of each sample.

        journal: a record of episodes of an earlier, interrupted evaluation; they are not played again."""
        num_prompts = self.config.evaluation.prompts if prompts is None else prompts
        ema = None if self._trainer is None else self._trainer.ema
        with applied(ema), synced(self.generator):
            return evaluate(self._responder(), self.task, self.ranks, num_prompts, self.config, journal)

    def _responder(self) -> Responding:
        """Returns the object that answers the prompts of an evaluation: the policy, the workers that sample for it, or,
        in a job that does not train, the search of sample.search."""
        search = None if self._trains else self.config.sample.search
        if search is not None:
            return SearchingPolicy(self.policy, self.task, search)
        return sampled_by(self.policy, self.generator)


# --- before a run ---


def rank_and_world_size() -> tuple[int, int]:
    """Returns rank and number of ranks from the launcher's environment variables. Raises UserError."""
    ranks = {}
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise UserError(
                f"the environment variable {name}={text} is not a number; unset it, or start the ranks with torchrun"
            )
        ranks[name] = int(text)
    rank, world = ranks["RANK"], ranks["WORLD_SIZE"]
    if rank >= world:
        raise UserError(
            f"the environment variable RANK={rank} is not below WORLD_SIZE={world}; start the ranks with torchrun"
        )
    return rank, world


def check_start(config: Config) -> None:
    """Raises UserError where a run of this configuration can neither start nor resume. Loads no model."""
    rank, world = rank_and_world_size()
    folder = Path(config.run_dir)
    check_batch(config, world)
    if rank == 0:
        check_free(folder)
    if check_run_dir(folder, plain(config)):
        raise RunEnded(f"run_dir={folder} holds this run and it is complete; raise steps, or name another run_dir")
    check_trackers(config.log)
    check_compiler(config.engine.compile)


def run_warm_start(config: Config) -> Config:
    """Returns the configuration with model.path set to the final weights of its warm start.

    Where these weights are missing, runs or resumes the warm start first; likewise the recipes of second models, such
    as teachers. Raises UserError if such a run fails, if weights are missing and there are several ranks, or if the
    weights are those of another configuration.
    """
    if config.model.warm_start is not None:
        finish_run("model.warm_start", config.model.warm_start)
    for key, origin in sections_in(config, WeightsOrigin):
        if origin.recipe is not None:
            finish_run(f"{key}.recipe", origin.recipe)
    return after_warm_start(config)


def finish_run(key: str, path: str) -> None:
    """Runs or resumes the recipe `path`, which the configuration key `key` names, unless its final weights exist.
    Raises UserError as `run_warm_start`."""
    final = Path(load(path).run_dir) / "final"
    recipe = plain(after_warm_start(load(path)))
    if check_warm_start(final, recipe, path):
        return
    if rank_and_world_size()[1] > 1:
        raise UserError(f"{key}={path}: {final} is missing; run it first, as one process: mmrl train {path}")
    _run_recipe(key, path, final, recipe)


def _run_recipe(key: str, path: str, final: Path, config: dict[str, Any]) -> None:
    """Runs or resumes the recipe `path` in another process until its weights `final` exist. Waits for another job that
    runs it already. key: the configuration key that names the recipe. config: its configuration as plain mappings.
    Raises UserError where it fails, and WarmStartStopped where a signal stops it."""
    while not check_warm_start(final, config, path):
        if await_free(final.parent, f"{key}={path} needs its final weights"):
            continue
        print(f"{'warm start' if key == 'model.warm_start' else key}: mmrl train {path}", flush=True)
        if signum := stopped_by(run_command([sys.executable, "-m", "mmrl", "train", path, "checkpoint.resume=auto"])):
            raise WarmStartStopped(path, signum)
        # Another job may have started it in the meantime.
        if not check_warm_start(final, config, path) and owner_of(final.parent) is None:
            raise UserError(f"{key}={path} failed; see its output above")


def before_warm_start(config: Config) -> Config:
    """Returns the configuration for a dry run: if the warm start has not been run, with the model that it starts from,
    whose tensors have the same shapes; else unchanged. Raises UserError where the warm start's run directory holds
    weights of another configuration."""
    path = config.model.warm_start
    if path is None:
        return config
    warm_start = load(path)
    if check_warm_start(Path(warm_start.run_dir) / "final", plain(after_warm_start(warm_start)), path):
        return config
    initial = before_warm_start(warm_start).model
    print(f"model.warm_start={path} has not been run: this step uses the model that it starts from", flush=True)
    origin = {"path": initial.path, "build": initial.build, "warm_start": initial.warm_start}
    return config.model_copy(update={"model": config.model.model_copy(update=origin)})


def after_warm_start(config: Config) -> Config:
    """Returns the configuration with model.path set to the final weights of its warm start."""
    if config.model.warm_start is None:
        return config
    final = Path(load(config.model.warm_start).run_dir) / "final"
    model = config.model.model_copy(update={"path": str(final), "warm_start": None})
    return config.model_copy(update={"model": model})


def use_deterministic_kernels() -> None:
    """Has torch use deterministic kernels, and raise for an operation that has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def quieten() -> None:
    """Silences libraries and replaces their progress bars by mmrl's, even in libraries that are already imported."""
    from transformers.utils.logging import set_tqdm_hook

    quieten_environment()
    set_tqdm_hook(weights_read)


# --- after a run ---


def sudden_end_text(run_dir: str) -> str:
    """Returns the message for a training process that ended without a word."""
    rank, world = rank_and_world_size()
    process = f"process {os.getpid()}" + (f" (rank {rank})" if world > 1 else "")
    return (
        f"mmrl: the training in run_dir={run_dir} is not complete: {process} was ended by a signal, or by _exit of a C "
        "library (then the exit code may be 0); repeat the command to resume"
    )


@contextmanager
def record_end(run: Run, training: trainer.Trainer) -> Iterator[None]:
    """Records in the run directory how the training in the block ended: finished, stopped or failed."""

    def position() -> str:
        """Returns the present step, for a sentence."""
        return f"step {training.step} of {training.config.steps}"

    try:
        yield
    except BaseException as error:  # recorded and raised again
        text = str(error) if isinstance(error, UserError) else describe_error(error)
        run.end("failed", f"It ended at {position()} with an error: {text}")
        raise
    if training.stop_signal:
        name = signal.Signals(training.stop_signal).name
        run.end("stopped", f"{name} stopped it at {position()}; it has saved, and the same command continues it.")
    elif training.stop_requested and training.step < training.config.steps:
        run.end("stopped", f"The program stopped it at {position()}; it has saved, and the same program continues it.")
    else:
        run.end("finished", f"It reached its end, step {training.step}.")


def weights_folder(model: str) -> str:
    """Returns MODEL/final, the final weights, if `model` is a run directory, and otherwise `model` itself.

    Raises UserError for a run that is not complete.
    """
    final = Path(model) / "final"
    if not final.is_dir() and (Path(model) / "metrics.jsonl").is_file():
        best = Path(model) / "best"
        hint = f"use {best}, the best weights so far" if best.is_dir() else "run it to its end first"
        raise UserError(f"{model} is a run that has not reached its end: {final} is missing; {hint}")
    return str(final if final.is_dir() else model)


def config_for(model: Path, config: str | Path | None, overrides: Sequence[str]) -> Config:
    """Returns the configuration for the weights in `model`: from the file `config` if that is not None; else from the
    run directory `model`, or from the run that wrote these weights. Raises UserError where there is none."""
    if config is not None:
        return load(config, list(overrides))
    if (model / "config.yaml").is_file():
        return load(model / "config.yaml", list(overrides))
    origin = read_origin(model)
    if origin is None and not model.exists():
        raise UserError(
            f"{model}: there is no such folder; for a model of the hub give a configuration, as in: mmrl eval {model} "
            "recipe.yaml"
        )
    if origin is None:
        raise UserError(f"{model} has no configuration of its own; give one, as in: mmrl eval {model} recipe.yaml")
    return configure(origin["config"], list(overrides))
