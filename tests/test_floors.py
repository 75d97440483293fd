"""Who may import whom: each room stands on a floor and sees only lower ones, also from inside functions."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    ["mmrl.kernels"],
    ["mmrl.core", "mmrl.samplers"],
    ["mmrl.rollouts", "mmrl.errors", "mmrl.sections"],  # the words everyone above shares
    ["mmrl.placement"],
    ["mmrl.rewards", "mmrl.generation", "mmrl.engine", "sims", "mmrl.report", "mmrl.data"],
    ["mmrl.policies", "mmrl.checkpoints", "mmrl.metrics"],
    ["tasks", "mmrl.config", "mmrl.protocols"],
    ["mmrl.batches"],
    ["mmrl.trainer", "mmrl.build"],
    ["mmrl.cli"],
    ["mmrl.__main__"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SEE_THE_CONFIGURATION = {"mmrl.config", "mmrl.batches", "mmrl.trainer", "mmrl.build", "mmrl.cli"}
ONLY_TORCH = {"mmrl.core", "mmrl.samplers"}  # besides the standard library and kernels


def room_of(module: str) -> str:
    """The room a module belongs to; each folder under tasks is a room of its own on the floor of tasks."""
    parts = module.split(".")
    return ".".join(parts[: 1 if parts[0] == "sims" else 2])


def floor_of(room: str) -> int | None:
    return FLOOR.get("tasks" if room.split(".")[0] == "tasks" else room)


def imported(source: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """Line and full name of everything `source` imports anywhere; of `from a import b` it is a.b."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -(node.level - is_package) or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    here = room_of(module)
    if module in ("mmrl", "tasks", "sims") and is_package:
        here = module
    elif floor_of(here) is None:
        return [f"{module} stands on no floor; name it in FLOORS"]
    found = []
    for line, name in imported(source, module, is_package):
        where, top = f"{module}:{line} imports {name}", name.split(".")[0]
        if top in ("mmrl", "tasks", "sims"):
            there = room_of(name)
            if there == here:
                continue
            if floor_of(there) is None:
                found.append(f"{where}, which stands on no floor")
            elif floor_of(here) is None or floor_of(there) >= floor_of(here):
                found.append(f"{where}, which is not on a lower floor")
            if there == "mmrl.config" and here not in SEE_THE_CONFIGURATION:
                found.append(f"{where}: only cli and trainer see the configuration")
        elif top == "tests":
            found.append(f"{where}: tests are no part of the program")
        elif here in ONLY_TORCH and top != "torch" and top not in sys.stdlib_module_names:
            found.append(f"{where}: {here} imports only torch")
    return found


def modules() -> list[tuple[str, Path]]:
    paths = [path for folder in ("mmrl", "tasks", "sims") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path) for path in paths]


@pytest.mark.parametrize(("module", "path"), modules(), ids=[module for module, _ in modules()])
def test_imports_go_down(module, path):
    assert faults(path.read_text(), module, path.name == "__init__.py") == []


def test_every_room_is_looked_at():
    seen = {room_of(module) for module, _ in modules()}
    assert {"mmrl.core", "mmrl.policies", "mmrl.engine", "mmrl.trainer", "mmrl.cli", "tasks.visual_qa", "sims"} <= seen


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmrl.core.reduce", "from mmrl.rollouts import Rollouts"),
        ("mmrl.core.reduce", "import numpy as np"),
        ("mmrl.core.reduce", "from einops import rearrange"),
        ("mmrl.core.reduce", "def f():\n    from mmrl.engine import Engine"),
        ("mmrl.core.reduce", "from mmrl.samplers import windows"),
        ("mmrl.core.reduce", "from ..engine import Engine"),
        ("mmrl.rollouts", "from mmrl.errors import UserError"),
        ("mmrl.rewards.compose", "from mmrl.engine import Engine"),
        ("mmrl.rewards.compose", "import tests.tiny_models"),
        ("mmrl.engine.deepspeed", "class A:\n    def f(self):\n        import mmrl.policies.vlm"),
        ("mmrl.policies.vlm", "from mmrl.config import Config"),
        ("mmrl.policies.vlm", "from mmrl import config"),
        ("mmrl.policies.vlm", "from tasks.visual_qa import build"),
        ("mmrl.trainer", "from mmrl import cli"),
        ("mmrl.trainer", "from mmrl.unheard import of"),
        ("tasks.visual_qa.files", "from mmrl.trainer import Trainer"),
        ("tasks.visual_qa.files", "from mmrl.cli import main"),
        ("tasks.visual_qa.files", "from mmrl.config import load"),
        ("tasks.visual_qa.files", "from tasks.image_generation import prompts"),
        ("sims.mujoco.env", "import mmrl.policies"),
        ("mmrl.unheard", "import torch"),
    ],
)
def test_a_planted_fault_is_found(module, source):
    assert len(faults(source, module)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmrl.core.reduce", "import math, torch.nn\nfrom mmrl.kernels import fused\nfrom .ratios import BOUND"),
        ("mmrl.policies.vlm", "from mmrl.rollouts import Rollouts\nfrom mmrl.core import ratios\nimport transformers"),
        (
            "tasks.visual_qa.files",
            "from tasks.visual_qa.rows import Rows\nfrom mmrl.rewards import Reward\nimport sims.mujoco",
        ),
        ("mmrl.trainer", "from mmrl.config import Config\nfrom mmrl import checkpoints"),
    ],
)
def test_what_is_allowed_is_not_a_fault(module, source):
    assert faults(source, module) == []
