"""What pages print: commands, files, overrides; and how a stranger would try them, in recipes that are made small."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from mmrl.config import Config

ROOT = Path(__file__).parents[2]
FOLDERS = ("mmrl", "tasks", "sims", "configs", "scripts", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
PROGRAMS = ("mmrl", "bash", "python", "torchrun", "ray", "pip", ".venv/bin/python")
SECTIONS = (*Config.model_fields, "denoising", "action")
OVERRIDE = rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)*="
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.M | re.S)
SMALL = {  # of keys that a recipe has
    "prompts": 4,
    "group_size": 2,
    "episodes": 2,
    "train_size": 60,
    "eval_size": 20,
    "every": 0,
    "micro_batch": 4,
    "samples_every": 0,
}
BLANKS = {"FOLDER": "folder", "PROJECT": "project", "NAME": "name", "BOUND": "0.5", "N": "2", "RUN": "runs/run"}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def files(page: Path) -> dict[str, str]:
    """The files that a page gives in full: fenced blocks whose first line is a comment with their name."""
    found = {}
    for _, text in FENCED.findall(page.read_text()):
        if name := re.match(r"# (\w+\.(?:py|yaml))\b", text):
            found[name.group(1)] = text
    return found


def fragments(page: Path) -> list[list[str]]:
    """The parts of configurations that a page gives as YAML without a file name, each as overrides."""
    blocks = [text for language, text in FENCED.findall(page.read_text()) if language == "yaml"]
    trees = [yaml.safe_load(filled(text)) for text in blocks if not re.match(r"# \w+\.yaml\b", text)]
    return [
        [f"{section}.{key}={json.dumps(value)}" for section, keys in tree.items() for key, value in keys.items()]
        for tree in trees
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks; a command that goes on in the next line is one line."""
    return re.sub(r" *\\\n {8}", " ", FENCED.sub("", page.read_text()))


def printed(page: Path) -> list[str]:
    """The commands of a page: its indented lines, without what explains them, and those between backquotes."""
    text = prose(page)
    lines = re.findall(r"^ {4}(\S.*)$", text, flags=re.M)
    lines = [re.split(r"\s{2,}[#(]|\s{3,}|  +# ", line)[0].strip() for line in lines]
    quoted = re.findall(rf"`((?:\w+=\S+ )?(?:{'|'.join(map(re.escape, PROGRAMS))}) [^`\n]+)`", text)
    return [line for line in [*lines, *quoted] if re.match(rf"(?:\w+=\S+ )*({'|'.join(PROGRAMS)}) ", line)]


def filled(text: str) -> str:
    """With something in place of what a reader has to fill in."""
    return re.sub(rf"\b({'|'.join(BLANKS)})\b", lambda blank: BLANKS[blank.group()], text.replace("=...", "=folder"))


def programs(command: str) -> list[str]:
    """The arguments of mmrl in a command, as in `mmrl train ...` and `torchrun ... -m mmrl train ...`; else none."""
    words = shlex.split(command)
    if words[0] == "mmrl":
        return words[1:]
    return words[words.index("mmrl") + 1 :] if "-m" in words and "mmrl" in words else []


def overrides(page: Path) -> list[list[str]]:
    """What stands between backquotes and sets keys: `a.b=1`, or `a.b=1 c.d={e: 2}`. Of a table of two systems' keys
    only the last column is ours."""
    text = prose(page)
    if page.name == "coming_from.md":
        text = "\n".join(line.rsplit("|", 2)[-2] for line in text.splitlines() if line.startswith("|"))
    spans = re.findall(r"`([^`\n]+)`", text)
    return [re.split(rf" (?={OVERRIDE})", filled(span)) for span in spans if re.match(OVERRIDE + r"\S", span)]


def write(page: Path, folder: Path) -> None:
    """The files of a page, in `folder`, with the recipes and the scripts that its commands name."""
    for name, text in files(page).items():
        (folder / name).write_text(text)
    for name in ("configs", "scripts"):
        if not (folder / name).exists():
            shutil.copytree(ROOT / name, folder / name)


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    """A command of a page, by this interpreter, in `folder`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


# Recipes that are called by their names are the small ones, too.
LAUNCHER = """import runpy, sys
import mmrl.configs
mmrl.configs.__path__ = [{configs!r}]
sys.argv[0] = "mmrl"
runpy.run_module("mmrl", run_name="__main__", alter_sys=True)
"""


def workshop(folder: Path) -> dict[str, str]:
    """Recipes that train two steps of a few rollouts, and what the pages take to be there; the environment in which
    their commands run from `folder`."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    for path in (folder / "configs").rglob("*.yaml"):
        path.write_text(yaml.safe_dump(smaller(yaml.safe_load(path.read_text())) | {"steps": 2, "threads": 1}))
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", folder / "scripts")
    (folder / "scripts" / "setup.sh").write_text("exit 0  # the environment is this one\n")
    launcher = folder / "launcher.py"
    launcher.write_text(LAUNCHER.format(configs=str(folder / "configs")))
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, words in (("mmrl", f'"{launcher}"'), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tools / name).chmod(0o755)
    return os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def smaller(tree):
    if not isinstance(tree, dict):
        return tree
    return {
        key: SMALL[key] if key in SMALL and isinstance(value, int) else smaller(value) for key, value in tree.items()
    }
