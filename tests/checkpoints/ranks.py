"""What runs in worker processes: a job on two ranks, whole and stopped and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from mmrl.trainer import Trainer
from tests.checkpoints.test_every_state import JOBS, differences, remembered, stopped
from tests.whole_runs.parts import make, release

ON_TWO = ["optim.eps=1e-3"]  # so that rounding, which differs between layouts, stays rounding


def weights_after(trainer: Trainer, step: int) -> dict[str, torch.Tensor]:
    """Returns the weights that the trainer has after a step; they are filled in while it trains."""
    found: dict[str, torch.Tensor] = {}

    before = trainer.run.on_step

    def look(number: int, values: Mapping[str, float]) -> None:
        if before is not None:
            before(number, values)
        if number == step and "loss" in values:
            found.update({key: value.clone() for key, value in trainer.engine.state().items()})

    trainer.run.on_step = look
    return found


def goes_on(folder: Path, name: str, *more: str) -> None:
    """Trains the job `name` to its end, and again with a stop in its middle. Writes where the memories of this rank
    differ; halves-N is the second run as it was when it stopped."""
    base, options, _ = JOBS[name]
    options = [*options, *ON_TWO, *more]
    whole = make(folder / "whole", *options, base=base)
    after, first = weights_after(whole, 3), weights_after(whole, 1)
    whole.train()
    expected, rank = remembered(whole), whole.engine.rank
    release(whole)
    torch.save(after, folder / f"after-3-{rank}.pt")
    torch.save(first, folder / f"after-1-{rank}.pt")
    stopped(folder / "halves", base, options)
    if rank == 0:
        shutil.copytree(folder / "halves", folder / "stopped")
    torch.rand(5 + rank)
    halves = make(folder / "halves", *options, base=base)
    fresh = remembered(halves)
    halves.resume()
    restored = remembered(halves)
    assert halves.step == 2
    halves.train()
    found = {
        "restored": differences(fresh, restored),
        "differ": differences(expected, remembered(halves)),
        "world": halves.engine.world,
    }
    release(halves)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
