"""Every key that a page or a source names is one that some job has, and every command that a page prints is valid.
Those that need nothing but this machine run in `test_readme_commands.py`; the others are listed here by what they
need."""

import re
import shlex
import subprocess

import pytest
import yaml

from mmrl.cli import parser
from mmrl.config import Config, load
from mmrl.reference import _collected
from tests.readme import PAGES, ROOT, printed
from tests.test_readme_commands import RUN

SECTIONS = (*Config.model_fields, "denoising", "action")
KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_0-9]+)*(?==|`)(?<!\.py)")
SOURCES = ("mmrl", "tasks", "sims", "scripts/bench", "scripts/readme", "configs")  # attacks name wrong ones


@pytest.fixture(scope="module")
def known():
    return _collected()


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_keys_on_a_page_exist(page, known):
    found = set(KEY.findall(page.read_text()))
    assert {key for key in found if key not in known} == set()


def test_keys_in_sources_exist(known):
    paths = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")
    ]
    assert len(paths) > 200
    assert {key: path for path in paths for key in KEY.findall(path.read_text()) if key not in known} == {}


def test_the_pattern_finds_keys():
    text = "set `rollout.temperature=0.5`, or `algorithm.surrogate.low`; not engine.py"
    assert KEY.findall(text) == ["rollout.temperature", "algorithm.surrogate.low"]


DIGITS, GEOMETRY = "configs/visual_qa_digits.yaml", "configs/visual_qa_geometry3k.yaml"
ARM, SERVER = "configs/manipulation_tabletop.yaml", "rollout.generator=vllm_server"
# Commands of which only the configuration is looked at: what CONFIG is, and what the dots stand for.
CONFIGURED = {
    "a hub and GPUs": {
        f"mmrl train {GEOMETRY} model.path=Qwen/Qwen2.5-VL-3B-Instruct": [],
        f"torchrun --nproc_per_node 8 -m mmrl train {GEOMETRY} model.path=Qwen/Qwen2.5-VL-3B-Instruct": [],
        "mmrl train configs/image_sd35_ocr.yaml model.path=stabilityai/stable-diffusion-3.5-medium "
        "task.data.train=train.txt task.data.eval=test.txt": [],
    },
    "vLLM": {  # tests/engine/test_vllm.py and test_vllm_servers.py run them
        "mmrl train CONFIG rollout.generator=vllm_colocated": [DIGITS],
        "mmrl train CONFIG rollout.generator=vllm_server": [DIGITS],
        "mmrl train CONFIG ... rollout.generator.async_steps=1": [DIGITS, SERVER],
        "mmrl train CONFIG ... rollout.generator.partial.oversample=8": [GEOMETRY, SERVER, "rollout.micro_batch=null"],
        "mmrl train CONFIG ... rollout.generator.lora=adapter": [
            DIGITS,
            SERVER,
            "model.lora={}",
            "model.freeze=[vision,connector]",
        ],
    },
    "Ray": {  # tests/test_ray.py
        "mmrl train CONFIG rollout.generator='{type: vllm_server, servers: 4, ray: auto}'": [DIGITS],
        "mmrl train CONFIG task.workers=64 task.ray=auto": [ARM],
    },
}
FORMS = [  # what may follow a command
    "mmrl train CONFIG [key.subkey=value ...]",
    "mmrl eval RUN_OR_MODEL CONFIG",
    "mmrl sample RUN_OR_MODEL CONFIG",
    "mmrl config [KEY]",
    "mmrl methods [NAME]",
    "mmrl new algorithm NAME",
    "mmrl new term | shaper | mask | sampler NAME",
]
SCRIPTS = [  # they take long, or change the machine
    "bash scripts/test.sh",
    "bash scripts/test.sh -m slow tests/engine/test_hosts.py",
    "MMRL_EXTRAS=dev,mujoco,libero bash scripts/test.sh -m slow tests/sims/test_libero.py",
    ".venv/bin/python scripts/bench/flow.py --rounds 5",
]
NOT_OURS = [  # other programs'; tests/test_ray.py starts Ray, tests/engine/test_launchers.py torchrun
    "ray start --head --port 6379 --num-gpus 0",
    "ray start --address HEAD:6379",
    "torchrun --nnodes N",
    "pip install -e '.[ray]'",
    "pip install -e '.[maniskill]'",
]


def test_every_command_on_the_pages_is_tried_somewhere():
    """A new one has to be entered: where it runs, or what it needs."""
    tried = {*RUN, *FORMS, *SCRIPTS, *NOT_OURS, *(one for held in CONFIGURED.values() for one in held)}
    assert {command for page in PAGES for command in printed(page)} == tried


@pytest.mark.parametrize(
    ("command", "given"),
    [case for held in CONFIGURED.values() for case in held.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configurations_that_need_more_than_this_machine_are_right(command, given):
    words = [word for word in shlex.split(command.split("mmrl train ")[1]) if word != "..."]
    config, overrides = (given[0], given[1:]) if words[0] == "CONFIG" else (words[0], given)
    made = load(ROOT / config, [*overrides, *words[1:]])
    for word in words[1:]:
        assert _held(made, *word.split("=", 1)), word


def _held(made, key, written):
    value = made
    for part in key.split("."):
        value = vars(value)[part]
    wanted = yaml.safe_load(written)
    if isinstance(wanted, dict):
        return all(vars(value)[name] == one for name, one in wanted.items())
    return wanted in (value, str(value), vars(value).get("type") if hasattr(value, "__dict__") else None)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_commands_are_those_that_are_parsed(form):
    optional = (
        re.sub(r"\[(KEY|NAME)\]", r"\1", form.replace("key.subkey=value ...", "steps=3"))
        .replace("[", "")
        .replace("]", "")
    )
    kinds = re.findall(r"\w+(?= \|)|(?<=\| )\w+", optional)
    forms = [re.sub(r"(?:\w+ \| )+\w+", kind, optional) for kind in kinds] or [optional]
    for one in forms:
        assert parser().parse_args(one.split()[1:]).run is not None


@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_on_the_pages_are_there_with_their_options(command):
    words = [word for word in command.split() if "=" not in word]
    path = ROOT / words[1]
    text = path.read_text()
    if words[0] == "bash":
        subprocess.run(["bash", "-n", path], check=True)
        assert all((ROOT / word).exists() for word in words[2:] if "/" in word)
    else:
        assert all(f'"{word}"' in text for word in words[2:] if word.startswith("--"))


def test_benchmarks_on_the_pages_have_the_options_that_are_named():
    named = re.findall(r"`(scripts/bench/\w+\.py)([^`]*)`", PAGES[0].read_text().replace("\n", " "))
    assert len(named) > 8
    for path, rest in named:
        text = (ROOT / path).read_text()
        assert all(f'"{word}"' in text for word in rest.split() if word.startswith("--")), path


def test_extras_that_are_to_be_installed_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"'\.\[([a-z]+)\]'", page.read_text())}
    assert named and named <= set(extras)
