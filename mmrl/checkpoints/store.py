"""Writes, verifies and loads checkpoints and final weights. They are written under a temporary name, then renamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.checkpoints import files
from mmrl.checkpoints.networks import write_networks
from mmrl.checkpoints.training import MAY_CHANGE, WORTH_SAYING, differences, digest, resume_obstacle
from mmrl.checkpoints.writing import Writing, one_line
from mmrl.engine import EMA, Engine, weights_only
from mmrl.engine.snapshot import Snapshot
from mmrl.errors import UserError

STATE = "trainer.json"
ORIGIN = "run.json"  # file beside weights with the step and the configuration of the run that wrote them


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written under a temporary name. target: its final folder."""

    target: Path
    writing: Writing


def begin(
    folder: Path, step: int, state: dict[str, Any], rank_state: dict[str, Any], engine: Engine, *, background: bool
) -> Pending:
    """Writes folder/step-N under a temporary name, or begins to. A collective, which `end` completes.

    state: the same on all ranks. rank_state: the state of this rank, with the states of its averages of weights by name
    in `averages` and of its unfinished rollouts in `pending`. background: whether a thread writes
    copies.

    Raises UserError if weights are NaN or infinite.
    """
    target = folder / f"step-{step:06d}"
    engine.mark("checkpoint")
    check_finite(engine, target)
    pending = target.with_name(target.name + files.PENDING)
    layout = {"ranks": engine.world, "zero_stage": engine.zero_stage, "frozen": engine.frozen_digest}
    if engine.rank == 0:
        shutil.rmtree(pending, ignore_errors=True)  # left by a run that was killed while saving
    engine.barrier()
    writing = Writing(pending, background=background)
    try:
        pending.mkdir(parents=True, exist_ok=True)
        engine.save(pending, writing)
        writing({"random": torch.get_rng_state(), "own": rank_state}, pending / f"rank-{engine.rank}.pt")
        if engine.rank == 0:
            (pending / STATE).write_text(json.dumps({"step": step, "layout": layout, **state}))
    except OSError as error:
        writing.problem = one_line(error)
    return Pending(target, writing)


def end(pending: Pending, engine: Engine, *, keep: int) -> None:
    """Renames a checkpoint that is written, and removes all but the newest `keep`. A collective.

    Raises UserError if some rank could not write it (a full disk, say); earlier checkpoints stay as they were.
    """
    writing = pending.writing
    finish(pending.target, writing.folder, writing.problem, writing.records, engine, "checkpoint")
    if engine.rank == 0:
        rotate(pending.target.parent, keep)
    engine.barrier()


def save_weights(
    folder: Path, policy: Any, engine: Engine, origin: dict[str, Any], played_with: Mapping[str, Tensor] | None = None
) -> None:
    """Replaces `folder` by the policy's weights in the library's own format, with their `origin`, see `make_origin`. A
    collective. played_with: tensors of the networks that the policy plays with, if any.

    Raises UserError if it cannot be written, or if weights are NaN or infinite; the previous folder then stays.
    """
    engine.mark("weights")
    check_finite(engine, folder)
    state = engine.state()
    problem, pending = None, folder.with_name(folder.name + files.PENDING)
    if engine.rank == 0:
        shutil.rmtree(pending, ignore_errors=True)
        try:
            policy.save(pending, state)
            write_networks(pending, played_with or {})
            (pending / ORIGIN).write_text(json.dumps(origin, indent=1))
        except Exception as error:  # safetensors has its own exception types for a failed write
            problem = one_line(error)
    finish(folder, pending, problem, {}, engine, "weights")


def finish(
    target: Path, pending: Path, problem: str | None, file_records: dict[str, files.Record], engine: Engine, what: str
) -> None:
    """Adds the manifest to the folder `pending`, which all ranks have written to, and renames it to `target`. A
    collective.

    problem: why this rank could not write; None where it could. file_records: sizes and checksums of this rank's files.
    what: "checkpoint" or "weights", for the error. Raises UserError where a rank could not write.
    """
    everyone = engine.gather((problem, file_records))
    problems = [p for p, _ in everyone if p]
    if engine.rank == 0 and not problems:
        try:
            files.write_manifest(pending, {name: record for _, records in everyone for name, record in records.items()})
            files.commit(pending, target)
        except OSError as error:
            problems = [one_line(error)]
    problems = engine.gather(problems)[0]
    if problems:
        if engine.rank == 0:
            shutil.rmtree(pending, ignore_errors=True)
        raise UserError(f"{what} {target} could not be written ({problems[0]}); earlier checkpoints are intact")


def check_finite(engine: Engine, target: Path) -> None:
    """Raises UserError where weights are NaN or infinite. A collective. target: what would have been written, for the
    message."""
    if not engine.finite():
        raise UserError(
            f"{target} is not written, because weights have become NaN or infinite; earlier checkpoints are intact: "
            "lower optim.lr and resume from them"
        )


def rotate(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and those that were set aside as damaged."""
    for old in [*files.list_finished(folder)[:-keep], *folder.glob(f"*{files.DAMAGED}")]:
        shutil.rmtree(old)


def make_origin(step: int, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the record `ORIGIN` that is stored beside weights. config: the run's full configuration as nested
    mappings."""
    return {"step": step, "digest": digest(config), "config": config}


def newest_intact(folder: Path, engine: Engine, say: Callable[[str], None]) -> Path | None:
    """Returns the newest checkpoint in `folder` whose checksums are right; None where there are no checkpoints.

    Newer ones that are damaged are reported by `say` and renamed. A collective; ranks divide the reading of files.
    Raises UserError if there are checkpoints and none of them is intact.
    """
    # the checkpoints that rank 0 sees, newest first
    candidates = [folder / name for name in engine.gather([path.name for path in files.list_finished(folder)])[0][::-1]]
    damaged: list[Path] = []
    for path in candidates:
        reasons = [r for r in engine.gather(files.find_damage(path, engine.rank, engine.world)) if r is not None]
        if not reasons:
            if engine.rank == 0:
                set_aside(damaged)
            engine.barrier()
            return path
        damaged.append(path)
        say(f"checkpoint {path} is damaged and is not used: {reasons[0]}")
    if candidates:
        raise UserError(f"no checkpoint in {folder} is intact (see above); name another run_dir, or remove this one")
    return None


def go_back(folder: Path, engine: Engine, copies: Mapping[str, EMA | Snapshot], say: Callable[[str], None]) -> str:
    """Restores weights, averages and optimizer from the newest intact checkpoint in `folder`, but no schedules. Returns
    the checkpoint's name. A collective. Raises UserError where there is none."""
    path = newest_intact(folder, engine, say)
    if path is None:
        raise UserError(
            f"a guard (guards) with action=restore has no checkpoint to restore, since {folder} has none yet; lower "
            "checkpoint.every"
        )
    # learning rates stay as they are, although `load` restores the number of updates
    updates, factor = engine.updates, engine.lr_factor
    rank_state = load(path, engine)
    engine.updates, engine.lr_factor = updates, factor
    for name, copy in copies.items():
        copy.load(rank_state["averages"][name])
    return path.name


def set_aside(paths: list[Path]) -> None:
    """Renames damaged checkpoints, so that they no longer count; the next checkpoint removes them."""
    for path in paths:
        aside = path.with_name(path.name + files.DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def resume(
    folder: Path, config: dict[str, Any], engine: Engine, say: Callable[[str], None], *, required: bool
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Restores engine and random state from the newest intact checkpoint in `folder`. Returns the shared state and this
    rank's, or None without checkpoints. A collective. config: the current configuration as a tree.

    Raises UserError if there is no checkpoint and one is required, if none is intact, or if the newest intact one was
    written under a configuration that trains something else.
    """
    if engine.rank == 0:
        files.restore(folder.parent)
        files.restore(folder)
    engine.barrier()
    path = newest_intact(folder, engine, say)
    if path is None and required:
        raise UserError(
            f"checkpoint.resume=true, but {folder} has no finished checkpoint; set checkpoint.resume=auto to start "
            "a run"
        )
    if path is None:
        return None
    state = read_state(path)
    check_same_training(state["config"], config, path)
    rank_state = load(path, engine)
    for key, (before, now) in differences(state["config"], config, MAY_CHANGE - WORTH_SAYING).items():
        say(f"{key} changes from {before!r} to {now!r}")
    say(f"resumed from {path}")
    return state, rank_state


def load(path: Path, engine: Engine) -> dict[str, Any]:
    """Restores engine and random state from a checkpoint. Returns this rank's state."""
    layout = read_state(path)["layout"]
    if layout["frozen"] != engine.frozen_digest:
        raise UserError(
            f"{path} was trained with other frozen weights than those at model.path, and does not contain them; set "
            "model.path to the weights that the run began with"
        )
    before, ranks = layout["zero_stage"], layout["ranks"]
    engine.load(path, before, ranks)
    with weights_only(path):
        # If there are more ranks than before, several read the same file.
        rank = torch.load(path / f"rank-{engine.rank % ranks}.pt")
        torch.set_rng_state(rank["random"])
        if (before, ranks) == (engine.zero_stage, engine.world):
            return {"rewards": {}} | rank["own"]  # older checkpoints have no states of rewards
        rank_states = [torch.load(path / f"rank-{r}.pt", mmap=True)["own"] for r in range(ranks)]
    averages = {name: [state["averages"][name] for state in rank_states] for name in rank["own"]["averages"]}
    return {
        "averages": {name: engine.reshard(states, before) for name, states in averages.items()},
        "pending": redealt([state["pending"] for state in rank_states], engine, path),
        "modules": rank["own"]["modules"],
        "rewards": shared_rewards([state.get("rewards", {}) for state in rank_states], engine, path),
    }


def shared_rewards(states: list[dict[str, Any]], engine: Engine, path: Path) -> dict[str, Any]:
    """Returns this rank's states of rewards from those of all ranks of a checkpoint. Raises UserError if there are
    states and the number of ranks has changed."""
    if any(states) and len(states) != engine.world:
        name = next(name for state in states for name in state)
        raise UserError(
            f"reward {name!r} has a state for each rank, and {path} was written by {len(states)} ranks, not "
            f"{engine.world}; resume with {len(states)} ranks"
        )
    return states[engine.rank % len(states)]


def redealt(pending: list[dict[str, Any]], engine: Engine, path: Path) -> dict[str, Any]:
    """Returns this rank's share of the unfinished rollouts of all ranks of a checkpoint (`Collector.state`); the number
    of ranks may have changed. Raises UserError if it has and a source of `rollout.extras` has a state by rank."""
    for i, by_rank in enumerate(zip(*(state["extras"] for state in pending), strict=True)):
        if any(by_rank) and len(pending) != engine.world:
            raise UserError(
                f"rollout.extras.{i} has a state for each rank, and {path} was written by {len(pending)} ranks, not "
                f"{engine.world}; resume with {len(pending)} ranks"
            )
    rounds = dealt([state["rounds"] for state in pending], engine.rank, engine.world)
    return {"rounds": rounds, "extras": pending[engine.rank % len(pending)]["extras"]}


def dealt(pools: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """Distributes the unfinished groups of several ranks over `world` ranks, oldest first. Returns the share of `rank`.
    pools: for each earlier rank a mapping (`Pool.state`) of lists, each of which holds the same number of entries for
    every group, group by group; "positions" has one entry for a group, smaller ones are older."""
    columns: dict[str, list[Any]] = {name: [] for name in pools[0]}
    for pool in pools:
        for name, column in pool.items():
            size = len(column) // max(1, len(pool["positions"]))  # entries of a group: its drafts, or one number
            columns[name] += [column[i : i + size] for i in range(0, len(column), max(1, size))]
    oldest = sorted(range(len(columns.get("positions", []))), key=lambda i: columns["positions"][i])
    return {name: [value for i in oldest[rank::world] for value in groups[i]] for name, groups in columns.items()}


def read_state(path: Path) -> dict[str, Any]:
    """Returns the state of a checkpoint that is equal on all ranks."""
    return json.loads((path / STATE).read_text())


def check_same_training(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raises UserError for the first key that differs between two configurations and must not change within a run.
    saved: the configuration in the checkpoint `path`. now: the configuration of the current run."""
    # either may be null or missing
    permitted = set((now.get("checkpoint") or {}).get("may_change") or ())
    for key, (before, after) in differences(saved, now, MAY_CHANGE).items():
        fixed = resume_obstacle(key, before, after)
        if fixed is None and key in permitted:
            continue
        hint = "" if fixed is None or key not in permitted else f" (checkpoint.may_change: {fixed})"
        instead = ", name it in checkpoint.may_change," if fixed is None else ""
        raise UserError(
            f"a run cannot resume with a changed configuration: {key} is {after!r} but {path} was trained with "
            f"{before!r}; set {key} to its former value{instead} or name another run_dir{hint}"
        )
