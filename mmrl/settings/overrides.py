"""Merges files and overrides into one tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmrl.settings.section import Section, SettingsError, has_key, with_types, without_keys
from mmrl.settings.tree import merged

Tree = dict[str, Any]
Job = Callable[[Tree], type[Section]]  # returns the configuration class of a tree; raises SettingsError


def laid_over(job: Job, *trees: Tree) -> Tree:
    """Merges trees, each over those before it. null unsets a key, even one that the job no longer has because a later
    tree chose another type. Raises TreeError."""
    tree: Tree = {}
    earlier: list[Tree] = []
    for layer in trees:
        tree = merged(_with_types(job, tree), layer)
        earlier.append(tree)
    try:
        return without_keys(job(tree), tree, lambda path: any(_had(job, before, path) for before in earlier))
    except SettingsError:  # reported later, by the validation
        return tree


def _had(job: Job, tree: Tree, path: tuple[str, ...]) -> bool:
    """Returns whether `tree` holds a value at `path`, or its job has that key."""
    held: object = tree
    for key in path:
        held = held.get(key) if isinstance(held, Mapping) else None
    try:
        return held is not None or has_key(job(tree), tree, path)
    except SettingsError:
        return False


def _with_types(job: Job, tree: Tree) -> Tree:
    """Returns `tree` with default types of choices written out, so that `merged` notices a change of type."""
    try:
        return with_types(job(tree), tree)
    except SettingsError:  # reported later, by the validation
        return tree
