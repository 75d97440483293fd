"""Merges files and overrides into one tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmrl.settings.section import Section, SettingsError, has_key, with_types, without_keys
from mmrl.settings.tree import merged

Tree = dict[str, Any]
Job = Callable[[Tree], type[Section]]  # returns the configuration class for a tree; raises SettingsError


def laid_over(job: Job, *trees: Tree) -> Tree:
    """Merges trees, each over those before it. Raises TreeError.

    job: returns the configuration class for a tree. null unsets a key, even one that the class no longer has because a
    later tree selected another `type`.
    """
    tree: Tree = {}
    stages: list[Tree] = []  # the tree after each merge
    for layer in trees:
        tree = merged(_with_types(job, tree), layer)
        stages.append(tree)
    try:
        return without_keys(job(tree), tree, lambda path: any(_had_key(job, stage, path) for stage in stages))
    except SettingsError:  # reported later, by the validation
        return tree


def _had_key(job: Job, tree: Tree, path: tuple[str, ...]) -> bool:
    """Returns whether `tree` holds a value at `path`, or its configuration class has that key."""
    value: object = tree
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    try:
        return value is not None or has_key(job(tree), tree, path)
    except SettingsError:
        return False


def _with_types(job: Job, tree: Tree) -> Tree:
    """Returns `tree` with the default `type` of every choice written out, so that `merged` sees a change of type."""
    try:
        return with_types(job(tree), tree)
    except SettingsError:  # reported later, by the validation
        return tree
