"""Commands that pages print, and a copy of the recipes that is small enough to run them."""

import os
import re
import shutil
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "mmrl" / "README.md"]
PROGRAMS = ("mmrl", "bash", "python", "torchrun", "ray", "pip", ".venv/bin/python")
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


def printed(page: Path) -> list[str]:
    """The commands of a page: its indented lines, without what explains them, and those between backquotes."""
    text = page.read_text()
    lines = re.findall(r"^ {4}(\S.*)$", text.replace("\\\n        ", ""), flags=re.M)
    quoted = re.findall(rf"`((?:\w+=\S+ )?(?:{'|'.join(PROGRAMS)}) [^`\n]+)`", text)
    return [re.split(r"\s{2,}[#(]|\s{3,}", line)[0].strip() for line in lines] + quoted


def workshop(folder: Path) -> dict[str, str]:
    """Recipes that train two steps of a few rollouts, and what the pages take to be there; the environment in which
    their commands run from `folder`."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    for path in (folder / "configs").glob("*.yaml"):
        path.write_text(yaml.safe_dump(smaller(yaml.safe_load(path.read_text())) | {"steps": 2, "threads": 1}))
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", folder / "scripts")
    (folder / "scripts" / "setup.sh").write_text("exit 0  # the environment is this one\n")
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, words in (("mmrl", "-m mmrl"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tools / name).chmod(0o755)
    return os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def smaller(tree):
    if not isinstance(tree, dict):
        return tree
    return {
        key: SMALL[key] if key in SMALL and isinstance(value, int) else smaller(value) for key, value in tree.items()
    }
