"""Policies from folders and hub names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from mmrl.errors import UserError
from mmrl.generation.settings import WorkerSampling
from mmrl.policies.vla import critic as critics
from mmrl.policies.vla.backbones import small, states_only
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.heads.codec import ActionStatistics, load_statistics
from mmrl.policies.vla.heads.head import Head
from mmrl.policies.vla.policy import DESCRIPTION, WEIGHTS, Network, VisionLanguageActionPolicy
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
from mmrl.protocols.critic import CriticSettings
from mmrl.protocols.parts import SimulatedTask
from mmrl.report.settings import Log
from mmrl.schedules.schedule import Schedule, constant
from mmrl.settings import plain
from mmrl.sims import VectorSim
from mmrl.sims.vector.simulator import nearest

if TYPE_CHECKING:
    from mmrl.protocols.job import JobConfig

LEROBOT = ("smolvla", "pi0", "pi05")  # types of policies that can be trained
SHAPING = ("chunk", "proprioception")  # keys of `action` that the saved weights depend on, whatever the head


def load(config: JobConfig, task: object, path: str) -> VisionLanguageActionPolicy:
    """The policy at `path` that `config` describes, in the simulator of `task`. Raises UserError as `open_policy`, and
    for a task without a simulator."""
    model: VisionLanguageActionModel = config.model
    action: Actions = config.section("action")
    rollout: EpisodePrompts = config.rollout
    if not isinstance(task, SimulatedTask):
        raise UserError(
            "model.type=vision_language_action needs a task with a simulator, such as task.type=manipulation"
        )
    at_once = plain(rollout).get("micro_batch") or config.rollouts_per_step
    if isinstance(rollout, WorkerSampling) and rollout.workers is not None and not action.standardise:
        at_once = 1  # workers play the episodes; only its facts are asked for here, or random states of all its rows
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
        watched=task.watched or any(measurement.films for measurement in config.needs.measurements),
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
) -> VisionLanguageActionPolicy:
    """A policy from a folder that `save` wrote, or with a new head, drawn from `seed`, on any image-text model.

    Raises UserError for a folder whose head is another one than `action` asks for.
    """
    check_cameras(action, sim)
    action_dim, state_dim = sim.simulator.action_dim, sim.simulator.state_dim
    if action.privileged > state_dim:
        raise UserError(f"action.privileged={action.privileged}, but the simulator's state has {state_dim} numbers")
    _check_base_is_known(Path(path), action.head)
    scales = _scales(action, action_dim)
    sizes = (action_dim, state_dim - action.privileged)
    backbone = load_backbone(path, model, action, max_prompt_length, sizes)
    if isinstance(backbone, states_only.StateBackbone):
        check_reads_state(path, action, sizes[1])
    if backbone.units is not None:
        _check_own_head(path, action)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = action.head.build(action, backbone, action_dim, 0 if backbone.reads_state else sizes[1])
        if not isinstance(head, Head):
            raise UserError(f"action.head.type={action.head.type} builds no mmrl.policies.vla.heads.head:Head")
        judge = None if critic is None else critics.build(critic, backbone.width, state_dim)
        network = Network(backbone, head, judge, action.privileged)
    statistics, states = backbone.units if scales is None else scales, None
    if (Path(path) / DESCRIPTION).is_file():
        states = _restore(Path(path), network, action, state_dim)
    elif action.standardise:
        states = measure(sim, statistics)
    if network.head.base is not None and not (Path(path) / DESCRIPTION).is_file():
        _check_base_is_loaded(path, action, network.head.base)
    return VisionLanguageActionPolicy(
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
    )


def _scales(action: Actions, action_dim: int) -> ActionStatistics | None:
    """What actions are scaled by, where there are statistics. Raises UserError where they do not fit the robot."""
    if action.statistics is not None:
        return load_statistics(action.statistics, action.statistics_key, action_dim, bounded=action.head.core.bounded)
    if action.statistics_key is not None:
        raise UserError(
            f"action.statistics_key={action.statistics_key} chooses from action.statistics, which is not set"
        )
    return None


def load_backbone(
    path: str, model: VisionLanguageActionModel, action: Actions, max_prompt_length: int, sizes: tuple[int, int]
) -> Backbone:
    """By what the folder holds; else a transformers image-text model. sizes: numbers of an action, and of the state
    that the policy may read."""
    if (Path(path) / states_only.CONFIG).is_file():
        check_small(path, model)
        _check_no_features(path, action)
        return states_only.StateBackbone()
    if (Path(path) / small.CONFIG).is_file():
        _check_not_openvla(path, action)
        _check_no_features(path, action)
        check_small(path, model)
        return small.load(Path(path))
    from mmrl.policies.vla.backbones import transformers  # it takes seconds, which the small ones above do without

    told = transformers.told(path)
    if told.get("model_type") == "openvla":
        try:
            from mmrl.policies.vla.backbones import openvla
        except ModuleNotFoundError as error:
            raise UserError(f"OpenVLA: {error}; install it with: pip install -e '.[openvla]'") from error
        _check_no_features(path, action)
        return openvla.load(path, model, action, max_prompt_length, sizes)
    if lerobot_type := told.get("type") if "output_features" in told else None:
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
        core, where = action.head.core, _where(action.head)
        key = "decoding=bidirectional" if isinstance(core, TokenActions) else f"type={core.type}"
        raise UserError(f"{where}.{key} is for OpenVLA-OFT, which model.path={path} is not")


def _where(head: ActionHead) -> str:
    """The key of the head that a checkpoint brings."""
    return "action.head" if head.core is head else "action.head.base"


def _check_base_is_known(folder: Path, head: ActionHead) -> None:
    """Raises UserError, before weights are read, for a head around another one that `folder` does not hold."""
    comes_along = isinstance(head.core, L1Actions) or (
        isinstance(head.core, TokenActions) and head.core.decoding != "parallel"
    )
    if head.core is not head and folder.is_dir() and not (folder / DESCRIPTION).is_file() and not comes_along:
        raise UserError(_no_base(str(folder), head))


def _check_base_is_loaded(path: str, action: Actions, base: Head) -> None:
    """Raises UserError for a base with weights that were drawn just now; how wide it draws does not matter."""
    known = (*base.new_parts, "log_std", "log_scale")
    if any(not name.startswith(known) for name, _ in base.named_parameters()):
        raise UserError(_no_base(path, action.head))


def _no_base(path: str, head: ActionHead) -> str:
    return (
        f"action.head.type={head.type} adds to the actions of a trained head of type {head.core.type}, but "
        f"model.path={path} holds none; train one with action.head.type={head.core.type}, and name its run's final "
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
    """Raises UserError where a policy without a backbone would be left with nothing to read."""
    if not action.head.core.states_suffice:
        raise UserError(
            f"{_where(action.head)}.type={action.head.core.type} reads what a backbone made of images and words, but "
            f"model.path={path} reads only the robot's state; use action.head.type=gaussian, horizons, invertible or "
            "latent"
        )
    if not action.proprioception or state_dim == 0:
        raise UserError(
            f"model.path={path} reads only the robot's state, but action.proprioception={action.proprioception} and "
            f"the simulator's state has {state_dim} numbers"
        )


def check_cameras(action: Actions, sim: VectorSim) -> None:
    """Raises UserError for cameras that the simulator does not have."""
    for camera in action.cameras or []:
        if camera not in sim.cameras:
            near = nearest(camera, sim.cameras)
            raise UserError(f"action.cameras: no camera {camera!r}{near}; the simulator has {', '.join(sim.cameras)}")


def _load_lerobot(path: str, kind: str, model: VisionLanguageActionModel, action: Actions) -> Backbone:
    if kind not in LEROBOT:
        known = f"{', '.join(LEROBOT[:-1])} and {LEROBOT[-1]}"
        raise UserError(f"model.path={path} is a LeRobot policy of type {kind}; only {known} are known")
    try:
        from mmrl.policies.vla.backbones import lerobot
    except ModuleNotFoundError as error:
        raise UserError(
            f"model.path={path} is a LeRobot policy: {error}; install the extra lerobot as scripts/lerobot.txt says"
        ) from error
    return lerobot.load(path, model, action)


def _check_own_head(path: str, action: Actions) -> None:
    """Raises UserError for what a policy with an action expert and statistics of its own does not take."""
    if not isinstance(action.head, ActionFlow):
        raise UserError(
            f"action.head.type={action.head.type}, but model.path={path} has a flow head of its own; use "
            "action.head.type=flow"
        )
    for name in ("statistics", "standardise"):
        if vars(action)[name]:
            raise UserError(f"action.{name} is set, but model.path={path} has statistics of its own; remove it")


def _restore(folder: Path, network: Network, action: Actions, state_dim: int) -> StateStatistics | None:
    """Head and critic, and what states are standardised by; a critic that is not there starts anew, and so do
    `Head.new_parts`. A head around another one begins with the one in `folder` as its base, or goes on."""
    then = described(folder)
    becomes_base = network.head.base is not None and then["head"]["type"] != action.head.type
    if network.backbone.units is None:
        _check_shape(folder, then, action, becomes_base)
    found = load_file(folder / WEIGHTS)
    wanted = {n for n in network.state_dict() if not n.startswith("backbone.")}
    if becomes_base:
        found = {n.replace("head.", "head.base.", 1) if n.startswith("head.") else n: v for n, v in found.items()}
    anew = ("critic.", *(f"head.{part}" for part in network.head.new_parts))
    missing = [n for n in sorted(wanted - set(found)) if not n.startswith(anew)]
    if becomes_base:  # all else that the head has begins now
        missing = [n for n in missing if n.startswith("head.base.")]
    if missing:
        raise UserError(f"{folder / WEIGHTS} lacks {missing[0]}")
    shapes = {n: value.shape for n, value in network.state_dict().items()}
    for name in sorted(wanted & set(found)):
        if name.startswith("critic.") and found[name].shape != shapes[name]:
            raise UserError(
                f"algorithm.critic makes {name} {list(shapes[name])}, but in {folder / WEIGHTS} it is "
                f"{list(found[name].shape)}; ask for the critic that it was trained with"
            )
    network.load_state_dict({n: value for n, value in found.items() if n in wanted}, strict=False)
    known = then.get("states")  # absent before there were any
    if action.standardise != (known is not None):
        raise UserError(f"action.standardise={action.standardise}, but {folder} was trained with {known is not None}")
    return None if known is None else StateStatistics.from_json(known, state_dim)


def described(folder: Path) -> dict[str, Any]:
    """The `action` section that a folder was trained with. In folders from before heads had sections of their own, a
    head's options lie beside its name."""
    then: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    return then | {"head": {**then, "type": then["head"]}} if isinstance(then["head"], str) else then


def _check_shape(folder: Path, then: dict[str, Any], action: Actions, becomes_base: bool) -> None:
    """Raises UserError for the first key that the weights depend on and that is another one now. becomes_base: the head
    in `folder` is the base of what `action` asks for."""
    pairs = [(f"action.{name}", then[name], vars(action)[name]) for name in SHAPING]
    if becomes_base:
        pairs += _shapes("action.head.base", then["head"], action.head.core)
    else:
        pairs += _shapes("action.head", then["head"], action.head)
    for key, before, value in pairs:
        if before != value:
            raise UserError(f"{key}={value}, but {folder} was trained with {before}")


def _shapes(key: str, then: dict[str, Any], now: ActionHead) -> list[tuple[str, Any, Any]]:
    """Keys that a head's weights depend on, with their values then and now; those of its base behind them."""
    found = [(f"{key}.{name}", then.get(name), plain(now)[name]) for name in ("type", *now.shaping)]
    return found if now.core is now else [*found, *_shapes(f"{key}.base", then.get("base", {}), now.core)]
