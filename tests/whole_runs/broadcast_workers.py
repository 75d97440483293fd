"""What test_vllm_broadcast.py runs in processes of its own: servers of vLLM that get their weights through a process
group. Results go into JSON files."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch

from mmrl.errors import UserError
from mmrl.generation.weight_sync import nccl, transfer
from mmrl.generation.weight_sync.buckets import Bucket, packed
from tests.whole_runs.parts import Fixed, make, release, spread
from tests.whole_runs.vllm_workers import SERVER, SERVERS, responses

BROADCAST = "rollout.generator.transfer=broadcast"
SMALL = 2**16  # bytes of a bucket, so that a tiny model has many


def two_servers(folder: Path) -> None:
    """Two engines: asked, given a damaged tensor, one of them killed between two synchronisations and one stopped in
    the middle of the last."""
    transfer.packed = smaller
    trainer = make(folder / "run", *SERVERS, BROADCAST, "optim.lr=3e-4", "steps=2", task=Fixed(spread))
    policy, generator, engine = trainer.policy, trainer.generator, trainer.generator.engine
    prompts = [trainer.task.train[i] for i in range(16)]
    try:
        found: dict = {"start": generator.sync_weights()}
        found["answers"] = responses(policy.rollout(prompts, 8, range(128)))
        found["answered"] = list(engine.answered)
        found["files"] = [path.name for path in (folder / "run/engines").rglob("*.safetensors")]
        found["damaged"] = damaged(generator)
        found["sound"] = generator.sync_weights()
        found["again"] = responses(policy.rollout(prompts, 8, range(128)))
        found |= killed(trainer)
        trainer.train()
        found["stopped"], found["seconds"] = stopped(generator)
    finally:
        release(trainer)
    (folder / "two.json").write_text(json.dumps(found))


def smaller(weights):
    return packed(weights, SMALL)


def damaged(generator) -> str:
    """What a synchronisation says in which one bit of one tensor changes on its way."""

    def other(weights):
        for bucket in smaller(weights):
            payload = bucket.payload.clone()
            if any("layers.1.mlp.down_proj.weight" in entry.name for entry in bucket.entries):
                payload[4] ^= 1
            yield Bucket(bucket.entries, payload)

    transfer.packed = other
    try:
        generator.sync_weights()
    except UserError as error:
        return str(error)
    finally:
        transfer.packed = smaller
    return ""


def killed(trainer) -> dict:
    """The first engine ends; the weights that it gets again are those of the last synchronisation, though those that
    are trained have moved on."""
    generator, engine = trainer.generator, trainer.generator.engine
    before = engine.processes[0].running.pid
    os.killpg(before, signal.SIGKILL)
    parameters = list(trainer.policy.module.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.5)
    while engine.processes[0].running.pid == before:
        time.sleep(0.2)
    engine._bring_up_to_date(engine.servers[0])
    found = {"version": engine.servers[0].version() == engine.current.version}
    found["copy"] = generator.compare(generator.comparison)
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return found | {"after": generator.sync_weights()}


def stopped(generator) -> tuple[str, float]:
    """What a synchronisation says in which the second engine stops at the second bucket, and after how long."""
    engine, publish_header = generator.engine, nccl.publish_header
    engine.transfer.timeout = engine.servers[0].timeout = engine.servers[1].timeout = 8.0

    def stopping(group, base, number, bucket):
        if number == 1:
            os.killpg(engine.processes[1].running.pid, signal.SIGSTOP)
        publish_header(group, base, number, bucket)

    nccl.publish_header = stopping
    started = time.monotonic()
    try:
        generator.sync_weights()
    except UserError as error:
        return str(error), time.monotonic() - started
    finally:
        nccl.publish_header = publish_header
    return "", 0.0


def two_ranks(folder: Path) -> None:
    """ZeRO-3: modules are gathered on both ranks while rank 0 sends."""
    transfer.packed = smaller
    options = [*SERVER, BROADCAST, "engine.zero_stage=3", "optim.lr=1e-2", "steps=2"]
    trainer = make(folder / "ranks", *options)
    trainer.train()
    release(trainer)
