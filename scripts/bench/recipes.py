"""Recipes as arguments of mmrl: NAME stands for the recipe, NAME_control for the same with random rewards."""

from __future__ import annotations

from pathlib import Path

from mmrl.settings.recipes import shipped

CONTROL = "_control"


def command(name: str) -> list[str]:
    """Returns the words behind `mmrl` that run a recipe or its control."""
    return ["control", name.removesuffix(CONTROL)] if name.endswith(CONTROL) else ["train", name]


def file(name: str) -> Path:
    """Returns the file of a recipe, which that of its control is too."""
    return shipped()[name.removesuffix(CONTROL)]
