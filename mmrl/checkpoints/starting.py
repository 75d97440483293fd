"""Checks a run directory before a run starts: is it new, resumable, complete, or does it hold another run?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from mmrl.checkpoints import files
from mmrl.checkpoints.data import check_data
from mmrl.checkpoints.store import ORIGIN, STATE, check_same_training, read_state
from mmrl.checkpoints.training import MAY_CHANGE, NEUTRAL_KEYS, differences
from mmrl.errors import UserError
from mmrl.report.records import parse_row

Tree = dict[str, Any]


def check_run_dir(folder: Path, config: Tree) -> bool:
    """Returns whether the run in `folder` is complete already. Changes nothing and reads only small files.

    config: the full configuration as nested mappings. Raises UserError where the run can neither start nor resume.
    """
    resume = config["checkpoint"]["resume"]
    intact = [
        path for path in files.list_finished(folder / "checkpoints") if files.find_damage_quickly(path, STATE) is None
    ]
    logged = folder / "metrics.jsonl"
    used = logged.exists() and logged.stat().st_size > 0  # empty: a run that failed before its first line
    if resume is False:
        if used or intact:
            raise UserError(
                f"run_dir={folder} already holds a run; set checkpoint.resume=auto to continue it, or name another "
                "run_dir"
            )
        return False
    if ended(folder, config):
        return True
    if intact:
        check_goes_on(intact[-1], config)
        check_data(folder, config)
    elif resume is True:
        raise UserError(
            f"checkpoint.resume=true, but run_dir={folder} has no finished checkpoint; set checkpoint.resume=auto to "
            "start a run"
        )
    elif used:
        check_starts_again(folder, config)
    return False


def ended(folder: Path, config: Tree) -> bool:
    """Returns whether the run directory `folder` holds the final weights of this configuration."""
    origin = read_origin(folder / "final")
    return (
        origin is not None
        and origin["step"] >= config["steps"]
        and not differences(origin["config"], config, MAY_CHANGE - {"optim.lr"})
    )


def check_goes_on(checkpoint: Path, config: Tree) -> None:
    """Raises UserError if a run with this configuration cannot resume from `checkpoint`."""
    check_same_training(read_state(checkpoint)["config"], config, checkpoint)
    if (step := files.step_of(checkpoint)) > config["steps"]:
        raise UserError(
            f"{checkpoint} is of step {step}, but steps={config['steps']}; set steps={step} or more, or name another "
            "run_dir"
        )


def check_starts_again(folder: Path, config: Tree) -> None:
    """Raises UserError unless the run directory holds a run that ended before its first checkpoint, and has the same
    configuration or was not trained for a step, so that it can start again."""
    if (origin := read_origin(folder / "final")) is not None:
        raise UserError(
            f"run_dir={folder} holds a run that ended at step {origin['step']} and has no checkpoint to resume from; "
            "name another run_dir"
        )
    if not has_trained(folder):
        return  # a mistake ended it early, perhaps the one that the new configuration mends
    try:
        before = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        before = None
    if not isinstance(before, dict):
        raise UserError(f"run_dir={folder} holds a run whose config.yaml cannot be read; name another run_dir")
    for key, (old, new) in differences(before, config, MAY_CHANGE).items():
        raise UserError(
            f"run_dir={folder} holds a run without a checkpoint in which {key} is {old!r}, not {new!r}; set {key} to "
            "its old value, remove the folder, or name another run_dir"
        )


def has_trained(folder: Path) -> bool:
    """Returns whether metrics.jsonl has a line of a step above 0, or one that cannot be read."""
    rows = [parse_row(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)]
    return any(row is None or row["step"] > 0 for row in rows)


def read_origin(weights: Path) -> Tree | None:
    """Returns the origin that is stored beside weights, see `store.make_origin`; None where they are absent or
    damaged."""
    return None if files.find_damage_quickly(weights, ORIGIN) else json.loads((weights / ORIGIN).read_text())


def check_warm_start(final: Path, config: Tree, path: str) -> bool:
    """Returns whether `final` holds the final weights of the warm start `path`, whose configuration is `config`.

    Raises UserError if they were trained with another configuration, or are damaged.
    """
    if not final.is_dir():
        return False
    if (wrong := files.find_damage(final)) is not None:
        raise UserError(
            f"model.warm_start={path}: {final} is damaged ({wrong}); remove this folder, so that the warm start is run "
            "again"
        )
    origin = read_origin(final)
    assert origin is not None
    for key, (old, new) in differences(origin["config"], config, NEUTRAL_KEYS).items():
        raise UserError(
            f"model.warm_start={path}: {final} was trained with {key}={old!r}, not {new!r}; set {key} to its old "
            f"value in that recipe, or remove {final.parent}, so that the warm start is run again"
        )
    return True
