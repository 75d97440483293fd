"""A wheel holds all that mmrl needs, and what is installed from it works in an environment of its own."""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from mmrl.config import load
from mmrl.version import VERSION
from tests.helpers.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MMRL_ROW_CACHE")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(copied(tmp_path_factory.mktemp("wheel")))


def copied(folder):
    """What git knows, so that nothing that only lies here gets in."""
    source = folder / "source"
    source.mkdir()
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


def built(source, *options):
    folder = source.parent
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), *options]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, cwd=folder, env=CLEAN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(folder.glob("*.whl"))


def installed(wheel, home):
    """The python of an environment with the wheel in it, beside all other packages of this one."""
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, env=CLEAN, capture_output=True)
    inside = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    packages = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib")])
    others = [path for path in sys.path if "site-packages" in path]
    (inside / "others.pth").write_text("\n".join(dict.fromkeys([*packages, *others])) + "\n")
    return python


def interpreter(version):
    """A Python of this version on this machine, one of pyenv included; skips the test where there is none."""
    installed = [Path(f"python{version}"), *Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in map(str, installed):
        if shutil.which(python) is not None:
            done = subprocess.run([python, "-c", code], capture_output=True, text=True)
            if done.stdout.strip() == version:  # a shim of pyenv may find no version behind it
                return python
    pytest.skip(f"no Python {version} here")


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_it_works_under_other_versions_of_python(wheel, tmp_path, version):
    """With all packages that it needs, as uv installs them; the other tests run on Python 3.11."""
    uv = shutil.which("uv") or str(ROOT / ".venv/uv/bin/uv")
    home = tmp_path / "environment"
    subprocess.run([uv, "venv", "--quiet", "--python", interpreter(version), home], check=True, env=CLEAN)
    install = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        home / "bin/python",
        "--constraint",
        ROOT / "constraints.txt",
    ]
    done = subprocess.run([*install, wheel], capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 0, done.stderr[-2000:]

    def run(*words, good=(0,)):
        command = [home / "bin/mmrl", *words]
        quiet = CLEAN | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=quiet, capture_output=True, text=True)
        assert done.returncode in good, (words, done.stdout[-2000:] + done.stderr[-2000:])
        return done.stdout

    assert f"python                 {version}." in run("doctor", good=(0, 1))
    run("new", "reward", "MyReward")
    run("train", "my_reward.yaml", "steps=1", "evaluation.prompts=4")
    run("train", "image_digits_perceptron", "steps=1", "evaluation.prompts=4", *untrained("image_digits_perceptron"))
    run("report", "runs/my_reward")
    assert (tmp_path / "runs/my_reward/final").is_dir() and (
        tmp_path / "runs/my_reward/report.html"
    ).stat().st_size > 2e4
    assert "0.28" in run("config", "algorithm.surrogate.high") and "DAPO" in run("methods", "clip")


def untrained(recipe):
    """Overrides with which a recipe begins with what its warm start begins with."""
    return ["model.warm_start=null", f"model.build={load(load(recipe).model.warm_start).model.build}"]


def test_its_name_and_what_it_holds(wheel):
    assert wheel.name == f"mmrl_train-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    needed = {"mmrl/py.typed", "mmrl/report/html/templates/report.html.jinja", "mmrl/cli/skeletons/task.py.jinja"}
    needed |= {"mmrl/tasks/visual_qa/task.py", "mmrl/sims/registry.py", "mmrl/tasks/data/named_images/names.csv"}
    needed |= {"mmrl/report/html/templates/chart.js", "mmrl/tasks/data/handwritten_digits.csv.gz"}
    assert needed <= names
    recipes = {f"mmrl/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert len(recipes) > 90 and recipes <= names
    modules = [path for folder in ("mmrl", "tasks", "sims") for path in (ROOT / folder).rglob("*.py")]
    wanted = {("" if path.is_relative_to(ROOT / "mmrl") else "mmrl/") + str(path.relative_to(ROOT)) for path in modules}
    assert wanted - names == set()
    assert {name.split("/")[0] for name in names} == {"mmrl", f"mmrl_train-{VERSION}.dist-info"}


def test_it_works_in_an_environment_of_its_own(wheel, tmp_path):
    """Only mmrl is installed anew: the packages that it needs are those of this environment."""
    home = tmp_path / "environment"
    python = installed(wheel, home)

    def run(*words, good=(0,)):
        done = subprocess.run(
            [home / "bin" / "mmrl", *words],
            cwd=tmp_path,
            env=CLEAN | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode in good, (words, done.stdout[-2000:] + done.stderr[-2000:])
        assert "Traceback" not in done.stderr
        return done.stdout

    where = [
        python,
        "-c",
        "import mmrl.tasks, mmrl.sims, mmrl; print(mmrl.__file__, mmrl.tasks.__path__, mmrl.sims.__path__)",
    ]
    found = subprocess.run(where, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=True).stdout
    inside = sysconfig.get_path("purelib", vars={"base": str(home)})
    assert found.count(inside) == 3
    commands = set(re.findall(r"^    (\w+) ", run("--help"), re.MULTILINE))
    for command in commands:
        assert command in run(command, "--help")
    few = ["evaluation.prompts=4", "evaluation.before=false"]
    run("new", "reward", "MyReward")
    run("train", "my_reward.yaml", "steps=1", *few)
    for command, recipe in (
        ("train", "image_digits_perceptron"),
        ("train", "manipulation_tabletop"),
        ("control", "visual_qa_digits"),
    ):
        run(command, recipe, "steps=1", *few, *untrained(recipe))
    assert (tmp_path / "runs/digits/image_digits_perceptron/final").is_dir()
    assert (tmp_path / "runs/vla/manipulation_tabletop/final").is_dir()
    assert (tmp_path / "runs/vlm/visual_qa_digits_control/final").is_dir()
    assert "environment" in run("train", "visual_qa_zoom", "--print-config")
    assert "diffusion" in run("recipes") and "extends" in run("recipes", "image_digits_nft")
    assert "0.28" in run("config", "algorithm.surrogate.high") and "DAPO" in run("methods") + run("methods", "clip")
    run("doctor", good=(0, 1))  # 1: something that this machine lacks
    assert "mmrl rewards install NAME" in run("rewards")
    run("eval", "runs/my_reward", "evaluation.prompts=4")
    run("sample", "runs/my_reward", "--count", "2")
    run("watch", "runs/my_reward", "--once")
    (tmp_path / "former.yaml").write_text("extends: visual_qa_digits.yaml\n")
    assert run("convert", "former.yaml") == "extends: visual_qa_digits\n"
    run("report", "runs/my_reward")
    report = (tmp_path / "runs/my_reward/report.html").read_text()
    assert "<script" in report and "my_reward" in report and len(report) > 20_000  # its styles and script are there
    assert "prompts to train on" in run("check", "my_reward.yaml", good=(0, 1))
    assert "files written to" in run("push", "runs/my_reward", "me/digits", "--folder", str(tmp_path / "pushed"))
    assert '"commit"' not in (tmp_path / "runs/my_reward/versions.json").read_text()
    tried = {
        "new",
        "train",
        "control",
        "recipes",
        "config",
        "methods",
        "doctor",
        "eval",
        "sample",
        "watch",
        "convert",
        "report",
        "check",
        "push",
        "rewards",
    }
    # For pipelines of diffusers, which need weights; and a server, which tests/serving starts.
    assert commands - tried == {"embed", "serve"}


def test_kernels_that_come_with_it_are_used_where_there_is_no_compiler(tmp_path):
    """The C++ ones: those for GPUs take minutes to compile, and none is here to load them."""
    source = copied(tmp_path)
    code = """if True:
        from mmrl.kernels import compiled, toolchain, prebuilt
        toolchain.compiler = lambda kind: None if kind == "cuda" else "g++"
        paths, missing = prebuilt.build()
        assert len(paths) == 3 and missing, (paths, missing)
    """
    subprocess.run([sys.executable, "-c", code], cwd=source, env=CLEAN | {"PYTHONPATH": str(source)}, check=True)
    wheel = built(source, "-C--build-option=--plat-name=linux_x86_64")
    assert wheel.name == f"mmrl_train-{VERSION}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if "/prebuilt/" in name]
    assert len(names) == 4 and not [name for name in names if name.endswith(".lock")]
    python = installed(wheel, tmp_path / "environment")
    bare = CLEAN | {"CXX": "no-such-compiler", "MMRL_KERNEL_CACHE": str(tmp_path / "cache")}
    status = [python, "-m", "mmrl.kernels", "status"]
    done = subprocess.run(status, cwd=tmp_path, env=bare, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()[0]
    assert said.startswith("cpu: built, loaded, numerically right") and "/environment/lib" in said, done.stdout
    assert not (tmp_path / "cache").exists() and "not used" not in done.stderr
