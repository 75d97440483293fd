"""What runs in worker processes. Each function writes its results into a folder that tests read."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import load_file, save_file

from mmrl import kernels
from mmrl.algorithms.algorithm import SEGMENT_IDS
from mmrl.collection.collector import Collector
from mmrl.core.reduce import MODES
from mmrl.engine import EMA, Engine
from mmrl.kernels import ops
from mmrl.rollouts import DecisionColumn
from mmrl.trainer import Trainer
from mmrl.training.metrics import Metrics
from tests.whole_runs.parts import IMAGES, ROBOTS, distance, make, ratio_gaps, release, train

ROWS = 24
MICRO = (1, 3, 8)
METHODS = {"grpo": [], "ppo": ["algorithm={type: ppo}"]}
BAD = [(0, "float32"), (1, "bfloat16"), (3, "float32")]
FURTHER_BAD = [(1, "float32"), (2, "float32")]
GRPO = ["steps=4", "engine.micro_batch=6", "optim.schedule=linear", "optim.warmup_steps=2"]


def splits(folder: Path) -> None:
    """Loss and gradient of one fixed batch, cut into ranks and micro-batches, against the batch in one piece."""
    differences = {}
    trainer = make(folder / "splits", "algorithm.terms=[{type: entropy, coefficient: 0.01}]")
    engine = trainer.engine
    batch = trainer.policy.rollout([trainer.task.train[i] for i in range(6)], 4, list(range(ROWS)))
    for row in range(ROWS):  # rows of 0 to 3 decisions, so that every reduction differs from the others
        batch.mask[row, row % 5 % 4 :] = False
    drawn = torch.randn(ROWS, generator=torch.Generator().manual_seed(0))
    batch.advantages = drawn[:, None].expand(batch.mask.shape)
    segments = (torch.arange(batch.mask.shape[1]) // 2).expand(batch.mask.shape)  # of unequal lengths: two and one
    batch.extras[SEGMENT_IDS.name] = DecisionColumn(segments)
    mine = batch.select(torch.arange(ROWS).tensor_split(engine.world)[engine.rank])
    for mode in MODES:
        trainer.algorithm = trainer.algorithm.model_copy(update={"reduce": mode})
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
    """What the optimizer would step with, after all sums over ranks (ZeRO 0 and 3), and the loss."""
    grads: dict[str, torch.Tensor] = {}
    module, optimizer = trainer.policy.module, trainer.engine._engine.optimizer

    def look(closure=None):
        optimizer._global_grad_norm = 0.0
        for name, parameter in module.named_parameters():
            whole = parameter.grad if trainer.engine.zero_stage == 0 else safe_get_full_grad(parameter)
            if whole is not None:
                grads[name] = whole.clone()

    optimizer.step = look
    metrics = Metrics(trainer.engine)
    trainer.update(parts, metrics)
    del optimizer.step
    return {**grads, "loss": torch.tensor(metrics.result()["loss"])}


def trained(folder: Path, name: str, stages: list[int]) -> None:
    for stage in stages:
        train(folder / f"{name}-{stage}", f"engine.zero_stage={stage}", *GRPO)


def no_image_on_a_rank(folder: Path) -> None:
    blind = ["engine.zero_stage=3", "task={type: tests.whole_runs.parts:BlindOnRankOne}", "evaluation.before=true"]
    train(folder / "blind", "steps=2", *blind)


def generated(folder: Path) -> None:
    """What this rank samples under ZeRO-3 with all weights and in step with the other, how often layers were gathered
    meanwhile, and what it learns from it."""
    found = {}
    for name, stage, gather in (("whole", 3, "true"), ("in step", 3, "false"), ("alone", 2, "true")):
        generator = f"rollout.generator={{type: transformers, gather: {gather}}}"
        trainer = make(folder / f"generated {name}", f"engine.zero_stage={stage}", generator, *GRPO, "steps=1")
        usual, fetched = PartitionedParameterCoordinator.fetch_sub_module, []

        def fetch(*arguments, usual=usual, fetched=fetched, **options):
            fetched.append(True)
            return usual(*arguments, **options)

        PartitionedParameterCoordinator.fetch_sub_module = fetch
        batch = trainer.collector.rounds.make(0, 0)
        PartitionedParameterCoordinator.fetch_sub_module = usual
        told = [tokens.response.tolist() for tokens in batch.inputs]
        trainer.collector = Collector(trainer.config, trainer.policy, trainer.task, trainer.engine, None)
        trainer.train()
        release(trainer)
        found[name] = {"fetched": len(fetched), "responses": told}
    (folder / f"generated-{trainer.engine.rank}.json").write_text(json.dumps(found))


def fused_head(folder: Path) -> None:
    """Loss and gradient of one batch under ZeRO 0, under ZeRO-3 through the output layer, and there with the fused
    head; with an output matrix that is the words' own, and with another. Rank 1 has a micro-batch without decisions."""
    found, usual = {}, Engine._deepspeed_config

    def split(self: Engine, *arguments: object) -> dict:
        """However small a parameter is, it does not stay whole."""
        config = usual(self, *arguments)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    Engine._deepspeed_config = split
    kernels.use("cpu")
    terms = ["algorithm.terms=[{type: entropy, coefficient: 0.1}]", "engine.logp_chunk=4"]
    for build in ("build_model", "build_untied"):
        for name, stage in (("plain", 0), ("layer", 3), ("fused", 3)):
            options = [f"model.build=tests.whole_runs.parts:{build}", f"engine.zero_stage={stage}", *terms]
            trainer = make(folder / f"{build} {name}", *options)
            batch = trainer.policy.rollout([trainer.task.train[i] for i in range(4)], 4, list(range(16)))
            drawn = torch.randn(16, generator=torch.Generator().manual_seed(0))
            batch.advantages = drawn[:, None].expand(batch.mask.shape)
            batch.mask[12:] = False
            for row in range(12, 16):
                silent = torch.zeros_like(batch.inputs[row].response, dtype=torch.bool)
                batch.inputs[row] = replace(batch.inputs[row], decided=silent)
            if name == "layer":
                trainer.policy.module.fused = None
            rows = torch.arange(16).view(2, 2, 4)[trainer.engine.rank]
            found[f"{build} {name}"] = observed(trainer, [batch.select(part) for part in rows])
            release(trainer)
    Engine._deepspeed_config = usual
    (folder / f"fused-{trainer.engine.rank}.json").write_text(json.dumps({n: seen for n, (_, seen) in found.items()}))
    if trainer.engine.rank == 0:
        torch.save({name: gradients for name, (gradients, _) in found.items()}, folder / "fused.pt")


def observed(trainer: Trainer, parts: list) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """The loss and gradient of one step, and what was seen of it: rows of the logits that were made at once, and for
    which modules the output matrix was gathered; whether it is whole between forward and backward passes."""
    module, made, fetch = trainer.policy.module, ops._chunks, PartitionedParameterCoordinator.fetch_sub_module
    layer = module.model.get_output_embeddings()
    seen: dict[str, list[int]] = {"rows": [], "through the layer": [], "passes": [], "whole": []}

    def chunks(*arguments):
        for part, logits in made(*arguments):
            seen["rows"].append(len(logits))
            yield part, logits

    def fetched(coordinator, visited, *arguments, **options):
        if visited is layer or visited is module.fused:
            seen["passes"].append(1)
        return fetch(coordinator, visited, *arguments, **options)

    def backward(loss):
        seen["whole"].append(layer.weight.numel())
        type(trainer.engine).backward(trainer.engine, loss)

    hook = layer.register_forward_hook(lambda _, arguments, out: seen["through the layer"].append(len(out)))
    ops._chunks, PartitionedParameterCoordinator.fetch_sub_module = chunks, fetched
    trainer.engine.backward = backward
    found = gradient(trainer, parts)
    ops._chunks, PartitionedParameterCoordinator.fetch_sub_module = made, fetch
    hook.remove()
    return found, seen


def one_bad_loss(folder: Path, kinds: list[tuple[int, str]]) -> None:
    """The last rank's loss is NaN or infinite in the second of three steps; by ZeRO stage and type of the weights."""
    for stage, dtype in kinds:
        name = f"{stage}-{dtype}"
        options = [f"engine.zero_stage={stage}", f"model.dtype={dtype}", "steps=3", "optim.lr=1e-2"]
        trainer = make(folder / f"bad-{name}", *options)
        engine, usual = trainer.engine, trainer.losses
        seen: list[dict] = [{k: v.clone() for k, v in engine.state().items()}]
        bad = math.inf if stage % 2 else math.nan

        def losses(micro, totals, trainer=trainer, engine=engine, usual=usual, bad=bad):
            parts, stats = usual(micro, totals)
            broken = trainer.step == 1 and engine.rank == engine.world - 1
            return ({name: part + bad for name, part in parts.items()} if broken else parts), stats

        def update(minibatch, metrics, trainer=trainer, engine=engine, seen=seen):
            Trainer.update(trainer, minibatch, metrics)
            seen.append({k: v.clone() for k, v in engine.state().items()})

        trainer.losses, trainer.update = losses, update
        trainer.train()
        same = [all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(seen, seen[1:], strict=False)]
        release(trainer)
        if engine.rank == 0:
            found = {"same": same, "updates": engine.updates, "bad_steps": trainer.bad_steps}
            (folder / f"bad-{name}.json").write_text(json.dumps(found))


def one_rank(folder: Path) -> None:
    splits(folder)
    trained(folder, "one", [0])


def two_ranks(folder: Path) -> None:
    splits(folder)
    trained(folder, "two", [3])
    generated(folder)
    one_bad_loss(folder, BAD)
    no_image_on_a_rank(folder)


def further_stages(folder: Path) -> None:
    trained(folder, "two", [0, 1, 2])
    one_bad_loss(folder, FURTHER_BAD)


def kernels_and_reference(folder: Path) -> None:
    for backend in ("torch", "cpu"):
        train(folder / backend, "steps=2", "algorithm.minibatches=2", "optim.lr=1e-2", f"kernels.backend={backend}")


def images(folder: Path, name: str) -> None:
    """A run of the image recipe, and the images of its first round as this rank drew them."""
    trainer = make(folder / name, base=IMAGES)
    batch = trainer.collector.rounds.make(0, 0)
    torch.save(
        {"group": batch.group, "images": torch.stack([s.image for s in batch.samples])},
        folder / f"{name}-{trainer.engine.rank}.pt",
    )
    trainer.collector = Collector(
        trainer.config, trainer.policy, trainer.task, trainer.engine, None
    )  # from the beginning
    trainer.train()
    release(trainer)


def robots(folder: Path, method: str) -> None:
    """A run of the robot recipe, with groups or with a critic."""
    train(folder, *METHODS[method], base=ROBOTS)


def head(folder: Path, *options: str) -> dict[str, list]:
    """A robot policy trains, two steps of two updates. Returns the largest gaps of the ratio from 1 in the first
    updates, those in the second ones, and the parts of the policy of which nothing has learned."""
    two = ["steps=2", "algorithm.epochs=2", "task.rewards=[{name: random}]"]
    trainer = make(folder, *two, *options, base=ROBOTS)
    gaps = ratio_gaps(trainer)
    before = {n: p.detach().clone() for n, p in trainer.policy.module.named_parameters()}
    trainer.train()
    release(trainer)
    after = dict(trainer.policy.module.named_parameters())
    learned = {part(n) for n in after if not torch.equal(before[n], after[n])}
    first, second = ([gaps[step, update] for step in (0, 1)] for update in (0, 1))
    return {"first": first, "second": second, "still": sorted({part(n) for n in after} - learned)}


def part(name: str) -> str:
    """That a parameter of a robot policy belongs to: backbone or critic, or a part of the head."""
    return ".".join(name.split(".")[: 2 if name.startswith("head.") else 1])


def heads(folder: Path, options: dict[str, list[str]]) -> None:
    """What `head` finds on this rank for the options of each name."""
    found = {name: head(folder / name, *own) for name, own in options.items()}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def averages(folder: Path) -> None:
    """Averages of the weights under ZeRO-3, against those made by hand of the weights of a run without: what a forward
    pass computes with inside `applied`, and after it."""
    stage = ["engine.zero_stage=3", *GRPO]
    plain = make(folder / "plain", *stage)
    whole = [plain.engine.state()]

    def remember(minibatch: list, metrics: Metrics) -> None:
        Trainer.update(plain, minibatch, metrics)
        whole.append(plain.engine.state())

    plain.update = remember
    plain.train()
    release(plain)
    trainer, found = make(folder / "averages", *stage), []
    shadow = EMA(trainer.policy.module, lambda updates: 0.5)

    def compare(minibatch: list, metrics: Metrics) -> None:
        """Nothing here may gather weights before `applied` does: DeepSpeed would drop the copies that it kept."""
        Trainer.update(trainer, minibatch, metrics)
        shadow.update()
        kept = sum(p.ds_status is ZeroParamStatus.AVAILABLE for p in trainer.policy.module.parameters())
        with shadow.applied():
            inside = used(trainer) if trainer.step % 2 else {}
        after = used(trainer)
        if trainer.engine.rank > 0:
            return
        history = whole[: trainer.step + 2]
        average = history[0]
        for weights in history[1:]:
            average = {name: 0.5 * average[name] + 0.5 * weights[name] for name in average}
        found.append(
            {
                "kept": kept,
                "moved": distance(average, history[-1]),
                "inside": unlike(inside, average),
                "after": unlike(after, history[-1]),
            }
        )

    trainer.update = compare
    trainer.train()
    release(trainer)
    if trainer.engine.rank == 0:
        (folder / "averages.json").write_text(json.dumps(found))


def unlike(some: dict[str, torch.Tensor], all_: dict[str, torch.Tensor]) -> float:
    """The largest difference of an element; tied weights have one name in `some`."""
    return max((float((value - all_[name]).abs().max()) for name, value in some.items()), default=0.0)


def used(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights that a forward pass computes with, as its modules find them."""
    found: dict[str, torch.Tensor] = {}
    names = {p: name for name, p in trainer.policy.module.named_parameters()}

    def look(module: torch.nn.Module, arguments: tuple) -> None:
        found.update({names[p]: p.detach().clone() for p in module.parameters(recurse=False) if p.numel() > 0})

    hooks = [module.register_forward_pre_hook(look) for module in trainer.policy.module.modules()]
    with torch.no_grad():
        trainer.policy.respond([trainer.task.evaluation[0]], [0])
    for hook in hooks:
        hook.remove()
    return found
