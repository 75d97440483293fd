"""Builds the parts of a job from its configuration: task, policy, engine, generator."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Container
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mmrl import kernels
from mmrl.config import Config, configure
from mmrl.engine import Engine, Ranks, select_device
from mmrl.errors import UserError, describe_error
from mmrl.generation.settings import RolloutWorkers, VLLMGenerator
from mmrl.measurements.teachers import Teacher
from mmrl.policies.settings import ModelSettings
from mmrl.protocols.abilities import require_ability
from mmrl.protocols.columns import check_column
from mmrl.protocols.parts import (
    ConversationTask,
    FittedSource,
    FittingPolicy,
    Policy,
    ResizedTask,
    Resizing,
    SyncedGenerator,
    Task,
)
from mmrl.protocols.teachers import Taught
from mmrl.settings import SettingsError, locate, sections_in
from mmrl.tasks.settings import TaskSettings

CHECKED_PROMPTS = 8  # most training prompts, evenly spread, whose metadata are compared with the needed columns


def build_task(config: Config) -> Task:
    """Builds the task. Checks that it fits the algorithm: names of rewards, rewards of turns, columns that parts read,
    and prompts that measurements need. Raises UserError with the configuration key."""
    check_files(config.task)
    try:
        task = pass_unjudged_gates(config.task, config.algorithm.needs.gates).build(config.seed)
        if isinstance(task, ConversationTask) and task.environment is not None:
            task.environment.check()
    except (ValueError, OSError, ImportError) as error:
        raise UserError(f"task: {error}") from None
    try:
        config.algorithm.check_rewards(list(task.reward_names))
        for shaper in config.algorithm.shapers:
            shaper.check_rewards(list(task.reward_names))
        check_turns(config, task)
        columns = [(key, column) for key, needs in config.algorithm.parts() for column in needs.columns]
        if columns and task.train is not None:
            for row in range(0, len(task.train), math.ceil(len(task.train) / CHECKED_PROMPTS)):
                metadata = task.train[row].metadata
                for key, column in columns:
                    check_column(key, column, task.reward_names, metadata, paired=config.rollout.paired)
        check_measurements(config, task)
    except ValueError as error:
        raise UserError(str(error)) from None
    return task


def check_files(task: TaskSettings) -> None:
    """Raises UserError with the configuration key for a file or folder of the task that does not exist."""
    for key, path in sections_in(task, Path, ("task",)):
        if not path.exists():
            raise UserError(f"{key}={path}: no such file or folder; check the path")


def check_measurements(config: Config, task: Task) -> None:
    """Raises UserError with the configuration key for a measurement that the task's prompts do not allow, such as a
    view of videos where prompts have none. Looks at the first prompt only."""
    measurements = [(key, measurement) for key, needs in config.algorithm.parts() for measurement in needs.measurements]
    if task.train is None or not measurements:
        return
    prompt = task.train[0]
    if isinstance(task, ConversationTask) and task.environment is not None:
        prompt = replace(prompt, before_start=prompt)  # as in a conversation that has started
    for key, measurement in measurements:
        try:
            measurement.check_prompt(prompt)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None


def check_turns(config: Config, task: Task) -> None:
    """Raises ValueError for a shaper that needs rewards of single turns where the environment gives none."""
    if not isinstance(task, ConversationTask) or task.environment is None or task.environment.pays_turns:
        return
    shaper = next((shaper.type for shaper in config.algorithm.shapers if shaper.needs_turn_rewards), None)
    if shaper is not None:
        raise ValueError(
            f"algorithm.shaping ({shaper}) computes advantages from rewards of turns, but task.environment gives none, "
            "so nothing would be learned; set a reward for a tool in task.environment.tools, or use turn_returns and "
            "set its key `answer` to a reward of the task"
        )


def pass_unjudged_gates(task: TaskSettings, gates: Container[str]) -> TaskSettings:
    """Returns the settings with rewards named in `gates` set to 1 for prompts that they do not judge. Gates multiply
    the other rewards, so that 0 would cancel them. Rewards that come with the data are unchanged."""
    if "rewards" not in type(task).model_fields or vars(task)["rewards"] is None:
        return task
    rewards = [
        spec.model_copy(update={"elsewhere": 1.0}) if spec.column in gates and spec.elsewhere is None else spec
        for spec in vars(task)["rewards"]
    ]
    return task.model_copy(update={"rewards": rewards})


def check_model(model: ModelSettings) -> None:
    """Raises UserError if no model is named, or model.path is a folder that does not exist. Reads no file, so that
    this is said before a dataset is downloaded."""
    path = model.path
    if path is None and model.build is None:
        raise UserError("model.path is not set: give a folder or a hub name, such as Qwen/Qwen2.5-VL-3B-Instruct")
    # a hub name has at most one slash, and does not begin like a path
    is_folder = path is not None and (path.startswith(("/", ".", "~")) or path.count("/") > 1)
    if path is not None and is_folder and not Path(path).exists():
        raise UserError(f"model.path={path}: there is no such folder; a name on the Hugging Face hub is user/model")


def build_policy(config: Config, task: Task) -> Policy:
    """Builds the policy from model.path, or from the files that the function model.build writes into a temporary
    folder. Raises UserError where the function fails, and as `check_model` and `load_policy`."""
    choose_kernels(config)
    model = config.model
    check_model(model)
    if model.build is None:
        return load_policy(config, task, str(model.path))
    # Each rank writes its own copy: the function is deterministic and ranks may not share a disk.
    folder = tempfile.mkdtemp(prefix="mmrl-model-")
    try:
        builder = locate_or_fail(model.build, "model.build")
        try:
            builder(folder, seed=config.seed)
        except UserError as error:
            raise UserError(f"model.build={model.build}: {error}") from None
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"model.build={model.build} failed: {describe_error(error)}") from error
        return load_policy(config, task, folder)
    finally:
        shutil.rmtree(folder)


def locate_or_fail(target: str, key: str) -> Any:
    """Imports and returns the object that "package.module:name" names. Raises UserError with the configuration key."""
    try:
        return locate(target, key)
    except SettingsError as error:
        raise UserError(str(error)) from None


def choose_kernels(config: Config) -> None:
    """Selects the fused operators by kernels.backend. Raises UserError if they are not available."""
    try:
        kernels.use(config.kernels.backend)
    except kernels.KernelError as error:
        raise UserError(str(error)) from None


def load_policy(config: Config, task: Task, path: str) -> Policy:
    """Loads the policy from a folder or a hub name, and connects it to its task.

    In this order: loads the model; checks that it has the abilities that its settings offer; tells the resolution of
    its images to a task whose coordinates depend on it; gives its check of prompts (`prompt_problem`, such as a prompt
    that is too long) to data sources that skip such rows (`FittedSource`); sets the loader of teacher models of a
    policy that can be distilled (`Taught`).

    Raises UserError where the model cannot be loaded, where an ability is missing and where a weight is not finite.
    """
    try:
        policy = config.model.load(config, task, path)
    except (OSError, ImportError, ValueError, SafetensorError) as error:  # no weights, no processor, no such layer
        raise UserError(f"model {path} cannot be loaded: {error}") from None
    check_abilities(config, policy)
    if isinstance(task, ResizedTask) and isinstance(policy, Resizing):
        task.use_resize(policy.image_resize)
    if isinstance(policy, FittingPolicy):
        for source in (task.train, task.evaluation):
            if isinstance(source, FittedSource):
                source.fit(policy.prompt_problem)
    if isinstance(policy, Taught):
        policy.teachers.loader = partial(load_teacher, config, task)
    bad_weight = next((n for n, p in policy.module.named_parameters() if not p.isfinite().all()), None)
    if bad_weight is not None:
        raise UserError(f"model {path}: weight {bad_weight} has NaN or infinite values; use another checkpoint")
    return policy


def load_teacher(config: Config, task: Task, path: str, guidance: float | None) -> Policy:
    """Loads a frozen teacher for distillation, of the same kind of model as the policy. guidance: its
    classifier-free guidance scale; None: denoising.guidance of the job. Raises UserError where it cannot be loaded."""
    if guidance is not None:
        denoising = config.section("denoising").model_copy(update={"guidance": guidance})
        config = config.model_copy(update={"denoising": denoising})
    try:
        return config.model.load_teacher(config, task, path)
    except (OSError, ImportError, ValueError, SafetensorError) as error:
        raise UserError(f"teacher {path} cannot be loaded: {error}") from None


def check_teachers(config: Config, policy: Policy) -> None:
    """Raises UserError with the configuration key for a teacher that cannot score the policy's decisions."""
    for key, teacher in sections_in(config.algorithm, Teacher, ("algorithm",)):
        try:
            teacher.check(policy, config)
        except UserError as error:
            raise type(error)(f"{key}: {error}") from None


def check_abilities(config: Config, policy: Policy) -> None:
    """Raises UserError where the policy class lacks an ability (a Protocol of `protocols.abilities`) that its settings
    declare."""
    offered = config.model.capabilities(config).offers
    for ability in sorted((kind for kind in offered if not isinstance(kind, str)), key=lambda kind: kind.__name__):
        try:
            require_ability(policy, ability)
        except TypeError as error:
            raise UserError(f"model.type={config.model.type}: {error}") from None


def build_engine(config: Config, policy: Policy) -> Engine:
    """Builds the DeepSpeed engine around the policy's module. Raises UserError where no parameter is trained, and for a
    teacher that does not fit the policy."""
    if not any(p.requires_grad for p in policy.module.parameters()):
        raise UserError("model.freeze leaves no parameter to train; name fewer parts in it")
    check_teachers(config, policy)
    engine = Engine(
        policy.module, config.optim, config.engine, total_steps=config.total_updates, dtype=config.model.dtype
    )
    policy.set_engine(engine)
    return engine


def build_generator(config: Config, policy: Any, task: Task, ranks: Ranks) -> SyncedGenerator | None:
    """Builds the generator that samples rollouts in place of the policy: vLLM engines or rollout workers. Returns None
    if the configuration has neither, so that the policy itself samples."""
    settings = config.generator
    if isinstance(settings, RolloutWorkers):
        from mmrl.workers.pool import WorkerPool

        return WorkerPool(config, settings, policy, ranks, builder=f"{__name__}:worker_parts")
    if not isinstance(settings, VLLMGenerator):
        return None
    from mmrl.policies.vlm.engines import synced

    source = task.evaluation if task.train is None else task.train
    return synced(config, settings, policy, source, ranks)


def worker_parts(tree: dict[str, Any]) -> tuple[Config, Policy]:
    """Builds the configuration and the policy in a rollout worker. tree: the configuration as plain mappings. Raises
    UserError as `mmrl train` does."""
    config = configure(tree)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    select_device()
    return config, build_policy(config, build_task(config))
