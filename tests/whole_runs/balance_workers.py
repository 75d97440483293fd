"""What runs in worker processes of `test_balance`. Each function writes its results into a folder that tests read."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import torch

from mmrl.engine import Ranks
from mmrl.engine.packing import pack
from mmrl.errors import UserError
from mmrl.trainer import Trainer
from tests.whole_runs.parts import make, release, train

UNEVEN = [
    *("steps=2", "task={type: tests.whole_runs.parts:UnevenPrompts}", "rollout.prompts=16", "rollout.group_size=2"),
    *("algorithm.minibatches=2", "algorithm.terms=[{type: kl, coefficient: 0.1}]"),
    *("engine.micro_batch=3", "checkpoint.every=1", "checkpoint.background=false", "optim.lr=1e-3"),
]


def trained(folder: Path, stage: int, *settings: str) -> None:
    """Runs with and without an exchange, and the tokens of the groups that this rank learned from in each update."""
    cut = ["engine.micro_batch=64", "engine.micro_tokens=250"]
    for kind, balance, more in (("none", "none", []), ("lengths", "lengths", []), ("tokens", "lengths", cut)):
        name = f"{kind}-{stage}"
        own = [f"engine.zero_stage={stage}", f"engine.balance={balance}", *more, *settings]
        trainer = make(folder / name, *UNEVEN, *own)
        seen: list[list[int]] = []
        sizes: list[list[tuple[int, int]]] = []

        def update(minibatch, metrics, trainer=trainer, seen=seen, sizes=sizes):
            tokens = [len(row.prompt) + len(row.response) for micro in minibatch for row in micro.inputs]
            seen.append([sum(tokens[i : i + 2]) for i in range(0, len(tokens), 2)])
            widest = [max(len(row.prompt) + len(row.response) for row in micro.inputs) for micro in minibatch]
            sizes.append([(len(micro), most) for micro, most in zip(minibatch, widest, strict=True)])
            return Trainer.update(trainer, minibatch, metrics)

        trainer.update = update
        trainer.train()
        release(trainer)
        (folder / f"{name}-rank{trainer.engine.rank}.json").write_text(json.dumps(seen))
        (folder / f"{name}-sizes{trainer.engine.rank}.json").write_text(json.dumps(sizes))


def two_ranks(folder: Path) -> None:
    trained(folder, 3)
    train(folder / "stopped", *UNEVEN, "engine.zero_stage=3", "steps=1")
    train(folder / "stopped", *UNEVEN, "engine.zero_stage=3", resume=True)
    selective(folder, "selective-2")
    parcels(folder)


def selective(folder: Path, name: str) -> None:
    """A run whose steps keep some groups only, and the places of the draws that this rank learned from."""
    own = ["rollout.dynamic_sampling={high: 0.5, max_rounds: 6}", "algorithm.minibatches=1", "engine.balance=none"]
    trainer = make(folder / name, *UNEVEN, *own)
    seen: list[list[int]] = []
    usual = trainer.preparation.minibatches

    def minibatches(rollouts, *arguments):
        assert not rollouts.filler.any()
        seen.append(rollouts.group[::2].tolist())
        return usual(rollouts, *arguments)

    trainer.preparation.minibatches = minibatches
    trainer.train()
    release(trainer)
    (folder / f"{name}-rank{trainer.engine.rank}.json").write_text(json.dumps(seen))


def parcels(folder: Path) -> None:
    """What a rank gets of all, and how large a part of a large tensor is on its way."""
    ranks, pair = Ranks(), torch.ones(2)
    part = torch.arange(1_000_000)[10 + ranks.rank :][:3]
    told = [{"from": ranks.rank, "to": to, "part": part, "twice": [pair, pair]} for to in range(2)]
    got = ranks.exchange(told, instead="here=none")
    try:
        ranks.exchange([threading.Lock()] * 2, instead="here=none")
        said = ""
    except UserError as error:
        said = str(error)
    facts = {
        "got": [(one["from"], one["to"], one["part"].tolist()) for one in got],
        "shared": [one["twice"][0] is one["twice"][1] for one in got],
        "bytes": len(pack(part)),
        "said": said,
    }
    (folder / f"parcels-{ranks.rank}.json").write_text(json.dumps(facts))
