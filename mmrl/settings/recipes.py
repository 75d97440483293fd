"""Recipes: the YAML files that come with the package, by name, and their run directories."""

from __future__ import annotations

import difflib
import importlib
import os
from functools import cache
from pathlib import Path

FOLDER = "configs"  # holds one folder of recipes for each kind of model, as runs/ does
FORMER_CONTROL = "_random_reward"  # suffix of the control recipes of earlier releases


@cache
def shipped() -> dict[str, Path]:
    """Returns the shipped recipe files, by name without the suffix."""
    root = Path(importlib.import_module("mmrl.configs").__path__[0])
    return {path.stem: path for path in sorted(root.rglob("*.yaml"), key=str)}


def resolve(path: Path) -> Path:
    """Returns the file at `path`, or the shipped recipe that it names, if it is a bare name without suffix and folder.

    Raises FileNotFoundError, with a message in one line that names the nearest recipe.
    """
    if path.is_file():
        return path
    if path.suffix == "" and path.name == str(path) and path.name in shipped():
        return relative_to_working_folder(shipped()[path.name])
    raise FileNotFoundError(f"no configuration file {path}{_hint(path)}")


def run_dir(path: Path) -> str:
    """Returns the default run directory of a recipe: runs/KIND/NAME for configs/KIND/NAME.yaml, runs/NAME for a file
    elsewhere."""
    parts = path.absolute().with_suffix("").parts
    positions = [i for i, part in enumerate(parts[:-1]) if part == FOLDER]
    return "/".join(("runs", *(parts[positions[-1] + 1 :] if positions else parts[-1:])))


def relative_to_working_folder(path: Path) -> Path:
    """Returns `path` relative to the working directory, if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def resolve_from(folder: Path, name: str) -> Path:
    """Returns the recipe `name` that a file in `folder` extends: a path relative to `folder`, or a shipped recipe."""
    path = Path(os.path.normpath(folder / name))
    return Path(name) if not path.is_file() and name in shipped() else path


def _hint(path: Path) -> str:
    """Returns the end of the message for a recipe that does not exist; "" if no recipe has a similar name."""
    name = path.stem
    if name.endswith(FORMER_CONTROL):
        return f"; the control of a recipe is a command: mmrl control {name.removesuffix(FORMER_CONTROL)}"
    if name in shipped():
        return f"; the recipe of that name is {relative_to_working_folder(shipped()[name])}"
    close = difflib.get_close_matches(name, shipped(), n=1, cutoff=0.8)
    return f"; did you mean the recipe {close[0]}?" if close else ""
