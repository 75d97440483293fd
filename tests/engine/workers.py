"""What runs in worker processes. Each function writes its results into a folder that tests read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mmrl.core.reduce import MODES
from mmrl.metrics import Metrics
from mmrl.trainer import Trainer
from tests.engine.parts import IMAGES, ROBOTS, distance, make, release, train

ROWS = 24
MICRO = (1, 3, 8)
GRPO = ["steps=4", "engine.micro_batch=6", "optim.schedule=linear", "optim.warmup_steps=2"]


def splits(folder: Path) -> None:
    """Loss and gradient of one fixed batch, cut into ranks and micro-batches, against the batch in one piece."""
    differences = {}
    trainer = make(folder / "splits", "algorithm.entropy_coefficient=0.01")
    engine = trainer.engine
    batch = trainer.policy.rollout([trainer.batches.prompts[i] for i in range(6)], 4, list(range(ROWS)))
    for row in range(ROWS):  # rows of 0 to 3 decisions, so that every reduction differs from the others
        batch.mask[row, row % 5 % 4 :] = False
    batch.advantages = torch.randn(ROWS, generator=torch.Generator().manual_seed(0))
    mine = batch.select(torch.arange(ROWS).tensor_split(engine.world)[engine.rank])
    for mode in MODES:
        algorithm = trainer.config.algorithm.model_copy(update={"reduce": mode})
        trainer.config = trainer.config.model_copy(update={"algorithm": algorithm})
        reference = folder / f"{mode}.safetensors"
        if engine.world == 1:
            save_file(gradient(trainer, [batch]), reference)
        for size in MICRO:
            parts = [mine.select(index) for index in torch.arange(len(mine)).split(size)]
            found = gradient(trainer, parts)
            if engine.rank == 0:
                whole = load_file(reference)
                differences[f"{mode}/{size}"] = {
                    "loss": abs(float(found.pop("loss") - whole.pop("loss"))),
                    "gradient": distance(found, whole),
                    "norm": math.sqrt(sum(float(g.double().square().sum()) for g in whole.values())),
                }
    release(trainer)
    if engine.rank == 0:
        (folder / f"splits-{engine.world}.json").write_text(json.dumps(differences))


def gradient(trainer: Trainer, parts: list) -> dict[str, torch.Tensor]:
    """What the optimizer would step with, after all sums over ranks (ZeRO 0), and the loss."""
    grads: dict[str, torch.Tensor] = {}
    module, optimizer = trainer.policy.module, trainer.engine._engine.optimizer

    def look(closure=None):
        optimizer._global_grad_norm = 0.0
        grads.update({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})

    optimizer.step = look
    metrics = Metrics(trainer.engine)
    trainer.update(parts, metrics)
    del optimizer.step
    return {**grads, "loss": torch.tensor(metrics.result()["loss"])}


def trained(folder: Path, name: str, stages: list[int]) -> None:
    for stage in stages:
        train(folder / f"{name}-{stage}", f"engine.zero_stage={stage}", *GRPO)


def no_picture_on_a_rank(folder: Path) -> None:
    blind = ["engine.zero_stage=3", "task.name=tests.engine.parts:blind_on_rank_one", "evaluation.before=true"]
    train(folder / "blind", "steps=2", *blind)


def one_bad_loss(folder: Path) -> None:
    """The last rank's loss is NaN or infinite in the second of three steps."""
    found = {}
    for stage, dtype in [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16")]:
        name = f"{stage}-{dtype}"
        options = [f"engine.zero_stage={stage}", f"model.dtype={dtype}", "steps=3", "optim.lr=1e-2"]
        trainer = make(folder / f"bad-{name}", *options)
        engine, usual = trainer.engine, trainer.loss
        seen: list[dict] = [{k: v.clone() for k, v in engine.state().items()}]
        bad = math.inf if stage % 2 else math.nan

        def loss(micro, total, steps, trainer=trainer, engine=engine, usual=usual, bad=bad):
            value, stats = usual(micro, total)
            return (value + bad if trainer.step == 1 and engine.rank == engine.world - 1 else value), stats

        def update(minibatch, metrics, trainer=trainer, engine=engine, seen=seen):
            Trainer.update(trainer, minibatch, metrics)
            seen.append({k: v.clone() for k, v in engine.state().items()})

        trainer.loss, trainer.update = loss, update
        trainer.train()
        same = [all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(seen, seen[1:], strict=False)]
        found[name] = {"same": same, "updates": engine.updates, "bad_steps": trainer.bad_steps}
        release(trainer)
    if engine.rank == 0:
        (folder / f"bad-{engine.world}.json").write_text(json.dumps(found))


def one_rank(folder: Path) -> None:
    splits(folder)
    trained(folder, "one", [0])


def two_ranks(folder: Path) -> None:
    splits(folder)
    trained(folder, "two", [0, 1, 2, 3])
    one_bad_loss(folder)
    no_picture_on_a_rank(folder)


def kernels_and_reference(folder: Path) -> None:
    for backend in ("torch", "cpu"):
        train(folder / backend, "steps=2", "algorithm.minibatches=2", "optim.lr=1e-2", f"kernels.backend={backend}")


def images(folder: Path, name: str) -> None:
    """A run of the image recipe, and the pictures of its first round as this rank drew them."""
    trainer = make(folder / name, base=IMAGES)
    batch = trainer.batches.sample_round(0)
    torch.save(
        {"group": batch.group, "images": torch.stack([s.image for s in batch.samples])},
        folder / f"{name}-{trainer.engine.rank}.pt",
    )
    trainer.batches.cursor = 0
    trainer.train()
    release(trainer)


def robots(folder: Path, name: str) -> None:
    """Runs of the robot recipe with groups and with a critic."""
    for method in ("grpo", "ppo"):
        train(folder / f"{name}-{method}", f"algorithm.method={method}", base=ROBOTS)
