"""`mmrl rewards install`: a real environment, made once by pip from a folder with one wheel, in which a reward scores;
what cannot be installed; and whether the list is true."""

import base64
import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

from mmrl.errors import UserError
from mmrl.rewards import REWARDS, RewardSet, RewardSpec
from mmrl.rewards.models import environments
from mmrl.rewards.models.catalogue import CATALOGUE, CatalogueEntry, WeightFile
from mmrl.rewards.models.environments import MARKER, describe_catalogue, install, interpreter, plan
from mmrl.rewards.registry import NEEDS_OWN_PYTHON, _check_options, _option_parameters
from mmrl.rollouts import Prompt, Sample

ROOT = Path(__file__).parents[3]
GLOW = CatalogueEntry(
    "glowing:Glow",
    ("power: 2",),
    (WeightFile("someone/glow", 1.5, "MIT"),),
    requirements=("glow-model==1.0",),
    environment="glow",
)


def make_wheel(folder, name="glow_model", version="1.0", code="FACTOR = 3.0\n"):
    """Writes a wheel of one module, as PEP 427 describes it."""
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in texts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (texts | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            wheel.writestr(path, text)


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, patch):
    """The only place where pip looks, and an entry of the catalogue that needs its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder)
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(folder))
    patch.setitem(CATALOGUE, "glow", GLOW)
    return folder


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """The folder of environments, and the lines that the command printed."""
    folder = tmp_path_factory.mktemp("rewards")
    return folder, install("glow", folder)


def recipe(lines):
    """The rewards of the recipe that the command prints."""
    text = "\n".join(lines[lines.index("lines of a recipe:") + 1 :])
    return [RewardSpec(**entry) for entry in yaml.safe_load(text)["task"]["rewards"]]


def test_what_is_printed_is_the_recipe_and_the_weights(installed):
    folder, lines = installed
    python = folder / "glow/bin/python"
    assert lines == [
        f"installed glow in {folder / 'glow'}",
        "weights, not installed: someone/glow (1.5 GB; license: MIT)",
        "lines of a recipe:",
        "task:",
        "  rewards:",
        "    - name: glowing:Glow",
        f"      python: {python}",
        "      options:",
        "        power: 2",
    ]
    (spec,) = recipe(lines)
    assert (spec.name, spec.python, spec.options) == ("glowing:Glow", str(python), {"power": 2})
    assert (folder / "glow" / MARKER).read_text() == "glow-model==1.0\n"


def test_a_reward_scores_in_the_environment(installed, tmp_path, monkeypatch):
    """It imports the wheel's module, which is not installed here. The environment of a test borrows torch."""
    folder, lines = installed
    packages = next((folder / "glow/lib").glob("python*/site-packages"))
    assert (packages / "mmrl").resolve() == ROOT / "mmrl"
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "glowing.py").write_text(
        "import sys\nimport glow_model\n\n\nclass Glow:\n    scope = 'sample'\n\n"
        "    def __init__(self, power=1):\n        self.power = power\n\n"
        "    def score(self, samples):\n        assert sys.prefix.endswith('glow')\n"
        "        return [glow_model.FACTOR * one.image.mean() ** self.power for one in samples]\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no function 'glowing:Glow'"):
        monkeypatch.syspath_prepend(str(tmp_path))
        RewardSet([RewardSpec(name="glowing:Glow")])
    samples = [Sample(Prompt("p", "?"), image=torch.full((3, 2, 2), level)) for level in (0.5, 0.2, 1.0)]
    values = RewardSet(recipe(lines)).score(samples)[:, 0]
    torch.testing.assert_close(values, torch.tensor([0.75, 0.12, 3.0]))
    (packages / "borrowed.pth").unlink()


def test_a_second_call_finds_it_and_runs_no_pip(installed, monkeypatch):
    folder, lines = installed
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    monkeypatch.setattr(environments, "_create", None)
    assert (
        install("glow", folder) == plan("glow", folder) == [f"glow is already installed: {folder / 'glow'}", *lines[1:]]
    )


def test_an_interrupted_one_does_not_count_and_is_made_anew(installed, monkeypatch):
    """Without the marker, or with another list, it is not there; what was in it goes."""
    folder, lines = installed
    environment = folder / "glow"
    (environment / "leftover").touch()
    monkeypatch.setitem(CATALOGUE, "glow", replace_requirements("glow-model==1.0", "glow-model>=1"))
    assert len(plan("glow", folder)) == len(lines) + 1
    monkeypatch.setitem(CATALOGUE, "glow", GLOW)
    (environment / MARKER).unlink()

    def interrupt(environment, requirements):
        assert not (environment / "leftover").exists() and not (environment / MARKER).exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environments, "_install_packages", interrupt)
        with pytest.raises(KeyboardInterrupt):
            install("glow", folder)
    assert interpreter(environment).exists() and "-m pip install" in plan("glow", folder)[1]
    assert install("glow", folder) == lines


def replace_requirements(*requirements):
    return CatalogueEntry(GLOW.reward, GLOW.options, GLOW.weights, requirements=requirements, environment="glow")


def test_a_package_that_is_not_there_is_one_line(wheels, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(CATALOGUE, "glow", replace_requirements("glow-model==1.0", "shade-model==2.5"))
    with pytest.raises(UserError) as raised:
        install("glow", tmp_path)
    text = str(raised.value)
    assert text.startswith("pip could not install glow-model==1.0 shade-model==2.5: ERROR: No matching distribution")
    assert "\n" not in text and text.endswith("shade-model==2.5; run the same command again")
    assert capfd.readouterr().out == "" and not (tmp_path / "glow" / MARKER).exists()
    assert plan("glow", tmp_path)[0].endswith(f"-m venv {tmp_path / 'glow'}")


def test_nothing_is_overwritten_that_is_no_environment(wheels, tmp_path):
    (tmp_path / "glow").mkdir()
    (tmp_path / "glow/thesis.tex").write_text("mine")
    with pytest.raises(
        UserError, match=r"glow exists but is not a Python environment; choose another --folder, or remove it"
    ):
        install("glow", tmp_path)
    assert (tmp_path / "glow/thesis.tex").read_text() == "mine"


def test_a_folder_that_cannot_be_written(wheels, tmp_path):
    (tmp_path / "file").touch()
    for folder, words in ((tmp_path / "file", "File exists"), (tmp_path / "file/below", "Not a directory")):
        with pytest.raises(UserError, match=f"{folder} cannot be written: {words}; choose another --folder"):
            install("glow", folder)


def test_two_at_once(wheels, tmp_path):
    with (tmp_path / ".glow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is installing .*glow; wait until it has ended"):
            install("glow", tmp_path)
    assert not (tmp_path / "glow").exists()


def test_the_command(wheels, tmp_path):
    """As a user types it: the default folder, a dry run that makes nothing, names that are wrong."""

    def run(*arguments):
        environment = os.environ | {"MMRL_REWARDS": str(tmp_path / "mine"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "mmrl", "rewards", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    done = run("install", "deqa", "--dry-run")
    environment = tmp_path / "mine/deqa"
    assert done.returncode == 0 and done.stdout.splitlines()[:2] == [
        f"{sys.executable} -m venv {environment}",
        f"{environment}/bin/python -I -m pip install --disable-pip-version-check --no-input "
        + " ".join(CATALOGUE["deqa"].requirements),
    ]
    assert not (tmp_path / "mine").exists()
    assert run().stdout.splitlines() == [
        line for line in describe_catalogue() if not line.startswith(("glow", "   " * 10 + " someone"))
    ]
    done = run("install", "omniverifier")
    assert done.returncode == 2 and done.stderr == (
        "mmrl: there is no reward omniverifier to install (did you mean omni_verifier?); `mmrl rewards` lists all\n"
    )
    assert (
        run("install", "ocr").stdout.splitlines()[0] == "ocr runs in the trainer's environment: pip install -e '.[ocr]'"
    )


def test_rewards_of_one_server_share_an_environment(tmp_path):
    lines = plan("unified_reward", tmp_path)
    python = tmp_path / "vllm/bin/python"
    assert lines[0].endswith(f"-m venv {tmp_path / 'vllm'}") and plan("geneval2", tmp_path)[:2] == lines[:2]
    assert lines[3] == (
        f"start this server before training: {python} -m vllm.entrypoints.cli.main serve "
        "CodeGoat24/UnifiedReward-qwen-7b --host 127.0.0.1 --port 8100"
    )
    assert recipe(lines)[0].python is None


def test_a_python_that_is_too_new(monkeypatch, tmp_path):
    monkeypatch.setattr(environments.sys, "version_info", (3, 13, 1))
    for call in (plan, install):
        with pytest.raises(UserError, match="packages of deqa need a Python below 3.13, not 3.13; run this"):
            call("deqa", tmp_path)


# --- the list ---


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_entry_names_a_reward_its_options_and_pinned_packages(name, tmp_path):
    entry = CATALOGUE[name]
    (spec,) = recipe(plan(name, tmp_path))
    assert spec.name == entry.reward and entry.reward in REWARDS
    _check_options(entry.reward, _option_parameters(REWARDS[entry.reward]), spec.options)
    assert (entry.reward in NEEDS_OWN_PYTHON) == (spec.python is not None)
    for requirement in map(Requirement, entry.requirements):
        (pin,) = requirement.specifier
        assert pin.operator == "==" and "*" not in pin.version and requirement.url is None
    assert bool(entry.requirements) == bool(entry.environment)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(entry.extras) <= set(extras)


def test_questions_of_judges_are_those_that_the_recipe_reads(tmp_path):
    for name, text, value in (
        ("unified_reward", "Good. Final Score: 3", 0.5),
        ("omni_verifier", '{"answer": false}', 0.0),
    ):
        (spec,) = recipe(plan(name, tmp_path))
        assert REWARDS[spec.name](**spec.options).read(text) == value
        assert "{prompt}" in spec.options["question"]
