"""`mmrl train`: training, dry runs and estimates of memory."""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.errors import UserError

if TYPE_CHECKING:
    from torch.nn import Module

    from mmrl.config import Config
    from mmrl.job import Job


def run_train(options: argparse.Namespace) -> int:
    """Runs `mmrl train`: prints the configuration, estimates memory, makes a dry run of one step, or trains. Returns
    the exit code."""
    from mmrl.config import load, to_yaml

    config = load(options.config, options.overrides)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    if not options.dry_run:
        if options.gpu or options.ranks:
            raise UserError("--gpu and --ranks need --dry-run, which estimates the job's memory on such GPUs")
        return train(config)
    if options.gpu:
        print("\n".join(memory_report(options)))
        return 0
    if options.ranks:
        raise UserError("--ranks needs --gpu, such as --gpu 80 --ranks 8; to run a step on several ranks use torchrun")
    from mmrl.job import before_warm_start

    print_memory(options)
    config = before_warm_start(config)
    with tempfile.TemporaryDirectory(prefix="mmrl-dry-run-") as folder:
        return train(dry_run_config(config, folder), dry=True)


def memory_report(options: argparse.Namespace) -> list[str]:
    """Returns lines on the memory that the job needs on the GPUs in options.gpu. Raises UserError if it cannot be
    estimated."""
    from mmrl.config import load
    from mmrl.doctor.memory_plan import Gpu, memory_lines

    def load_config(overrides: Sequence[str]) -> Config:
        return load(options.config, [*options.overrides, *overrides])

    return memory_lines(load_config, options.ranks or 1, [Gpu.parse(text) for text in options.gpu.split(",")])


def print_memory(options: argparse.Namespace) -> None:
    """Prints the memory that the job needs on this machine's GPUs, if there are any; only on rank 0."""
    import torch

    if not torch.cuda.is_available() or os.environ.get("RANK", "0") != "0":
        return
    options.ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options.gpu = f"{torch.cuda.mem_get_info()[1] / 2**30:.1f}"
    try:
        print("\n".join(memory_report(options)), flush=True)
    except UserError as error:
        print(f"memory is not estimated: {error}", flush=True)


def dry_run_config(config: Config, folder: str) -> Config:
    """Returns the configuration of a dry run: one step, four evaluation prompts, no checkpoints, run_dir=folder."""
    evaluation = config.evaluation.model_copy(update={"before": False, "every": 0, "prompts": 4})
    checkpoint = config.checkpoint.model_copy(update={"every": 0, "resume": False, "best": False})
    update = {"steps": 1, "run_dir": folder, "evaluation": evaluation, "checkpoint": checkpoint}
    return config.model_copy(update=update)


def train(config: Config, *, dry: bool = False) -> int:
    """Trains the job and prints its last line. dry: it is a dry run, so the batch arithmetic is printed first.

    Returns the exit code: 0, or 128 + the number of the signal that stopped the run.
    """
    gc.disable()  # building a job makes many objects and hardly any garbage
    from mmrl.job import Job, RunEnded, WarmStartStopped

    try:
        with Job(config) as job:
            gc.freeze()  # the job's objects live until the end: no collection needs to scan them
            gc.enable()
            if dry and job.ranks.rank == 0:
                print(batch_arithmetic(job.config, job.ranks.world, job.policy.module), flush=True)
            job.train()
            if job.ranks.rank == 0:
                print(last_line(job, dry), flush=True)
            stopped = job.stopped
    except RunEnded as ended:
        if os.environ.get("RANK", "0") == "0":
            print(ended, flush=True)
        return 0
    except WarmStartStopped as ended:
        print(ended, flush=True)
        return 128 + ended.signum
    return 128 + stopped if stopped else 0


def last_line(job: Job, dry: bool) -> str:
    """Returns the line that a run ends with: how to continue it, or its summary."""
    if job.stopped:
        return f"stopped at step {job.step} and saved; to continue, repeat the command with checkpoint.resume=auto"
    return "dry run: one step done, nothing saved" if dry else summary(job.accuracies, Path(job.config.run_dir))


def summary(accuracies: dict[str, float], folder: Path) -> str:
    """Returns the change of held-out accuracy from the first to the last evaluation, if any, and the run directory."""
    if len(accuracies) < 2:
        return f"run directory {folder}"
    first, last = list(accuracies.values())[0], list(accuracies.values())[-1]
    return f"held-out accuracy before {first:.4f}, after {last:.4f} ({last - first:+.4f})\nrun directory {folder}"


def batch_arithmetic(config: Config, world: int, module: Module) -> str:
    """Returns lines on the sizes of batches and an estimate of memory, for a dry run. world: the number of ranks."""
    from mmrl.engine import memory_estimate

    rollouts, micro = config.rollouts_per_step, config.engine.micro_batch
    per_rank, tokens = rollouts // world // config.algorithm.minibatches, config.engine.token_limit
    moments = len(config.optim.moments)
    memory = memory_estimate(module, config.engine.zero_stage, world, config.model.dtype, moments)
    return "\n".join(
        [
            f"prompts {config.rollout.prompts} x group size {config.group_size} = {rollouts} rollouts a step",
            f"{rollouts} rollouts = {world} ranks x {config.algorithm.minibatches} minibatches x {per_rank} rollouts, "
            f"replayed as {-(-per_rank // micro)} micro-batches of up to {micro}"
            + ("" if tokens is None else f", or more of up to {tokens} tokens"),
            f"{config.algorithm.epochs} epochs x {config.algorithm.minibatches} minibatches = "
            f"{config.algorithm.epochs * config.algorithm.minibatches} optimizer steps a step",
            *memory,
        ]
    )
