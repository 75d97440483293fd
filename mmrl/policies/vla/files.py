"""Policies from folders and hub names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from mmrl.errors import UserError
from mmrl.policies import vlm
from mmrl.policies.vla import small
from mmrl.policies.vla.backbone import Backbone, VisionLanguageBackbone
from mmrl.policies.vla.codec import ActionCodec, load_statistics
from mmrl.policies.vla.heads import BridgeHead, Head, RegressionHead, TokenHead
from mmrl.policies.vla.policy import DESCRIPTION, WEIGHTS, Network, VisionLanguageActionPolicy
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vla.states import StateStatistics, measure
from mmrl.samplers.settings import Denoising
from sims import VectorSim

LEROBOT = ("smolvla", "pi0")  # types of policies that can be trained
SHAPING = ("head", "chunk", "decoding", "bins", "width", "depth", "queries", "spread", "proprioception")


def load(
    path: str,
    settings: Actions,
    denoising: Denoising,
    sim: VectorSim,
    *,
    supervised: bool = False,
    critic: bool = False,
    reference: bool = False,
    temperature: float = 1.0,
    evaluation_temperature: float = 0.0,
    max_prompt_length: int = 1024,
    seed: int = 0,
    dtype: str = "float32",
    attention: str = "sdpa",
    freeze: Sequence[str] = (),
    lora: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
) -> VisionLanguageActionPolicy:
    """A policy from a folder that `save` wrote, or with a new head, drawn from `seed`, on any image-text model.

    Raises UserError for a folder whose head is another one than `settings` asks for.
    """
    together = settings.head == "token" and settings.decoding == "bidirectional"
    model = {"dtype": dtype, "attention": attention, "freeze": freeze, "lora": lora, "processor": processor or {}}
    backbone = load_backbone(path, max_prompt_length, together=together, crop=settings.center_crop, **model)
    if backbone.units is not None and settings.head != "flow":
        raise UserError(f"action.head={settings.head}, but model.path={path} has a flow head of its own; use head=flow")
    for name in ("statistics", "standardise"):
        if backbone.units is not None and getattr(settings, name):
            raise UserError(f"action.{name} is set, but model.path={path} has statistics of its own; remove it")
    action_dim, state_dim = sim.simulator.action_dim, sim.simulator.state_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = make_head(settings, denoising, backbone, action_dim, state_dim, supervised, temperature)
        network = Network(backbone, head, state_dim, critic)
    statistics, states = backbone.units, None
    if settings.statistics is not None:
        statistics = load_statistics(settings.statistics, settings.statistics_key, action_dim)
    if (Path(path) / DESCRIPTION).is_file():
        states = _restore(Path(path), network, settings, state_dim)
    elif settings.standardise:
        states = measure(sim, statistics)
    return VisionLanguageActionPolicy(
        network,
        settings,
        sim,
        statistics=statistics,
        states=states,
        temperature=temperature,
        evaluation_temperature=evaluation_temperature,
        reference=reference,
    )


def load_backbone(path: str, max_prompt_length: int, *, together: bool, crop: float, **options: Any) -> Backbone:
    """By what the folder holds; else a transformers image-text model."""
    is_small = (Path(path) / small.CONFIG).is_file()
    told = {} if is_small else _told(path)
    if told.get("model_type") == "openvla":
        try:
            from mmrl.policies.vla import openvla
        except ModuleNotFoundError as error:
            raise UserError(f"OpenVLA: {error}; install it with: pip install 'mmrl[openvla]'") from error
        return openvla.load(path, max_prompt_length, together=together, crop=crop, **options)
    if crop != 1:
        raise UserError(f"action.center_crop={crop} is for OpenVLA, which model.path={path} is not; remove it")
    if lerobot_type := told.get("type") if "output_features" in told else None:
        return _load_lerobot(path, lerobot_type, **options)
    if together:
        raise UserError(f"action.decoding=bidirectional is for OpenVLA-OFT, which model.path={path} is not")
    if is_small:
        unused = [key for key in ("freeze", "lora", "processor") if options[key]]
        if unused or options["dtype"] != "float32":
            raise UserError(f"model.{(unused or ['dtype'])[0]} is not for the small network in {path}; remove it")
        return small.load(Path(path))
    model, processor = vlm.load_model(path, **options)
    return VisionLanguageBackbone(model, processor, max_prompt_length)


def _told(path: str) -> dict[str, Any]:
    """The config.json of `path`, or of what it is a LoRA of; nothing if there is none, of which `vlm.load_model`
    complains."""
    try:
        return PreTrainedConfig.get_config_dict(vlm.base_of(path))[0]
    except (OSError, ValueError):
        return {}


def _load_lerobot(path: str, kind: str, *, attention: str, **options: Any) -> Backbone:
    if kind not in LEROBOT:
        raise UserError(f"model.path={path} is a LeRobot policy of type {kind}; only {' and '.join(LEROBOT)} are known")
    try:
        from mmrl.policies.vla import lerobot
    except ModuleNotFoundError as error:
        raise UserError(
            f"model.path={path} is a LeRobot policy: {error}; install the extra lerobot as scripts/lerobot.txt says"
        ) from error
    return lerobot.load(path, **options)


def make_head(
    settings: Actions,
    denoising: Denoising,
    backbone: Backbone,
    action_dim: int,
    state_dim: int,
    supervised: bool,
    temperature: float,
) -> Head:
    sizes = (action_dim, state_dim, backbone.width)
    if settings.head == "token":
        codec = ActionCodec(backbone.vocabulary, settings.bins)
        if codec.first < 0:
            raise UserError(f"action.bins={settings.bins}, but the vocabulary has only {backbone.vocabulary} ids")
        head = TokenHead(settings, *sizes, codec, backbone)
        head.temperature = 1.0 if supervised else temperature
        return head
    if settings.head == "flow":
        if not supervised and settings.spread == "sampler" and denoising.likelihood == "contrast":
            raise UserError("denoising.likelihood=contrast is for images; use chain or matching")
        try:
            flow = backbone.flow_head(settings, denoising, action_dim, state_dim, supervised)
            assert flow.decisions > 0  # asked here, so that a window that can not be is found before the run
            return flow
        except ValueError as error:
            raise UserError(f"denoising: {error}") from None
    return {"regression": RegressionHead, "bridge": BridgeHead}[settings.head](settings, *sizes)


def _restore(folder: Path, network: Network, settings: Actions, state_dim: int) -> StateStatistics | None:
    """Head and critic, and what states are standardised by; a critic that is not there starts anew."""
    then: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    for name in SHAPING if network.backbone.units is None else ():
        if then[name] != getattr(settings, name):
            raise UserError(f"action.{name}={getattr(settings, name)}, but {folder} was trained with {then[name]}")
    found = load_file(folder / WEIGHTS)
    wanted = {n for n in network.state_dict() if not n.startswith("backbone.")}
    missing = [n for n in sorted(wanted - set(found)) if not n.startswith("critic.")]
    if missing:
        raise UserError(f"{folder / WEIGHTS} lacks {missing[0]}")
    network.load_state_dict({n: value for n, value in found.items() if n in wanted}, strict=False)
    known = then.get("states")  # absent before there were any
    if settings.standardise != (known is not None):
        raise UserError(f"action.standardise={settings.standardise}, but {folder} was trained with {known is not None}")
    return None if known is None else StateStatistics.from_json(known, state_dim)
