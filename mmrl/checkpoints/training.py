"""Compares configurations by the keys that influence training, to decide whether a run may be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from mmrl.settings import NOTHING

Tree = dict[str, Any]

# Sections and keys that do not influence the trained weights, except by rounding.
NEUTRAL_KEYS = {
    "run_dir",
    "threads",
    "evaluation",
    "checkpoint",
    "log",
    "kernels",
    "engine.zero_stage",
    "engine.offload",
    "engine.micro_batch",
    "engine.balance",
    "engine.compile",
    "engine.deterministic",
    "engine.micro_tokens",
    "engine.logp_chunk",
    "engine.packing",
    "engine.reuse_features",
    "engine.max_bad_steps",
    "engine.timeout",
    "rollout.max_idle_steps",
    "rollout.max_unscored_steps",
}
# Keys that may change when a run resumes: neutral ones, and those for training longer or at another learning rate.
MAY_CHANGE = NEUTRAL_KEYS | {"steps", "optim.lr"}
# Sections in which numbers may change if checkpoint.may_change names their keys, and keys of these sections that may
# not change, since they decide shapes of saved tensors.
NUMBERS = {"algorithm", "optim", "guards", "rollout", "task.rewards", "correction", "denoising"}
SHAPES = {"rollout.prompts", "rollout.group_size", "denoising.resolution", "optim.ema"}
BEFORE = {"optim.type": "adamw"}  # defaults for runs that are older than the key
WORTH_SAYING = {"optim.lr", "engine.zero_stage", "engine.offload", "engine.micro_batch"}  # changes that are printed


def digest(config: Tree) -> str:
    """Returns a SHA-256 of all keys that influence training, including `steps` and `optim.lr`."""
    relevant = {key: value for key, value in leaves(config) if not _under(key, NEUTRAL_KEYS)}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def differences(before: Tree, now: Tree, free: set[str]) -> dict[str, tuple[Any, Any]]:
    """Returns the old and the new value of each key that differs, except for the keys and sections in `free`."""
    old, new = BEFORE | dict(leaves(before)), BEFORE | dict(leaves(now))
    keys = [key for key in sorted({*old, *new}) if not _under(key, free)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def resume_obstacle(key: str, before: object, after: object) -> str | None:
    """Returns why a run cannot be resumed with another value of a key even if checkpoint.may_change names it; None
    where it can. before, after: the two values."""
    if _under(key, SHAPES) or not _under(key, NUMBERS):
        return f"{key} cannot change, since the content of a checkpoint depends on it"
    if not _differ_in_numbers_only(before, after):
        return f"only numbers in {key} may change, not its structure"
    return None


def _differ_in_numbers_only(before: object, after: object) -> bool:
    """Returns whether two values are equal, or have the same structure and differ in numbers or nulls only."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_differ_in_numbers_only(before[key], after[key]) for key in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_differ_in_numbers_only, before, after))
    if isinstance(before, str | bool) or isinstance(after, str | bool):
        return before == after and type(before) is type(after)
    numbers = (int, float, type(None))
    return isinstance(before, numbers) and isinstance(after, numbers)


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and values of nested mappings; lists count as values. Keys that are null or empty are left
    out, as in written configurations."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        elif value not in NOTHING:
            yield prefix + key, _without_empty(value)


def _without_empty(value: object) -> object:
    """Returns a value without keys that are null or empty, at any depth."""
    if isinstance(value, dict):
        return {key: _without_empty(item) for key, item in value.items() if item not in NOTHING}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _under(key: str, names: set[str]) -> bool:
    """Returns whether `key` is one of the names, or in a section that is."""
    parts = key.split(".")
    return any(".".join(parts[:depth]) in names for depth in range(1, len(parts) + 1))
