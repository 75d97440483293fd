"""Whether two configurations train the same thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from mmrl.settings import NOTHING

Tree = dict[str, Any]

# What changes no number that is trained but for rounding: sections, and keys of others.
BESIDE_TRAINING = {
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
    "engine.micro_tokens",
    "engine.logp_chunk",
    "engine.max_bad_steps",
    "engine.timeout",
    "rollout.max_idle_steps",
    "rollout.max_unscored_steps",
}
# What a run may go on with changed: it is told to when it diverges, or is to be longer.
MAY_CHANGE = BESIDE_TRAINING | {"steps", "optim.lr"}
BEFORE = {"optim.type": "adamw"}  # of runs that are older than the key
WORTH_SAYING = {"optim.lr", "engine.zero_stage", "engine.offload", "engine.micro_batch"}


def digest(config: Tree) -> str:
    """SHA-256 of all that decides what is trained, `steps` and `optim.lr` included."""
    told = {key: value for key, value in leaves(config) if not _under(key, BESIDE_TRAINING)}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def differences(before: Tree, now: Tree, free: set[str]) -> dict[str, tuple[Any, Any]]:
    """Values before and now of the keys that differ, but for those that are free."""
    old, new = BEFORE | dict(leaves(before)), BEFORE | dict(leaves(now))
    keys = [key for key in sorted({*old, *new}) if not _under(key, free)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a tree; lists are values. A key that holds nothing is as good as one that is missing,
    since written configurations leave it out."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        elif value not in NOTHING:
            yield prefix + key, _held(value)


def _held(value: Any) -> Any:
    """`value` without the keys of its items that hold nothing."""
    if isinstance(value, dict):
        return {key: _held(item) for key, item in value.items() if item not in NOTHING}
    return [_held(item) for item in value] if isinstance(value, list) else value


def _under(key: str, names: set[str]) -> bool:
    """Whether `key` is one of the names, or in a section that is."""
    parts = key.split(".")
    return any(".".join(parts[:depth]) in names for depth in range(1, len(parts) + 1))
