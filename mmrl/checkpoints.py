"""Checkpoints of a run: written under a temporary name, then renamed, so that a torn one is never loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from mmrl.engine import Engine
from mmrl.errors import UserError

PENDING = ".pending"  # suffix of a checkpoint that is still being written
REPLACED = ".replaced"  # suffix of what stood at a name until the new one took it


def finished(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and not p.suffix)


def save(folder: Path, step: int, state: dict[str, Any], own: dict[str, Any], engine: Engine, *, keep: int) -> Path:
    """Write folder/step-N and remove all but the newest `keep`. A collective: every rank calls it.

    `state` is the same on all ranks; `own` holds named dictionaries of this rank's tensors, lists and numbers.

    Raises UserError if it can not be written (a full disk, say); earlier checkpoints stay as they were.
    """
    target = folder / f"step-{step:06d}"
    pending = target.with_suffix(PENDING)
    problem = None
    if engine.rank == 0:
        shutil.rmtree(pending, ignore_errors=True)  # left by a run that was killed while saving
    engine.barrier()
    try:
        pending.mkdir(parents=True, exist_ok=True)
        engine.save(pending)
        torch.save({"random": torch.get_rng_state(), "own": own}, pending / f"rank-{engine.rank}.pt")
        if engine.rank == 0:
            (pending / "trainer.json").write_text(json.dumps({"step": step, **state}))
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        problem = " ".join(str(error).split())[:200]
    problems = [p for p in engine.gather(problem) if p]
    if problems:
        shutil.rmtree(pending, ignore_errors=True)
        raise UserError(f"checkpoint {target} could not be written ({problems[0]}); earlier checkpoints are intact")
    if engine.rank == 0:
        _commit(pending, target)
        for old in finished(folder)[:-keep]:
            shutil.rmtree(old)
    engine.barrier()
    return target


def load(path: Path, engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restore engine and random state from a finished checkpoint; returns the trainer's state and this rank's own."""
    state = json.loads((path / "trainer.json").read_text())
    ranks = len(list(path.glob("rank-*.pt")))
    if ranks != engine.world:
        raise UserError(f"checkpoint {path} was written by {ranks} ranks and can not be resumed with {engine.world}")
    engine.load(path)
    rank = torch.load(path / f"rank-{engine.rank}.pt", weights_only=True)
    torch.set_rng_state(rank["random"])
    return state, rank["own"]


def save_weights(folder: Path, policy: Any, engine: Engine) -> None:
    """Replace `folder` by the policy's weights in the library's own format. A collective.

    Raises UserError if it can not be written; what stood there before stays.
    """
    state = engine.state()
    problem = None
    if engine.rank == 0:
        pending = folder.with_suffix(PENDING)
        shutil.rmtree(pending, ignore_errors=True)
        try:
            policy.save(pending, state)
            _commit(pending, folder)
        except Exception as error:  # safetensors has its own exception types for a failed write
            shutil.rmtree(pending, ignore_errors=True)
            problem = " ".join(str(error).split())[:200]
    problems = [p for p in engine.gather(problem) if p]
    if problems:
        raise UserError(f"weights {folder} could not be written ({problems[0]}); checkpoints are intact")


def _commit(pending: Path, target: Path) -> None:
    """Make every byte durable, then rename: after a crash the folder is whole or absent. One that is replaced is moved
    aside until then."""
    for file in pending.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    replaced = target.with_suffix(REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    pending.rename(target)
    parent = os.open(target.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)
    shutil.rmtree(replaced, ignore_errors=True)
