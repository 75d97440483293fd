"""Policies from folders and hub names."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file

from mmrl.errors import UserError
from mmrl.generation.settings import WorkerSampling
from mmrl.policies.vla import critic as critics
from mmrl.policies.vla.action_ranges import probe_range
from mmrl.policies.vla.backbones import small, states_only
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.heads.codec import ActionStatistics, Units, scaled_to
from mmrl.policies.vla.heads.head import Head
from mmrl.policies.vla.policy import DESCRIPTION, WEIGHTS, Network, VisionLanguageActionPolicy, tells_apart
from mmrl.policies.vla.settings import (
    ActionFlow,
    ActionHead,
    Actions,
    EpisodeEngine,
    EpisodeEvaluation,
    EpisodePrompts,
    EpisodeSampling,
    L1Actions,
    TokenActions,
    VisionLanguageActionModel,
)
from mmrl.policies.vla.states import StateStatistics, measure
from mmrl.policies.vla.statistics import statistics_of
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
LEROBOT_CONFIG = "config.json"  # of policies with a flow of their own; the small networks have none
LEROBOT = ("smolvla", "pi0", "pi05")  # types of policies that can be trained
SHAPING = ("chunk", "proprioception")  # keys of `action` that the saved weights depend on, whatever the head


def load(config: JobConfig, task: object, path: str) -> VisionLanguageActionPolicy:
    """Loads the policy at `path` that `config` describes, in the simulator of `task`. Raises UserError as
    `open_policy`, and for a task without a simulator."""
    model: VisionLanguageActionModel = config.model
    action: Actions = config.section("action")
    rollout: EpisodePrompts = config.rollout
    if not isinstance(task, SimulatedTask):
        raise UserError(
            "model.type=vision_language_action needs a task with a simulator, such as task.type=manipulation"
        )
    at_once = plain(rollout).get("micro_batch") or config.rollouts_per_step
    if isinstance(rollout, WorkerSampling) and rollout.workers is not None and not action.standardise:
        at_once = 1  # workers play the episodes; here only attributes of the simulator are needed
    return open_policy(
        path,
        model,
        action,
        task.make_simulator(min(at_once, task.simulator_rows)),
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
    """Loads a policy from a folder that `save` wrote, or with a new head, drawn from `seed`, on any image-text model.

    Raises UserError for a folder whose head is another one than that of `action`.
    """
    check_cameras(action, sim)
    action_dim, state_dim = sim.simulator.action_dim, sim.simulator.state_dim
    if action.privileged > state_dim:
        raise UserError(f"action.privileged={action.privileged}, but the simulator's state has {state_dim} numbers")
    _check_base_is_known(Path(path), action.head)
    scales = _scales(action, sim)  # before weights are read
    sizes = (action_dim, state_dim - action.privileged)
    backbone = load_backbone(path, model, action, max_prompt_length, sizes)
    if isinstance(backbone, states_only.StateBackbone):
        check_reads_state(path, action, sizes[1])
    if backbone.units is not None:
        _check_own_head(path, action)
    else:
        _check_statistics_are_there(path, action)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = action.head.build(action, backbone, action_dim, 0 if backbone.reads_state else sizes[1])
        if not isinstance(head, Head):
            raise UserError(f"action.head.type={action.head.type} builds no mmrl.policies.vla.heads.head:Head")
        judge = None if critic is None else critics.build(critic, backbone.width, state_dim)
        network = Network(backbone, head, judge, action.privileged)
    statistics: Units | None = backbone.units if scales is None else scales
    if statistics is None:
        statistics = _stretched(sim, bounded=action.head.core.bounded)
    states = None
    if (Path(path) / DESCRIPTION).is_file():
        states = _restore(Path(path), network, action, state_dim)
    elif action.standardise:
        states = measure(sim, statistics)
    if network.head.base is not None and not (Path(path) / DESCRIPTION).is_file():
        _check_base_is_loaded(path, action, network.head.base)
    policy = VisionLanguageActionPolicy(
        network,
        action,
        sim,
        temperature=temperature,
        evaluation_temperature=evaluation_temperature,
        statistics=statistics,
        states=states,
        steps_at_once=steps_at_once,
        log=log,
        watched=watched,
        stores_episodes=stores_episodes,
    )
    if action.labels is not None:
        check_labels(path, policy)
    return policy


def _stretched(sim: VectorSim, *, bounded: bool) -> ActionStatistics | None:
    """Returns the scale of actions that a simulator with bounds of its own asks for, and says so."""
    bounds = action_bounds_of(sim.simulator)
    if bounds is None:
        return None
    scale, (low, high) = scaled_to(bounds, bounded), bounds
    if scale is not None:
        log.info(
            "actions: -1 .. 1 of the policy are %s .. %s of %s, its bounds; action.statistics sets others",
            np.round(low[scale.mask], 4).tolist(),
            np.round(high[scale.mask], 4).tolist(),
            sim.name,
        )
    if not (np.isfinite(low) & np.isfinite(high)).all():
        log.info("actions: %s has numbers without two bounds; of these the policy reaches -1 .. 1 alone", sim.name)
    return scale


def _scales(action: Actions, sim: VectorSim) -> ActionStatistics | None:
    """Loads the statistics that scale actions, None where there are none, and warns of ranges that the simulator does
    not take. Raises UserError where they do not fit the robot."""
    scales = statistics_of(action, sim.simulator.action_dim)
    if scales is not None:
        for remark in probe_range(str(action.statistics), scales, action_bounds_of(sim.simulator)):
            log.warning(remark)
    return scales


def _check_statistics_are_there(path: str, action: Actions) -> None:
    """Raises UserError for options of statistics that neither a file nor the checkpoint has."""
    if action.replace_statistics:
        raise UserError(
            f"action.replace_statistics=true, but model.path={path} has no statistics of its own; remove it"
        )
    for key in ("statistics_key", "normalisation"):
        if vars(action)[key] is not None and action.statistics is None:
            raise UserError(f"action.{key}={vars(action)[key]} chooses from action.statistics, which is not set")


def load_backbone(
    path: str, model: VisionLanguageActionModel, action: Actions, max_prompt_length: int, sizes: tuple[int, int]
) -> Backbone:
    """Loads the backbone whose files are at `path`, by default a transformers image-text model. sizes: numbers of an
    action, and of the state that the policy may read."""
    if (Path(path) / states_only.CONFIG).is_file():
        check_small(path, model)
        _check_no_features(path, action)
        return states_only.StateBackbone()
    if (Path(path) / small.CONFIG).is_file():
        _check_not_openvla(path, action)
        _check_no_features(path, action)
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
        _check_no_features(path, action)
        return openvla.load(path, model, action, max_prompt_length, sizes)
    if lerobot_type := checkpoint_config.get("type") if "output_features" in checkpoint_config else None:
        _check_not_openvla(path, action)
        return _load_lerobot(path, lerobot_type, model, action)
    _check_not_openvla(path, action)
    _check_no_features(path, action)
    return transformers.load(path, model, max_prompt_length)


def _check_not_openvla(path: str, action: Actions) -> None:
    """Raises UserError for options that only OpenVLA has."""
    if action.resize != "model":
        raise UserError(f"action.resize={action.resize} is for OpenVLA, which model.path={path} is not; remove it")
    if action.center_crop != 1:
        raise UserError(
            f"action.center_crop={action.center_crop} is for OpenVLA, which model.path={path} is not; remove it"
        )
    if action.head.together:
        core, head_key = action.head.core, _head_key(action.head)
        key = "decoding=bidirectional" if isinstance(core, TokenActions) else f"type={core.type}"
        raise UserError(f"{head_key}.{key} is for OpenVLA-OFT, which model.path={path} is not")


def _head_key(head: ActionHead) -> str:
    """Returns the configuration key of the head that a checkpoint brings."""
    return "action.head" if head.core is head else "action.head.base"


def _check_base_is_known(folder: Path, head: ActionHead) -> None:
    """Raises UserError, before weights are read, for a head around another one that `folder` does not hold."""
    comes_along = (
        isinstance(head.core, L1Actions)
        or (isinstance(head.core, TokenActions) and head.core.decoding != "parallel")
        or (isinstance(head.core, ActionFlow) and (folder / LEROBOT_CONFIG).is_file())
    )
    if head.core is not head and folder.is_dir() and not (folder / DESCRIPTION).is_file() and not comes_along:
        raise UserError(_no_base(str(folder), head))


def _check_base_is_loaded(path: str, action: Actions, base: Head) -> None:
    """Raises UserError for a base with newly drawn weights, apart from its standard deviation or scale."""
    new = (*base.new_parts, "log_std", "log_scale")
    if any(not name.startswith(new) for name, _ in base.named_parameters()):
        raise UserError(_no_base(path, action.head))


def _no_base(path: str, head: ActionHead) -> str:
    """Returns the message for a head that needs a trained base head which the model does not have."""
    return (
        f"action.head.type={head.type} is built around a trained head of type {head.core.type}, but "
        f"model.path={path} has none; train one with action.head.type={head.core.type}, and name its run's final "
        "folder or use model.warm_start"
    )


def _check_no_features(path: str, action: Actions) -> None:
    """Raises UserError for the option that only LeRobot's policies have."""
    if action.camera_features is not None:
        raise UserError(f"action.camera_features is for LeRobot's policies, which model.path={path} is not; remove it")


def check_small(path: str, model: VisionLanguageActionModel) -> None:
    """Raises UserError for options of large models."""
    unused = [key for key in ("freeze", "lora", "processor") if vars(model)[key]]
    if unused or model.dtype != "float32":
        raise UserError(f"model.{(unused or ['dtype'])[0]} is not for the small network in {path}; remove it")


def check_reads_state(path: str, action: Actions, state_dim: int) -> None:
    """Raises UserError where a policy without a backbone would have no input."""
    if not action.head.core.states_suffice:
        raise UserError(
            f"{_head_key(action.head)}.type={action.head.core.type} reads the output of a backbone, but "
            f"model.path={path} reads only the robot's state; use action.head.type=gaussian, horizons, invertible or "
            "latent"
        )
    if not action.proprioception or state_dim == 0:
        raise UserError(
            f"model.path={path} reads only the robot's state, but action.proprioception={action.proprioception} and "
            f"the simulator's state has {state_dim} numbers"
        )


def check_labels(path: str, policy: VisionLanguageActionPolicy) -> None:
    """Raises UserError for a model that reads the labels of a good and of a bad action alike."""
    good, bad = policy.advantage_labels
    if not tells_apart(policy, good, bad):
        raise UserError(
            f"action.labels: model.path={path} does not tell {good!r} from {bad!r}: it reads no text, or has none "
            "of these words; choose words of its vocabulary"
        )


def check_cameras(action: Actions, sim: VectorSim) -> None:
    """Raises UserError for cameras that the simulator does not have."""
    for camera in action.cameras or []:
        if camera not in sim.cameras:
            near = nearest(camera, sim.cameras)
            raise UserError(f"action.cameras: no camera {camera!r}{near}; the simulator has {', '.join(sim.cameras)}")


def _load_lerobot(path: str, kind: str, model: VisionLanguageActionModel, action: Actions) -> Backbone:
    """Loads a LeRobot policy of type `kind`. Raises UserError for an unknown type, and where LeRobot is not
    installed."""
    if kind not in LEROBOT:
        names = f"{', '.join(LEROBOT[:-1])} and {LEROBOT[-1]}"
        raise UserError(f"model.path={path} is a LeRobot policy of type {kind}; only {names} are known")
    try:
        from mmrl.policies.vla.backbones import lerobot
    except ModuleNotFoundError as error:
        raise UserError(
            f"model.path={path} is a LeRobot policy: {error}; install the extra lerobot as scripts/lerobot.txt says"
        ) from error
    return lerobot.load(path, model, action)


def _check_own_head(path: str, action: Actions) -> None:
    """Raises UserError for options that do not apply to a policy with an action expert and statistics of its own."""
    if not isinstance(action.head.core, ActionFlow):
        raise UserError(
            f"{_head_key(action.head)}.type={action.head.core.type}, but model.path={path} has a flow head of its own; "
            "use action.head.type=flow, or steered"
        )
    if action.standardise:
        raise UserError(f"action.standardise is set, but model.path={path} has statistics of its own; remove it")


def _restore(folder: Path, network: Network, action: Actions, state_dim: int) -> StateStatistics | None:
    """Loads head and critic, and returns the statistics that standardise states. A missing critic is initialised anew,
    and so are `Head.new_parts`. A head around another one takes the head in `folder` as its base, or continues."""
    saved = described(folder)
    becomes_base = network.head.base is not None and saved["head"]["type"] != action.head.type
    if network.backbone.units is None:
        _check_shape(folder, saved, action, becomes_base)
    weights = load_file(folder / WEIGHTS)
    expected = {n for n in network.state_dict() if not n.startswith("backbone.")}
    if becomes_base:
        weights = {n.replace("head.", "head.base.", 1) if n.startswith("head.") else n: v for n, v in weights.items()}
    anew = ("critic.", *(f"head.{part}" for part in network.head.new_parts))
    missing = [n for n in sorted(expected - set(weights)) if not n.startswith(anew)]
    if becomes_base:  # the rest of the head is initialised anew
        missing = [n for n in missing if n.startswith("head.base.")]
    if missing:
        raise UserError(f"{folder / WEIGHTS} lacks {missing[0]}")
    shapes = {n: value.shape for n, value in network.state_dict().items()}
    for name in sorted(expected & set(weights)):
        if name.startswith("critic.") and weights[name].shape != shapes[name]:
            raise UserError(
                f"algorithm.critic makes {name} {list(shapes[name])}, but in {folder / WEIGHTS} it is "
                f"{list(weights[name].shape)}; set the critic that it was trained with"
            )
    network.load_state_dict({n: value for n, value in weights.items() if n in expected}, strict=False)
    statistics = saved.get("states")  # absent in folders of older versions
    if action.standardise != (statistics is not None):
        raise UserError(
            f"action.standardise={action.standardise}, but {folder} was trained with {statistics is not None}"
        )
    return None if statistics is None else StateStatistics.from_json(statistics, state_dim)


def described(folder: Path) -> dict[str, Any]:
    """Returns the `action` section that a folder was trained with. In folders of older versions the head's options lie
    beside its name, not in a section of their own."""
    saved: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    return saved | {"head": {**saved, "type": saved["head"]}} if isinstance(saved["head"], str) else saved


def _check_shape(folder: Path, saved: dict[str, Any], action: Actions, becomes_base: bool) -> None:
    """Raises UserError for the first key that the weights depend on and whose value differs. becomes_base: the head in
    `folder` becomes the base of the head of `action`."""
    pairs = [(f"action.{name}", saved[name], vars(action)[name]) for name in SHAPING]
    if becomes_base:
        pairs += _shapes("action.head.base", saved["head"], action.head.core)
    else:
        pairs += _shapes("action.head", saved["head"], action.head)
    for key, before, value in pairs:
        if before != value:
            raise UserError(f"{key}={value}, but {folder} was trained with {before}")


def _shapes(key: str, saved: dict[str, Any], head: ActionHead) -> list[tuple[str, Any, Any]]:
    """Returns the keys that a head's weights depend on, with their saved and present values; those of its base last."""
    pairs = [(f"{key}.{name}", saved.get(name), plain(head)[name]) for name in ("type", *head.shaping)]
    return pairs if head.core is head else [*pairs, *_shapes(f"{key}.base", saved.get("base", {}), head.core)]
