"""Policies of every head over the small backbone and a tiny Qwen3-VL, acting on a line that can be checked by hand."""

import json
from pathlib import Path

import pytest
import torch

from mmrl.policies.vla.backbones import small
from mmrl.policies.vla.loading import open_policy
from mmrl.policies.vla.saved import CONFIG
from mmrl.policies.vla.settings import Actions, TaughtActions, VisionLanguageActionModel
from mmrl.protocols.critic import CriticSettings
from mmrl.rollouts import Prompt
from mmrl.schedules.schedule import constant
from mmrl.settings import choose
from mmrl.settings import make as made_section
from mmrl.sims import build
from mmrl.tasks.manipulation import tiny_model

CHUNK = 4  # of at most 6 actions: a second look ends in the middle of its chunk
SMALL_FLOW = {"type": "flow", "width": 32, "depth": 1, "steps": 4, "evaluation_steps": 4}
FROZEN_FLOW = {"type": "flow", "width": 32, "depth": 1, "evaluation_steps": 4}
KINDS = {
    "parallel": {"type": "token", "bins": 8},
    "autoregressive": {"type": "token", "bins": 8, "decoding": "autoregressive"},
    "regression": {"type": "regression"},
    "gaussian": {"type": "gaussian", "width": 16, "layers": 1},
    "bridge": {"type": "bridge", "width": 32, "depth": 2, "queries": 3},
    "invertible": {"type": "invertible", "width": 16, "layers": 1, "last_gain": 0.1, "scale": 0.2},
    "latent": {
        "type": "latent",
        "width": 16,
        "layers": 1,
        "steps": 3,
        "latent": 2,
        "last_gain": 0.1,
        "exit_chance": 0.4,
    },
    "horizons": {"type": "horizons", "width": 16, "layers": 1},
    "residual": {"type": "residual", "experts": 3, "width": 16, "base": {"type": "token", "bins": 8}},
    "residual, flow": {"type": "residual", "experts": 2, "width": 16, "noise": 0.0, "base": SMALL_FLOW},
    "steered": {"type": "steered", "width": 16, "layers": 1, "base": FROZEN_FLOW},
    "flow": {**SMALL_FLOW, "likelihood": {"type": "chain", "window": {"type": "random", "size": 1}}},
    "flow, all steps": {
        **SMALL_FLOW,
        "likelihood": {"type": "chain", "transition": {"type": "cps", "noise": 0.7, "logp": "density"}},
    },
    "flow, learned": {**SMALL_FLOW, "likelihood": "learned"},
    "flow, matching": {**SMALL_FLOW, "likelihood": "matching"},
    "flow, contrast": {**SMALL_FLOW, "likelihood": {"type": "contrast", "draws": 2}},
}
LEVELS = ("token", "action", "chunk")


def starts(*seeds):
    """On the line an episode starts at its seed / 100 and is over at 1, or after 6 actions."""
    return [Prompt(f"go-{seed}", "go", metadata={"task": "go", "seed": seed, "kind": "go"}) for seed in seeds]


@pytest.fixture(scope="session")
def backbones(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("small", "qwen")}
    words = ("go", "from")
    small.create(found["small"], small.SmallActionConfig(words, bins=8, width=32, channels=(4, 8, 8)), seed=0)
    tiny_model.build(found["qwen"], seed=0)
    return found


def taught(head):
    """The head of a supervised job: a flow has other options there."""
    left_out = ("steps", "likelihood") if head["type"] == "flow" else ()
    return {name: value for name, value in head.items() if name not in left_out}


@pytest.fixture(scope="session")
def make(backbones, tmp_path_factory):
    bases = {}

    def based(head, backbone, sim, **action):
        """A folder with `head` over `backbone`, for a head that is built around it; its weights are stirred, as if it
        had learned something. A folder that has a head already stays what it is."""
        if (Path(backbones.get(backbone, backbone)) / CONFIG).is_file():
            return backbone
        key = json.dumps([head, str(backbone), action, str(sim)], sort_keys=True)
        if key not in bases:
            policy, bases[key] = made(head, backbone, sim=sim, **action), tmp_path_factory.mktemp("base")
            generator = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for parameter in policy.module.head.parameters():
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            policy.save(bases[key], policy.module.state_dict())
        return str(bases[key])

    def made(kind="parallel", backbone="small", *, rows=4, sim=None, simulator=None, supervised=False, **options):
        """kind: one of KINDS, or a head's section. `options` are of the section `action`, of its head, of the model,
        and of `open_policy`."""
        opened = {"critic": None, "seed": 0, "max_prompt_length": 128, "evaluation_temperature": 0.0, "log": None}
        opened |= {name: options.pop(name) for name in list(options) if name in opened}
        if opened["critic"] is not None:
            opened["critic"] = choose(CriticSettings, "shared" if opened["critic"] is True else opened["critic"])
        opened["temperature"] = constant(options.pop("temperature", 1.0))
        names = VisionLanguageActionModel.model_fields
        model = {name: options.pop(name) for name in list(options) if name in names}
        action = {name: options.pop(name) for name in list(options) if name in Actions.model_fields}
        head = KINDS[kind] if isinstance(kind, str) else kind
        head = {**(taught(head) if supervised else head), **options}
        section = TaughtActions if supervised else Actions
        settings = made_section(section, {"chunk": CHUNK, "prompt": "{instruction}", "head": head, **action})
        line = sim or build("tests.sims.line_simulator:Line", rows, simulator)
        if "base" in head:
            backbone = based(head["base"], backbone, sim, **action)
        path = str(backbones.get(backbone, backbone))
        return open_policy(path, made_section(VisionLanguageActionModel, model), settings, line, **opened)

    return made
