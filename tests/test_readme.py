"""Every key that a page or a source names is one that some job has, and the commands of a page exist."""

import re
from pathlib import Path

import pytest

from mmrl.cli import parser
from mmrl.config import Config, load
from mmrl.reference import _collected

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "mmrl" / "README.md"]
SECTIONS = (*Config.model_fields, "denoising", "action")
KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_0-9]+)*(?==|`)(?<!\.py)")
SOURCES = ("mmrl", "tasks", "sims", "scripts", "configs")
TRAINED = re.compile(r"mmrl train (configs/\w+\.yaml)((?: +\w+\.[\w.]+=\S+)*)")
COMMANDS = [found for page in PAGES for found in TRAINED.findall(page.read_text().replace("\\\n", ""))]


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


@pytest.mark.parametrize(("recipe", "overrides"), COMMANDS)
def test_what_a_page_trains_is_valid(recipe, overrides):
    assert load(ROOT / recipe, overrides.replace("=...", "=FOLDER").split()).run_dir


def test_commands_on_the_page_exist():
    named = set(re.findall(r"^    mmrl ([a-z]+)", PAGES[0].read_text(), flags=re.M))
    actions = [action for action in parser()._actions if action.choices]
    assert len(named) > 4 and named <= set(actions[0].choices)
