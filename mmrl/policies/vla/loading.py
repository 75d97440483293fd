"""Loads robot policies from folders and hub names, and checks that they fit the job."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file

from mmrl.errors import UserError
from mmrl.generation.settings import WorkerSampling
from mmrl.policies.vla import critic as critics
from mmrl.policies.vla.action_ranges import check_statistics
from mmrl.policies.vla.backbones import small, states_only
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.heads.codec import ActionNormalizer, ActionStatistics, statistics_from_bounds
from mmrl.policies.vla.heads.gaussian_settings import L1Actions
from mmrl.policies.vla.heads.head import Head
from mmrl.policies.vla.policy import Network, VisionLanguageActionPolicy, distinguishes_labels
from mmrl.policies.vla.saved import ARCHITECTURE_KEYS, CONFIG, WEIGHTS, has_own_weights, read_saved_config
from mmrl.policies.vla.settings import (
    ActionFlow,
    ActionHead,
    Actions,
    EpisodeEngine,
    EpisodeEvaluation,
    EpisodePrompts,
    EpisodeSampling,
    TokenActions,
    VisionLanguageActionModel,
)
from mmrl.policies.vla.states import StateStatistics, measure_statistics
from mmrl.policies.vla.statistics import load_action_statistics
from mmrl.policies.vla.teachers import teacher_actions
from mmrl.protocols.abilities import EpisodeStoring
from mmrl.protocols.critic import CriticSettings
from mmrl.protocols.parts import SimulatedTask
from mmrl.report.settings import Log
from mmrl.runtime.installation import extra_command
from mmrl.schedules.schedule import Schedule, constant
from mmrl.settings import plain
from mmrl.sims import VectorSim
from mmrl.sims.vector.simulator import nearest
from mmrl.sims.vector.transitions import action_bounds_of

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

log = logging.getLogger(__name__)
LEROBOT_CONFIG = "config.json"  # of LeRobot's policies, which hold a flow head; mmrl's small networks have no such file
LEROBOT = ("smolvla", "pi0", "pi05")  # types of LeRobot policies that can be trained


def load(config: JobConfig, job_task: object, path: str) -> VisionLanguageActionPolicy:
    """Loads the policy at `path` with the options of `config`, and makes the simulator of `job_task` for it. Raises
    UserError as `open_policy`, and for a task without a simulator."""
    model: VisionLanguageActionModel = config.model
    action: Actions = config.section("action")
    rollout: EpisodePrompts = config.rollout
    task = simulated(job_task)
    # all rollouts of a step play at once, unless rollout.micro_batch, which not every class has, limits their number
    num_envs = plain(rollout).get("micro_batch") or config.rollouts_per_step
    if isinstance(rollout, WorkerSampling) and rollout.workers is not None and not action.standardise:
        num_envs = 1  # workers play the episodes; here only attributes of the simulator are needed
    return open_policy(
        path,
        model,
        action,
        task.make_simulator(min(num_envs, task.simulator_rows)),
        critic=config.needs.critic,
        seed=config.seed,
        max_prompt_length=rollout.max_prompt_length,
        temperature=rollout.temperature if isinstance(rollout, EpisodeSampling) else constant(1.0),
        evaluation_temperature=(
            config.evaluation.temperature if isinstance(config.evaluation, EpisodeEvaluation) else 0.0
        ),
        steps_at_once=config.engine.steps_at_once if isinstance(config.engine, EpisodeEngine) else None,
        log=config.log,
        watched=task.watched or any(measurement.needs_frames for measurement in config.needs.measurements),
        stores_episodes=EpisodeStoring in config.needs.required,
    )


def load_teacher(config: JobConfig, task: object, path: str) -> VisionLanguageActionPolicy:
    """Loads a teacher for distillation, whose head may have other sizes than the policy's. It scores episodes and plays
    none, so its simulator has one row. Raises UserError as `load`."""
    model: VisionLanguageActionModel = config.model
    rollout: EpisodePrompts = config.rollout
    return open_policy(
        path,
        model.frozen,
        teacher_actions(config.section("action"), path),
        simulated(task).make_simulator(1),
        critic=None,
        seed=config.seed,
        max_prompt_length=rollout.max_prompt_length,
        temperature=constant(1.0),  # actions are scored at the temperature that they were sampled at
        evaluation_temperature=0.0,
        steps_at_once=config.engine.steps_at_once if isinstance(config.engine, EpisodeEngine) else None,
    )


def simulated(task: object) -> SimulatedTask:
    """Returns the task. Raises UserError if it has no simulator."""
    if not isinstance(task, SimulatedTask):
        raise UserError(
            "model.type=vision_language_action needs a task with a simulator, such as task.type=manipulation"
        )
    return task


def open_policy(
    path: str,
    model: VisionLanguageActionModel,
    action: Actions,
    sim: VectorSim,
    *,
    critic: CriticSettings | None,
    seed: int,
    max_prompt_length: int,
    temperature: Schedule,
    evaluation_temperature: float,
    steps_at_once: int | None = None,
    log: Log | None = None,
    watched: bool = False,
    stores_episodes: bool = False,
) -> VisionLanguageActionPolicy:
    """Loads a policy from a folder that a run saved, or from a published model. A head or critic that the model lacks
    gets random weights, which depend on `seed`.

    critic: None for algorithms without a critic. temperature: the sampling temperature of rollouts. steps_at_once, log,
    watched, stores_episodes: see `VisionLanguageActionPolicy`. Raises UserError if options, model and simulator do not
    fit one another.
    """
    check_cameras(action, sim)
    action_dim, state_dim = sim.simulator.action_dim, sim.simulator.state_dim
    if action.privileged > state_dim:
        raise UserError(
            f"action.privileged={action.privileged}, but the simulator's state has {state_dim} numbers; lower it"
        )
    _check_base_exists(Path(path), action.head)
    statistics = _load_statistics(action, sim)  # before weights are read, which takes longer
    sizes = (action_dim, state_dim - action.privileged)
    backbone = load_backbone(path, model, action, max_prompt_length, sizes)
    if isinstance(backbone, states_only.StateBackbone):
        check_reads_state(path, action, sizes[1])
    if backbone.action_normalizer is not None:
        _check_lerobot_options(path, action)
    else:
        _check_statistics_options(path, action)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = action.head.build(action, backbone, action_dim, 0 if backbone.reads_state else sizes[1])
        if not isinstance(head, Head):
            raise UserError(
                f"action.head.type={action.head.type}: its build must return an mmrl.policies.vla.heads.head:Head, not "
                f"{type(head).__name__}"
            )
        critic_network = None if critic is None else critics.build(critic, backbone.width, state_dim)
        network = Network(backbone, head, critic_network, action.privileged)
    normalizer: ActionNormalizer | None = backbone.action_normalizer if statistics is None else statistics
    if normalizer is None:
        normalizer = _statistics_from_simulator(sim, bounded=action.head.checkpoint_head.bounded)
    state_statistics = None
    if (Path(path) / CONFIG).is_file():
        state_statistics = _restore(Path(path), network, action, state_dim)
    elif action.standardise:
        state_statistics = measure_statistics(sim, normalizer)
    if network.head.base is not None and not (Path(path) / CONFIG).is_file():
        _check_base_is_loaded(path, action, network.head.base)
    policy = VisionLanguageActionPolicy(
        network,
        action,
        sim,
        temperature=temperature,
        evaluation_temperature=evaluation_temperature,
        normalizer=normalizer,
        state_statistics=state_statistics,
        steps_at_once=steps_at_once,
        log=log,
        watched=watched,
        stores_episodes=stores_episodes,
    )
    if action.labels is not None:
        check_labels(path, policy)
    return policy


def _statistics_from_simulator(sim: VectorSim, *, bounded: bool) -> ActionStatistics | None:
    """Returns statistics that map [-1, 1] to the simulator's action bounds, and logs them. Returns None for a simulator
    whose actions lie in [-1, 1]. bounded: see `statistics_from_bounds`."""
    bounds = action_bounds_of(sim.simulator)
    if bounds is None:
        return None
    statistics, (low, high) = statistics_from_bounds(bounds, bounded), bounds
    if statistics is not None:
        log.info(
            "actions: -1 and 1 of the policy are mapped to %s and %s, the bounds of %s; action.statistics sets others",
            np.round(low[statistics.mask], 4).tolist(),
            np.round(high[statistics.mask], 4).tolist(),
            sim.name,
        )
    if not (np.isfinite(low) & np.isfinite(high)).all():
        log.info(
            "actions: some numbers of %s have no finite bounds; the policy's -1 .. 1 is not scaled there", sim.name
        )
    return statistics


def _load_statistics(action: Actions, sim: VectorSim) -> ActionStatistics | None:
    """Loads the statistics that `action.statistics` names; None if it is not set. Logs a warning for ranges that exceed
    the simulator's. Raises UserError if the statistics do not fit the robot."""
    statistics = load_action_statistics(action, sim.simulator.action_dim)
    if statistics is not None:
        for warning in check_statistics(str(action.statistics), statistics, action_bounds_of(sim.simulator)):
            log.warning(warning)
    return statistics


def _check_statistics_options(path: str, action: Actions) -> None:
    """Raises UserError for options that have no effect on a checkpoint without statistics: action.replace_statistics,
    and options that select from action.statistics if that is not set."""
    if action.replace_statistics:
        raise UserError(
            f"action.replace_statistics=true, but model.path={path} has no statistics to replace; "
            "remove action.replace_statistics"
        )
    for key in ("statistics_key", "normalisation"):
        if vars(action)[key] is not None and action.statistics is None:
            raise UserError(
                f"action.{key}={vars(action)[key]} chooses from action.statistics, which is not set; set it, or remove "
                f"action.{key}"
            )


def load_backbone(
    path: str, model: VisionLanguageActionModel, action: Actions, max_prompt_length: int, sizes: tuple[int, int]
) -> Backbone:
    """Loads the backbone at `path`: one of mmrl's small ones, OpenVLA, a LeRobot policy, or any image-text model of
    transformers. sizes: the action size, and the size of the state that the policy may read."""
    if (Path(path) / states_only.CONFIG).is_file():
        check_small(path, model)
        _check_no_camera_features(path, action)
        return states_only.StateBackbone()
    if (Path(path) / small.CONFIG).is_file():
        _check_not_openvla(path, action)
        _check_no_camera_features(path, action)
        check_small(path, model)
        return small.load(Path(path))
    from mmrl.policies.vla.backbones import (
        transformers,  # its import takes seconds, which the small backbones above do not need
    )

    checkpoint_config = transformers.read_config(path)
    if checkpoint_config.get("model_type") == "openvla":
        try:
            from mmrl.policies.vla.backbones import openvla
        except ModuleNotFoundError as error:
            raise UserError(f"OpenVLA: {error}; install it with: {extra_command('openvla')}") from error
        _check_no_camera_features(path, action)
        return openvla.load(path, model, action, max_prompt_length, sizes)
    # keys of a LeRobot policy's config.json
    if "output_features" in checkpoint_config and checkpoint_config.get("type"):
        _check_not_openvla(path, action)
        return _load_lerobot(path, checkpoint_config["type"], model, action)
    _check_not_openvla(path, action)
    _check_no_camera_features(path, action)
    return transformers.load(path, model, max_prompt_length)


def _check_not_openvla(path: str, action: Actions) -> None:
    """Raises UserError for options that only OpenVLA has."""
    if action.resize != "model":
        raise UserError(f"action.resize={action.resize} is for OpenVLA, which model.path={path} is not; remove it")
    if action.center_crop != 1:
        raise UserError(
            f"action.center_crop={action.center_crop} is for OpenVLA, which model.path={path} is not; remove it"
        )
    if action.head.bidirectional:
        head, head_key = action.head.checkpoint_head, _head_key(action.head)
        key = "decoding=bidirectional" if isinstance(head, TokenActions) else f"type={head.type}"
        others = "parallel or autoregressive" if isinstance(head, TokenActions) else "another type, such as token"
        raise UserError(f"{head_key}.{key} is for OpenVLA-OFT, which model.path={path} is not; set it to {others}")


def _head_key(head: ActionHead) -> str:
    """Returns the configuration key of the section that holds `head.checkpoint_head`."""
    return "action.head" if head.checkpoint_head is head else "action.head.base"


def _check_base_exists(folder: Path, head: ActionHead) -> None:
    """Raises UserError, before weights are read, for a head built around a base head that `folder` does not hold."""
    backbone_holds_base = (
        isinstance(head.checkpoint_head, L1Actions)
        or (isinstance(head.checkpoint_head, TokenActions) and head.checkpoint_head.decoding != "parallel")
        or (isinstance(head.checkpoint_head, ActionFlow) and (folder / LEROBOT_CONFIG).is_file())
    )
    no_run_saved_it = folder.is_dir() and not (folder / CONFIG).is_file()
    if head.checkpoint_head is not head and no_run_saved_it and not backbone_holds_base:
        raise UserError(_missing_base_message(str(folder), head))


def _check_base_is_loaded(path: str, action: Actions, base: Head) -> None:
    """Raises UserError for a base head with parameters of its own, which the model at `path` does not hold."""
    if has_own_weights(base):
        raise UserError(_missing_base_message(path, action.head))


def _missing_base_message(path: str, head: ActionHead) -> str:
    """Returns the message for a head that is built around a trained base head which the model does not have."""
    return (
        f"action.head.type={head.type} is built around a trained head of type {head.checkpoint_head.type}, but "
        f"model.path={path} has none; train one with action.head.type={head.checkpoint_head.type}, and name its run's "
        "final folder or use model.warm_start"
    )


def _check_no_camera_features(path: str, action: Actions) -> None:
    """Raises UserError for action.camera_features, an option of LeRobot's policies only."""
    if action.camera_features is not None:
        raise UserError(f"action.camera_features is for LeRobot's policies, which model.path={path} is not; remove it")


def check_small(path: str, model: VisionLanguageActionModel) -> None:
    """Raises UserError for options that mmrl's small networks do not have."""
    unused = [key for key in ("freeze", "lora", "processor") if vars(model)[key]]
    if unused or model.dtype != "float32":
        raise UserError(f"model.{(unused or ['dtype'])[0]} is not for the small network in {path}; remove it")


def check_reads_state(path: str, action: Actions, state_dim: int) -> None:
    """Raises UserError if the head of a policy without a backbone cannot read the state, or there is no state."""
    if not action.head.checkpoint_head.accepts_state_only:
        raise UserError(
            f"{_head_key(action.head)}.type={action.head.checkpoint_head.type} reads the output of a backbone, but "
            f"model.path={path} reads only the robot's state; use action.head.type=gaussian, horizons, invertible or "
            "latent"
        )
    if not action.proprioception or state_dim == 0:
        raise UserError(
            f"model.path={path} reads only the robot's state, but action.proprioception={action.proprioception} and "
            f"the simulator's state has {state_dim} numbers; set action.proprioception=true, with a simulator that has "
            "a state"
        )


def check_labels(path: str, policy: VisionLanguageActionPolicy) -> None:
    """Raises UserError if the model's inputs are the same with the labels of good and of bad actions."""
    good, bad = policy.advantage_labels
    if not distinguishes_labels(policy, good, bad):
        raise UserError(
            f"action.labels: model.path={path} does not tell {good!r} from {bad!r}: it reads no text, or has none "
            "of these words; choose words of its vocabulary"
        )


def check_cameras(action: Actions, sim: VectorSim) -> None:
    """Raises UserError if `action.cameras` names a camera that the simulator does not have."""
    for camera in action.cameras or []:
        if camera not in sim.cameras:
            near = nearest(camera, sim.cameras)
            raise UserError(f"action.cameras: no camera {camera!r}{near}; the simulator has {', '.join(sim.cameras)}")


def _load_lerobot(path: str, policy_type: str, model: VisionLanguageActionModel, action: Actions) -> Backbone:
    """Loads a LeRobot policy of type `policy_type`. Raises UserError for an unsupported type, and if LeRobot is not
    installed."""
    if policy_type not in LEROBOT:
        names = f"{', '.join(LEROBOT[:-1])} and {LEROBOT[-1]}"
        raise UserError(f"model.path={path} is a LeRobot policy of type {policy_type}; only {names} are supported")
    try:
        from mmrl.policies.vla.backbones import lerobot
    except ModuleNotFoundError as error:
        raise UserError(
            f"model.path={path} is a LeRobot policy: {error}; install the extra lerobot as scripts/lerobot.txt says"
        ) from error
    return lerobot.load(path, model, action)


def _check_lerobot_options(path: str, action: Actions) -> None:
    """Raises UserError for options that do not fit a LeRobot policy, which has its own action expert and statistics."""
    if not isinstance(action.head.checkpoint_head, ActionFlow):
        raise UserError(
            f"{_head_key(action.head)}.type={action.head.checkpoint_head.type}, but model.path={path} has a flow "
            "head of its own; use action.head.type=flow, or steered"
        )
    if action.standardise:
        raise UserError(
            f"action.standardise is set, but model.path={path} has statistics of its own; remove action.standardise"
        )


def _restore(folder: Path, network: Network, action: Actions, state_dim: int) -> StateStatistics | None:
    """Loads the weights of the head and the critic from `folder`, and returns the statistics that standardise states.

    If the folder lacks a critic or `Head.optional_parameters`, these keep their initial weights. If `action.head` is
    built around a base head, a saved head of another type is loaded into the base. Raises UserError if other weights
    are missing, and for options that differ from those of the run that saved the folder."""
    saved = read_saved_config(folder)
    becomes_base = network.head.base is not None and saved["head"]["type"] != action.head.type
    if network.backbone.action_normalizer is None:
        _check_architecture(folder, saved, action, becomes_base)
    weights = load_file(folder / WEIGHTS)
    expected = {n for n in network.state_dict() if not n.startswith("backbone.")}
    if becomes_base:
        weights = {n.replace("head.", "head.base.", 1) if n.startswith("head.") else n: v for n, v in weights.items()}
    optional = ("critic.", *(f"head.{name}" for name in network.head.optional_parameters))
    missing = [n for n in sorted(expected - set(weights)) if not n.startswith(optional)]
    if becomes_base:  # other parameters of the head keep their initial values
        missing = [n for n in missing if n.startswith("head.base.")]
    if missing:
        raise UserError(f"{folder / WEIGHTS} lacks {missing[0]}; set action.head as in the run that saved it")
    shapes = {n: value.shape for n, value in network.state_dict().items()}
    for name in sorted(expected & set(weights)):
        if name.startswith("critic.") and weights[name].shape != shapes[name]:
            raise UserError(
                f"algorithm.critic gives {name} the shape {list(shapes[name])}, but in {folder / WEIGHTS} it has "
                f"{list(weights[name].shape)}; set algorithm.critic as in the run that saved it"
            )
    network.load_state_dict({n: value for n, value in weights.items() if n in expected}, strict=False)
    statistics = saved.get("states")  # absent in folders of older versions
    if action.standardise != (statistics is not None):
        trained = "without" if statistics is None else "with"
        raise UserError(
            f"action.standardise={str(action.standardise).lower()}, but {folder} was trained {trained} standardised "
            f"states; set it to {str(statistics is not None).lower()}"
        )
    return None if statistics is None else StateStatistics.from_json(statistics, state_dim)


def _check_architecture(folder: Path, saved: dict[str, Any], action: Actions, becomes_base: bool) -> None:
    """Raises UserError for the first option that the weights depend on and whose value differs from the saved one.

    saved: see `read_saved_config`. becomes_base: whether the saved head becomes the base of `action.head`."""
    values = [(f"action.{name}", saved[name], vars(action)[name]) for name in ARCHITECTURE_KEYS]
    if becomes_base:
        values += _architecture_values("action.head.base", saved["head"], action.head.checkpoint_head)
    else:
        values += _architecture_values("action.head", saved["head"], action.head)
    for key, saved_value, value in values:
        if saved_value != value:
            raise UserError(f"{key}={value}, but {folder} was trained with {saved_value}; set {key} to that value")


def _architecture_values(key: str, saved: dict[str, Any], head: ActionHead) -> list[tuple[str, Any, Any]]:
    """Returns (key, saved value, configured value) of the options that a head's weights depend on, followed by the
    options of its base head.

    key: the name of the head's section in the configuration; saved: that section as it was saved."""
    values = [(f"{key}.{name}", saved.get(name), plain(head)[name]) for name in ("type", *head.architecture_keys)]
    if head.checkpoint_head is not head:
        values += _architecture_values(f"{key}.base", saved.get("base", {}), head.checkpoint_head)
    return values
