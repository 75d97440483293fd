"""Who may import whom: each room stands on a floor and sees only lower ones, also from inside functions."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = [
    ["mmrl.kernels"],
    [
        "mmrl.core",
        "mmrl.rollouts",
        "mmrl.runtime.lazy_imports",
        "mmrl.errors",
        "mmrl.runtime.lazy_attributes",
        "mmrl.runtime.progress",
        "mmrl.runtime.logging",
        "mmrl.runtime.seeds",
        "mmrl.version",
    ],  # the words everyone above shares
    [
        "mmrl.settings",
        "mmrl.settings.tree",
        "mmrl.settings.overrides",
        "mmrl.runtime.files",
        "mmrl.runtime.jsonl",
        "mmrl.runtime.ray",
        "mmrl.runtime.devices",
    ],
    [
        "mmrl.schedules.schedule",
        "mmrl.protocols.critic",
        "mmrl.monitors.guards",
        "mmrl.settings.overrides",
        "mmrl.sections",
        "mmrl.protocols.requirements",
        "mmrl.prompts.sampler",
        "mmrl.prompts.views",
        "mmrl.samplers",
    ],
    ["mmrl.prompts.counterfactual_views", "mmrl.prompts.curriculum", "mmrl.schedules.controllers"],
    ["mmrl.prompts.mixture"],
    ["mmrl.collection.extra_sources", "mmrl.terms", "mmrl.protocols.batch", "mmrl.protocols.parts"],
    [
        "mmrl.collection.self_correction",
        "mmrl.collection.guided_groups",
        "mmrl.collection.replay_buffer",
        "mmrl.collection.resampling",
    ],
    ["mmrl.rewards", "mmrl.generation", "mmrl.engine", "mmrl.report", "mmrl.collection.settings"],
    ["mmrl.sims"],  # above rewards: environments run in the same kind of process
    [
        "mmrl.tasks.settings",
        "mmrl.tasks.data.handwritten_digits",
        "mmrl.tasks.data.moving_shapes",
        "mmrl.tasks.data.named_images",
    ],
    [
        "mmrl.policies",
        "mmrl.algorithms",
        "mmrl.training.balancing",
        "mmrl.collection.dynamic_sampling",
        "mmrl.checkpoints",
        "mmrl.training.metrics",
    ],
    ["mmrl.tasks", "mmrl.evaluation.search"],
    ["mmrl.config"],
    [
        "mmrl.collection.segment_values",
        "mmrl.cli.convert",
        "mmrl.doctor",
        "mmrl.evaluation.evaluate",
        "mmrl.evaluation.protocol",
        "mmrl.doctor.memory_plan",
        "mmrl.collection.partial_rollouts",
        "mmrl.training.preparation",
        "mmrl.collection.prefetch",
        "mmrl.cli.reference",
        "mmrl.cli.new",
    ],
    ["mmrl.collection.collector", "mmrl.workers"],
    ["mmrl.trainer", "mmrl.build", "mmrl.doctor"],
    ["mmrl.job", "mmrl.workers.worker"],
    ["mmrl.cli.main"],
    ["mmrl.__main__", "mmrl"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SEE_THE_CONFIGURATION = {room for rooms in FLOORS[14:] for room in rooms}
ONLY_TORCH = {"mmrl.core", "mmrl.samplers"}  # besides the standard library and kernels
# Whatever begins like this is imported when a configuration is read, and so is every module named `settings`.
LIGHT = tuple(
    f"mmrl.{name}"
    for name in (
        "algorithms",
        "categories",
        "collection",
        "config",
        "controls",
        "corrections",
        "critics",
        "counterfactuals",
        "curricula",
        "errors",
        "guards",
        "guidance",
        "lazy",
        "needs",
        "policies.vla.mixture_settings",
        "prompt_samplers",
        "replays",
        "retries",
        "search",
        "settings",
        "sources",
        "terms",
        "tree",
        "views",
    )
)
HEAVY = {"torch", "transformers", "diffusers", "deepspeed", "numpy", "PIL"}


def light(module: str) -> bool:
    """Whether a configuration can not be read without the module: it must not import torch."""
    return module.endswith(".settings") or module.startswith(LIGHT)


def room_of(module: str) -> str:
    """The room a module belongs to; each folder under tasks is a room of its own on the floor of tasks."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[:2] == ["mmrl", "tasks"] else 2])


def floor_of(room: str) -> int | None:
    return FLOOR.get(room, FLOOR["mmrl.tasks"] if room.startswith("mmrl.tasks.") else None)


class ForTypes(ast.NodeTransformer):
    """Takes out what is imported for type checkers alone."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        alone = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if alone else self.generic_visit(node)


def imported(source: str, module: str, is_package: bool, types: bool) -> list[tuple[int, str]]:
    """Line and full name of everything `source` imports anywhere; of `from a import b` it is a.b. types: also what it
    imports for type checkers alone."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree if types else ForTypes().visit(tree)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -(node.level - is_package) or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    here = room_of(module)
    if module in ("mmrl", "mmrl.tasks") and is_package:
        here = module
    elif floor_of(here) is None:
        return [f"{module} stands on no floor; name it in FLOORS"]
    found = []
    for line, name in imported(source, module, is_package, here in ONLY_TORCH):
        where, top = f"{module}:{line} imports {name}", name.split(".")[0]
        if top == "mmrl":
            there = room_of(name)
            if there == here:
                continue
            if floor_of(there) is None:
                found.append(f"{where}, which stands on no floor")
            elif floor_of(here) is None or floor_of(there) >= floor_of(here):
                found.append(f"{where}, which is not on a lower floor")
            if there == "mmrl.config" and here not in SEE_THE_CONFIGURATION:
                found.append(f"{where}: only those above it see the configuration")
        elif top in ("tasks", "sims"):
            found.append(f"{where}: it is mmrl.{top}")
        elif top == "tests":
            found.append(f"{where}: tests are no part of the program")
        elif here in ONLY_TORCH and not light(module) and top != "torch" and top not in sys.stdlib_module_names:
            found.append(f"{where}: {here} imports only torch")
    return found


def modules() -> list[tuple[str, Path]]:
    paths = [path for folder in ("mmrl", "tasks", "sims") for path in sorted((ROOT / folder).rglob("*.py"))]
    named = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [(n if n.split(".")[0] == "mmrl" else f"mmrl.{n}", path) for n, path in zip(named, paths, strict=True)]


@pytest.mark.parametrize(("module", "path"), modules(), ids=[module for module, _ in modules()])
def test_imports_go_down(module, path):
    assert faults(path.read_text(), module, path.name == "__init__.py") == []


def test_every_room_is_looked_at():
    seen = {room_of(module) for module, _ in modules()}
    assert {"mmrl.core", "mmrl.policies", "mmrl.engine", "mmrl.trainer", "mmrl.cli.main", "mmrl.sims"} <= seen
    assert "mmrl.tasks.visual_qa" in seen
    assert {name for name, _ in modules() if light(name)} >= set(LIGHT)


def test_a_configuration_is_read_without_torch():
    """Every module that holds settings, in one new process; it names the first that brings something heavy along."""
    names = ["mmrl.config", *sorted(name for name, _ in modules() if light(name))]
    code = f"""if True:
        import importlib, sys
        for name in {names}:
            importlib.import_module(name)
            found = {HEAVY} & sys.modules.keys()
            assert not found, f"{{name}} imports {{found}}"
        from mmrl.config import load, to_yaml
        from pathlib import Path
        for recipe in sorted(Path("configs").rglob("*.yaml")):
            to_yaml(load(recipe))
            found = {HEAVY} & sys.modules.keys()
            assert not found, f"{{recipe}} imports {{found}}"
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


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
        ("mmrl.rewards.compose", "import tests.helpers.tiny_models"),
        ("mmrl.engine.deepspeed", "class A:\n    def f(self):\n        import mmrl.policies.vlm"),
        ("mmrl.policies.vlm", "from mmrl.config import Config"),
        ("mmrl.policies.vlm", "from mmrl import config"),
        ("mmrl.policies.vlm", "from mmrl.tasks.visual_qa import build"),
        ("mmrl.trainer", "from mmrl import cli"),
        ("mmrl.trainer", "from mmrl.unheard import of"),
        ("mmrl.tasks.visual_qa.data.files", "from mmrl.trainer import Trainer"),
        ("mmrl.tasks.visual_qa.data.files", "from mmrl.cli.main import main"),
        ("mmrl.tasks.visual_qa.data.files", "from mmrl.config import load"),
        ("mmrl.tasks.visual_qa.data.files", "from mmrl.tasks.image_generation import prompts"),
        ("mmrl.sims.mujoco.env", "import mmrl.policies"),
        ("mmrl.unheard", "import torch"),
        ("mmrl.tasks.visual_qa.data.files", "import sims.mujoco"),
        ("mmrl.settings", "from mmrl.schedules.schedule import Control"),
        ("mmrl.terms.losses.kl", "from mmrl.algorithms.algorithm import Algorithm"),
        ("mmrl.algorithms.grpo", "def f():\n    from mmrl.engine import Engine\n    from mmrl.trainer import Trainer"),
        ("mmrl.algorithms.grpo", "from mmrl.policies.settings import ModelSettings"),
        ("mmrl.tasks.settings", "from mmrl.tasks.visual_qa.settings import (VisualQASettings")(
            "mmrl.core.reduce", "if TYPE_CHECKING:\n    from mmrl.rollouts import Rollouts"
        ),
        ("mmrl.policies.vlm", "if TYPE_CHECKING:\n    pass\nelse:\n    from mmrl.config import Config"),
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
            "mmrl.tasks.visual_qa.data.files",
            "from mmrl.tasks.visual_qa.data.rows import Rows\nfrom mmrl.rewards import Reward\nimport mmrl.sims.mujoco",
        ),
        ("mmrl.trainer", "from mmrl.config import Config\nfrom mmrl import checkpoints"),
        ("mmrl.policies.vlm", "if TYPE_CHECKING:\n    from mmrl.config import Config"),
        ("mmrl.algorithms.grpo", "def f():\n    from mmrl.core import advantages"),
        ("mmrl.samplers.settings", "from mmrl.settings import option\nfrom pydantic import model_validator"),
    ],
)
def test_what_is_allowed_is_not_a_fault(module, source):
    assert faults(source, module) == []
