"""Policies of every head over the small backbone and a tiny Qwen3-VL, acting on a line that can be checked by hand."""

import pytest

from mmrl.policies.vla import files, small
from mmrl.policies.vla.settings import Actions
from mmrl.rollouts import Prompt
from mmrl.samplers.settings import Denoising
from mmrl.samplers.windows import Window
from sims import build
from tasks.manipulation import tiny_model

CHUNK = 4  # of at most 6 actions: a second look ends in the middle of its chunk
KINDS = {
    "parallel": ({"head": "token", "bins": 8}, {}),
    "autoregressive": ({"head": "token", "bins": 8, "decoding": "autoregressive"}, {}),
    "regression": ({"head": "regression"}, {}),
    "bridge": ({"head": "bridge", "width": 32, "depth": 2, "queries": 3}, {}),
    "flow": ({"head": "flow", "width": 32, "depth": 1}, {"window": Window("random", size=1)}),
    "flow, all steps": ({"head": "flow", "width": 32, "depth": 1}, {"transition": "cps"}),
    "flow, learned": ({"head": "flow", "width": 32, "depth": 1, "spread": "learned"}, {}),
    "flow, matching": ({"head": "flow", "width": 32, "depth": 1}, {"likelihood": "matching"}),
}
LEVELS = ("token", "action", "chunk")


def starts(*seeds):
    """On the line an episode starts at its seed / 100 and is over at 1, or after 6 actions."""
    return [Prompt(f"go-{seed}", "go", metadata={"task": "go", "seed": seed, "kind": "go"}) for seed in seeds]


@pytest.fixture(scope="session")
def backbones(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("small", "qwen")}
    small.create(found["small"], small.SmallConfig(("go", "from"), bins=8, width=32, channels=(4, 8, 8)), seed=0)
    tiny_model.build(found["qwen"], seed=0)
    return found


@pytest.fixture(scope="session")
def make(backbones):
    def made(kind="parallel", backbone="small", *, rows=4, sim=None, simulator=None, **options):
        action, denoising = KINDS[kind]
        names = Actions.__dataclass_fields__
        own = {name: options.pop(name) for name in list(options) if name in names}
        settings = Actions(**{"chunk": CHUNK, "prompt": "{instruction}", **action, **own})
        options = {"max_prompt_length": 128, **options}
        line = sim or build("tests.sims.line_simulator:Line", rows, simulator)
        path = str(backbones.get(backbone, backbone))
        return files.load(path, settings, Denoising(steps=4, evaluation_steps=4, **denoising), line, **options)

    return made
