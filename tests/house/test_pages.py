"""Pages tell the truth: their keys, commands, files, links and metrics exist, and their own files run."""

import importlib.util
import json
import re
import shlex
import sys
import tomllib
from functools import cache

import pytest

from mmrl.cli import new
from mmrl.cli.keys import all_keys, describe_keys
from mmrl.cli.main import parser
from mmrl.cli.methods import describe_methods
from mmrl.config import configure, laid_over, load
from mmrl.errors import UserError
from mmrl.settings.tree import read_override, read_yaml
from tests.helpers.pages import (
    PAGES,
    ROOT,
    SECTIONS,
    files,
    filled,
    fragments,
    named,
    overrides,
    printed,
    programs,
    prose,
    run,
    write,
)

KEY = re.compile(rf"(?<![\w.-])(?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_0-9]+)*(?==|`)(?<!\.py)")
SOURCES = ("mmrl", "tasks", "sims", "scripts/bench", "scripts/readme", "configs")  # attacks name wrong keys
COMMANDS = next(action.choices for action in parser()._actions if action.choices)
THEIRS = "configs/coming_from.md"  # its left column holds the keys of other systems
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
VLLM = [["rollout.generator=vllm_server"], ["rollout.generator=vllm_colocated"]]
BASES = [(recipe, []) for recipe in RECIPES] + [(ROOT / "configs/vlm/visual_qa_geometry3k.yaml", more) for more in VLLM]
every_page = pytest.mark.parametrize("page", PAGES, ids=[named(page) for page in PAGES])


@pytest.fixture(scope="module")
def known():
    return all_keys()


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder of a stranger's, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(vars(module).get("__file__")).startswith(str(tmp_path)):
            del sys.modules[name]


@cache
def trees():
    """The recipes, read once: hundreds of overrides are laid over them."""
    return [
        laid_over({"run_dir": "x"}, *(tree for _, tree in read_yaml(recipe)), *map(read_override, more))
        for recipe, more in BASES
    ]


def composes(given):
    """Whether one of the recipes takes these overrides."""
    for place, tree in enumerate(trees()):
        try:
            configure(tree, given)
        except UserError:
            continue
        trees().insert(0, trees().pop(place))  # a page stays with one kind of job for a while
        return True
    return False


# --- keys ---


@every_page
def test_keys_on_a_page_exist(page, known):
    text = page.read_text()
    if named(page) == THEIRS:
        text = "\n".join(line.rsplit("|", 2)[-2] for line in text.splitlines() if line.startswith("|"))
    if named(page) == "CHANGELOG.md":
        text = "\n".join(line for line in text.splitlines() if not line.strip().startswith("|"))  # keys of before
    assert {key for key in KEY.findall(text) if key not in known} == set()


def test_keys_in_sources_exist(known):
    paths = [
        path
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yaml") and named(path) != THEIRS
    ]
    assert len(paths) > 200
    assert {key: path for path in paths for key in KEY.findall(path.read_text()) if key not in known} == {}


def test_the_pattern_finds_keys():
    text = "set `rollout.temperature=0.5`, or `algorithm.surrogate.low`; not engine.py"
    assert KEY.findall(text) == ["rollout.temperature", "algorithm.surrogate.low"]


@every_page
def test_what_a_page_sets_is_valid_in_some_recipe(page):
    found = [*overrides(page), *fragments(page)] if page.name != "CHANGELOG.md" else []
    assert [given for given in found if not composes(given)] == []


def test_an_override_that_no_recipe_takes_is_noticed():
    assert composes(["algorithm.surrogate={type: cispo, high: 0.5}"])
    assert not composes(["algorithm.surrogate={type: cispo, cap: 0.5}"])


def test_yaml_without_a_file_name_is_read_as_overrides(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```yaml\n# own.yaml\nsteps: 1\n```\n\n```yaml\ntask:\n  accuracy: {name: math}\n```\n")
    assert fragments(page) == [['task.accuracy={"name": "math"}']]


# --- commands ---


@every_page
def test_commands_of_a_page_are_valid(page, there):
    write(page, there)
    for command in printed(page):
        arguments = programs(command)
        if len(arguments) < 2:  # a command that is only mentioned
            assert all(word in COMMANDS for word in arguments), command
            continue
        assert parser().parse_args(arguments), command
        if arguments[0] == "new" and not arguments[2].isupper():
            new.write(arguments[1], arguments[2], there)
        behind_an_option = {arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word in ("--gpu", "--ranks")}
        words = [word for word in arguments[1:] if word not in behind_an_option and not word.startswith("--")]
        job, words = arguments[0], [word for word in words if not word.isdigit()]
        if job in ("train", "eval", "sample"):
            behind = words if job == "train" else words[1:]  # a run has its configuration
            config = behind[0] if behind and "=" not in behind[0] else "CONFIG"
            given = [filled(word) for word in behind if word != config]
            assert composes(given) if config == "CONFIG" else load(config, given).run_dir, command
        elif job == "config" and words and not words[0].isupper():
            assert describe_keys(words[0])
        elif job == "methods" and words and not words[0].isupper():
            assert describe_methods(words[0])


@every_page
def test_programs_and_files_that_a_page_names_exist(page):
    own = files(page)
    for command in printed(page):
        for word in shlex.split(command):
            if re.fullmatch(r"[\w/]+\.(py|sh)", word):
                made = re.search(r"mmrl new \w+ \w+", prose(page)) and word.startswith(("my_", "test_my_"))
                assert word in own or made or (ROOT / word).exists(), command
        for module in re.findall(r"python -m (mmrl[\w.]*)", command):
            assert importlib.util.find_spec(module), command
    for path in re.findall(rf"`((?:{'|'.join(SOURCES)}|tests)/[\w/]+(?:\.\w+)?/?)`", prose(page)):
        assert (ROOT / path).exists(), path


def test_benchmarks_have_the_options_that_pages_name():
    named_ = [
        re.findall(r"(scripts/bench/\w+\.py)((?: --[a-z-]+(?: [\w,.]+)?)*)", page.read_text().replace("\n", " "))
        for page in PAGES
    ]
    found = [(path, rest) for page in named_ for path, rest in page]
    assert len(found) > 20
    for path, rest in found:
        text = (ROOT / path).read_text()
        assert all(f'"{word}"' in text for word in re.findall(r"--[a-z-]+", rest)), (path, rest)


def test_extras_that_are_to_be_installed_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = [found for page in PAGES for found in re.findall(r"'\.\[([a-z,]+)\]'", page.read_text())]
    assert listed and {name for found in listed for name in found.split(",")} <= set(extras)


@every_page
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, place = target.partition("#")
        if target.startswith("http"):
            continue
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if place:
            titles = re.findall(r"^#+ (.*)$", other.read_text(), flags=re.M)
            assert place in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_nobody_is_told_to_install_the_other_mmrl():
    """The name belongs to another project on the public index."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == "mmrl-train"
    for path in [*PAGES, *(p for folder in SOURCES for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".sh"))]:
        for line in path.read_text().splitlines():
            assert not re.search(r"(?:pip|uv) install (?!-e)[^`.]*\bmmrl\b|\bmmrl\[", line), (path, line)


@every_page
def test_no_page_is_longer_than_a_reader_wants(page):
    most = 150 if named(page) == "README.md" else 200
    lines = page.read_text().splitlines()
    assert len(lines) <= most
    assert not [line for line in lines if line.startswith(("<<<<<<<", ">>>>>>>"))]  # of a merge


def test_metrics_on_the_page_about_health_are_logged():
    logged = "\n".join(p.read_text() for folder in ("mmrl", "tasks", "sims") for p in (ROOT / folder).rglob("*.py"))
    text = prose(ROOT / "mmrl/report/README.md")
    names = re.findall(
        r"`((?:surrogate|advantages|correction|generation|guard|response|evaluation|simulator|episode|critic)/[a-z_]+)`",
        text,
    )
    assert len(set(names)) > 20
    for name in names:
        last = name.rpartition("/")[2].removesuffix("_max")
        assert f'"{name.removesuffix("_max")}"' in logged or re.search(rf'"{last}"|\b{last}(?:_episodes)?=0', logged), (
            name
        )


# --- as a stranger would ---


@pytest.mark.quick("README.md")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [p for p in PAGES if files(p)], ids=[named(p) for p in PAGES if files(p)])
def test_the_files_of_a_page_run(page, tmp_path):
    """What a page gives in full is saved, and its commands for these files are run in their order, in few steps."""
    write(page, tmp_path)
    trained, ran = [], []
    for command in printed(page):
        words = shlex.split(command)
        mine = any((tmp_path / word).exists() and word.startswith("runs/") == ("/" in word) for word in words)
        if words[0] == "python" and words[1] != "-m" and mine:
            arguments = words[1:]
            ran.append(words[1])
        elif words[:2] == ["mmrl", "new"] and not words[3].isupper():
            arguments = ["-m", *words]
        elif words[:2] == ["mmrl", "train"] and mine:
            arguments = ["-m", *words, "steps=1", "evaluation.prompts=4"]
            trained.append(words[2])
        elif words[:2] in (["mmrl", "eval"], ["mmrl", "sample"]) and mine:
            arguments = ["-m", *words] + ([] if "--count" in words else ["evaluation.prompts=4"])
        else:
            continue
        done = run(arguments, tmp_path)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    for name in trained:
        folder = tmp_path / re.search(r"run_dir: (\S+)", (tmp_path / name).read_text()).group(1)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [1]
        assert (folder / "final").is_dir()
    assert trained or ran or page.name in ("rewards.md", "CONTRIBUTING.md"), "no command of this page runs its files"
