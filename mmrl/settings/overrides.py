"""How files and overrides become one tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmrl.settings.section import Section, SettingsError, has_key, with_types, without_keys
from mmrl.settings.tree import merged

Tree = dict[str, Any]
Job = Callable[[Tree], type[Section]]  # the class of the configurations that a tree is one of; raises SettingsError


def laid_over(job: Job, *trees: Tree) -> Tree:
    """One tree of several, each laid over those before it. null unsets a key, also one that the job does not have any
    more because a later tree chose another type. Raises TreeError."""
    tree: Tree = {}
    earlier: list[Tree] = []
    for layer in trees:
        tree = merged(_with_types(job, tree), layer)
        earlier.append(tree)
    try:
        return without_keys(job(tree), tree, lambda path: any(_had(job, before, path) for before in earlier))
    except SettingsError:  # of which the validation will tell
        return tree


def _had(job: Job, tree: Tree, path: tuple[str, ...]) -> bool:
    """Whether `tree` holds something at `path`, or is of a job that has that key."""
    held: Any = tree
    for key in path:
        held = held.get(key) if isinstance(held, Mapping) else None
    try:
        return held is not None or has_key(job(tree), tree, path)
    except SettingsError:
        return False


def _with_types(job: Job, tree: Tree) -> Tree:
    """`tree` with the type of every choice in it that has the one it has by default, so that another type is seen to be
    another."""
    try:
        return with_types(job(tree), tree)
    except SettingsError:  # of which the validation will tell
        return tree
