"""Who may import whom: each room stands on a floor and sees only lower ones. Imports for type checkers, imports inside
functions and strings that name a module count as any other."""

import subprocess
import sys

import pytest

from tests.house.layout import ROOT, Arrow, arrows, circles, modules, owner

FLOORS = (
    ("configs", "errors", "kernels", "moved", "rollouts", "version"),  # configs: no code, the recipes
    ("core", "runtime"),
    ("settings",),
    ("children",),
    ("engine", "monitors", "prompts", "report", "rewards", "samplers", "schedules"),
    ("checkpoints", "protocols", "sims"),
    ("generation", "measurements", "training"),
    ("terms",),
    ("collection", "policies"),
    ("algorithms", "evaluation", "tasks"),
    ("config", "serving"),
    ("doctor", "preflight", "trainer", "workers"),
    ("build",),
    ("job",),
    ("cli",),
    ("__main__", "__init__"),  # the package itself: `python -m mmrl`, and what `import mmrl` gives
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ONLY_TORCH = {"core", "samplers"}  # besides the standard library and kernels
SHARED_BY_TASKS = {"data", "settings"}  # of one task the others know nothing
# Whatever begins like this is imported when a configuration is read, and so is every module that holds settings.
LIGHT = tuple(
    f"mmrl.{name}"
    for name in (
        "algorithms",
        "collection.branches",
        "collection.extra_sources",
        "collection.guided_groups",
        "collection.replay_buffer",
        "collection.resampling",
        "collection.self_correction",
        "collection.stored_steps.proposals",
        "collection.stored_steps.source",
        "config",
        "errors",
        "evaluation.search",
        "measurements",
        "monitors",
        "prompts",
        "protocols.abilities",
        "protocols.critic",
        "protocols.job",
        "protocols.measurement",
        "protocols.offers",
        "protocols.requirements",
        "runtime.lazy_attributes",
        "schedules",
        "settings",
        "terms",
    )
)
HEAVY = {"torch", "transformers", "diffusers", "deepspeed", "numpy", "PIL"}
MODULES = modules()


def light(module: str) -> bool:
    """Whether a configuration can not be read without the module: it must not import torch."""
    return module.endswith("settings") or module.startswith(LIGHT)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def task_of(name: str) -> str:
    """The task that a module of mmrl.tasks belongs to; "" for what all of them share."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["mmrl", "tasks"] and len(parts) > 2 and parts[2] not in SHARED_BY_TASKS else ""


def fault(module: str, arrow: Arrow) -> str | None:
    """What is wrong with an arrow, where anything is."""
    here, top = room_of(module), arrow.target.split(".")[0]
    if top in ("tasks", "sims"):
        return f"it is mmrl.{top}"
    if top == "tests":
        return "tests are not part of the program"
    if top == "mmrl":
        there = room_of(arrow.target)
        if there not in FLOOR:
            return "it stands on no floor; name it in FLOORS"
        if there != here and FLOOR[there] >= FLOOR[here]:
            return "it is not on a lower floor"
        tasks = task_of(module), task_of(arrow.target)
        if here == there == "tasks" and all(tasks) and tasks[0] != tasks[1]:
            return "a task knows no other task"
    elif here in ONLY_TORCH and not light(module) and top != "torch" and top not in sys.stdlib_module_names:
        return f"mmrl.{here} imports only torch"
    return None


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    if room_of(module) not in FLOOR:
        return [f"{module} stands on no floor; name it in FLOORS"]
    kinds_of_all_tasks = module == "mmrl.tasks.settings"  # whose table of kinds names every task
    said = [
        (arrow, fault(module, arrow))
        for arrow in arrows(source, module, is_package)
        if not (kinds_of_all_tasks and arrow.kind == "string")
    ]
    return [f"{module}:{arrow.line} {arrow.kind} {arrow.target}: {wrong}" for arrow, wrong in said if wrong is not None]


@pytest.mark.parametrize(("module", "path"), MODULES.items(), ids=list(MODULES))
def test_arrows_go_down(module, path):
    assert faults(path.read_text(), module, path.name == "__init__.py") == []


def test_there_is_no_circle_of_types():
    graph = {
        module: {
            target
            for arrow in arrows(path.read_text(), module, path.name == "__init__.py")
            if arrow.kind != "string" and (target := owner(arrow.target, MODULES)) not in (None, module)
        }
        for module, path in MODULES.items()
    }
    assert sum(map(len, graph.values())) > 1500
    assert circles(graph) == []


@pytest.mark.parametrize(("graph", "found"), [
    ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
    ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
    ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}, [["d", "e"], ["a", "b", "c"]]),
])  # fmt: skip
def test_circles_by_hand(graph, found):
    assert circles(graph) == found


@pytest.mark.parametrize(
    ("module", "path"), [(n, p) for n, p in MODULES.items() if p.name == "__init__.py"], ids=lambda value: str(value)
)
def test_a_package_imports_its_own_modules_alone(module, path):
    """At once; what it hands on from elsewhere is fetched when it is asked for."""
    own = (f"{module}.", "mmrl.moved", "mmrl.runtime.lazy_attributes")
    at_once = [a.target for a in arrows(path.read_text(), module, True) if a.kind == "import"]
    assert [target for target in at_once if target.startswith("mmrl.") and not target.startswith(own)] == []


def test_every_kind_of_arrow_is_there():
    """So that none of them is overlooked: counts of today, in round numbers."""
    every = [a for m, p in MODULES.items() for a in arrows(p.read_text(), m, p.name == "__init__.py")]
    counts = {kind: sum(a.kind == kind and a.target.startswith("mmrl.") for a in every) for kind in
              ("import", "typing", "lazy", "string")}  # fmt: skip
    assert counts["import"] > 1500 and counts["typing"] > 200 and counts["lazy"] > 150 and counts["string"] > 200


def test_every_room_is_looked_at():
    assert {room_of(module) for module in MODULES} - {"tasks", "sims"} <= FLOOR.keys()
    assert FLOOR.keys() - {"__init__", "configs"} <= {room_of(module) for module in MODULES}
    assert {name for name in MODULES if light(name)} >= {name for name in LIGHT if name in MODULES}
    assert all(any(module.startswith(name) for module in MODULES) for name in LIGHT)


def test_a_configuration_is_read_without_torch():
    """Every module that holds settings, in one new process; it names the first that brings something heavy along."""
    names = ["mmrl.config", *sorted(name for name in MODULES if light(name))]
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
        ("mmrl.core.reduce", "from mmrl.rollouts import Rollouts\nfrom mmrl.settings import option"),
        ("mmrl.core.reduce", "import numpy as np"),
        ("mmrl.core.reduce", "from einops import rearrange"),
        ("mmrl.core.reduce", "def f():\n    from mmrl.engine import Engine"),
        ("mmrl.core.reduce", "from mmrl.samplers import windows"),
        ("mmrl.core.reduce", "from ..engine import Engine"),
        ("mmrl.rollouts", "from mmrl.errors import UserError"),
        ("mmrl.rewards.compose", "from mmrl.engine import Engine"),
        ("mmrl.rewards.compose", "import tests.tiny_models"),
        ("mmrl.engine.deepspeed", "class A:\n    def f(self):\n        import mmrl.policies.vlm"),
        ("mmrl.policies.vlm.policy", "from mmrl.config import Config"),
        ("mmrl.policies.vlm.policy", "from mmrl import config"),
        ("mmrl.policies.vlm.policy", "if TYPE_CHECKING:\n    from mmrl.config import Config"),
        ("mmrl.policies.vlm.policy", "if TYPE_CHECKING:\n    pass\nelse:\n    from mmrl.config import Config"),
        ("mmrl.policies.vlm.policy", 'LOADER = "mmrl.build:build_policy"'),
        ("mmrl.workers.handles", 'command = ["-m", "mmrl.cli.main"]'),
        ("mmrl.policies.vlm.policy", "from mmrl.tasks.visual_qa import build"),
        ("mmrl.trainer", "from mmrl import cli"),
        ("mmrl.trainer", "from mmrl.unheard import of"),
        ("mmrl.tasks.visual_qa.data.files", "from mmrl.trainer import Trainer"),
        ("mmrl.tasks.visual_qa.data.files", "from mmrl.config import load"),
        ("mmrl.tasks.visual_qa.data.files", "from mmrl.tasks.image_generation.data import prompts"),
        ("mmrl.tasks.data.handwritten_digits", "def f():\n    from mmrl.trainer import Trainer"),
        ("mmrl.sims.mujoco.scene", "import mmrl.policies"),
        ("mmrl.unheard", "import torch"),
        ("mmrl.tasks.visual_qa.data.files", "import sims.mujoco"),
        ("mmrl.settings.section", "from mmrl.schedules.schedule import Schedule"),
        ("mmrl.terms.losses.kl", "from mmrl.algorithms.algorithm import Algorithm"),
        ("mmrl.algorithms.grpo", "def f():\n    from mmrl.engine import Engine\n    from mmrl.trainer import Trainer"),
        ("mmrl.core.reduce", "if TYPE_CHECKING:\n    from mmrl.protocols.batch import Batch"),
    ],
)
def test_a_planted_fault_is_found(module, source):
    assert len(faults(source, module)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmrl.core.reduce", "import math, torch.nn\nfrom mmrl.kernels import fused\nfrom .ratios import BOUND"),
        ("mmrl.policies.vlm.policy", "from mmrl.rollouts import Rollouts\nfrom mmrl.core import ratios"),
        ("mmrl.policies.vlm.policy", '"""See mmrl.config.Config."""\nimport transformers'),
        ("mmrl.policies.settings", 'kinds = {"a": "mmrl.policies.vlm.settings:VisionLanguageModel"}'),
        ("mmrl.tasks.settings", 'kinds = {"a": "mmrl.tasks.visual_qa.settings:VisualQASettings"}'),
        (
            "mmrl.tasks.visual_qa.data.files",
            "from mmrl.tasks.visual_qa.data.rows import Rows\nfrom mmrl.rewards import Reward\nimport mmrl.sims.mujoco",
        ),
        ("mmrl.trainer", "from mmrl.config import Config\nfrom mmrl import checkpoints"),
        ("mmrl.algorithms.grpo", "def f():\n    from mmrl.core import advantages"),
        ("mmrl.samplers.settings", "from mmrl.settings import option\nfrom pydantic import model_validator"),
    ],
)
def test_what_is_allowed_is_not_a_fault(module, source):
    assert faults(source, module) == []
