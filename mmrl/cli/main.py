"""The command line: `mmrl COMMAND`; `parser` names all commands."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.runtime.lazy_imports import defer_imports
from mmrl.runtime.logging import quieten_environment

quieten_environment()  # before anything heavy is imported
defer_imports()

if TYPE_CHECKING:
    from mmrl.config import Config
    from mmrl.job import Job

KINDS_OF_NEW = ["task", "reward", "simulator", "environment", "algorithm", "term", "shaper", "mask", "sampler"]


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
        log.addHandler(Notices())


class Notices(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from mmrl.runtime.progress import display

        display.line(self.format(record))


Commands = argparse._SubParsersAction  # of parsers


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="mmrl", description="Post-train multimodal models with reinforcement learning.")
    # torchrun and the deepspeed launcher both end up here; the latter adds --local_rank
    root.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands: Commands = root.add_subparsers(required=True, metavar="COMMAND")
    _add_training(commands)
    _add_looking(commands)
    _add_making(commands)
    return root


def _add_training(commands: Commands) -> None:
    """Commands that load a model."""
    for name, words, run in (
        ("train", "train a model from a configuration", run_train),
        (
            "control",
            "the same run with rewards that know nothing, beside which the recipe's own gain counts",
            run_control,
        ),
    ):
        train = commands.add_parser(name, help=words)
        train.add_argument("--print-config", action="store_true", help="print the complete configuration and stop")
        words = "print the batch arithmetic, run one step, keep nothing"
        train.add_argument("--dry-run", action="store_true", help=words)
        words = (
            "with --dry-run: GPUs that the job is meant for, as GiB or names (80,48,rtx4090); nothing is loaded or run"
        )
        train.add_argument("--gpu", metavar="GPU,...", help=words)
        train.add_argument("--ranks", type=at_least_one, help="with --gpu: how many of them; default: 1")
        train.add_argument("config", help="a YAML file, or the name of a recipe (mmrl recipes)")
        train.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, optim.lr=1e-5")
        train.set_defaults(run=run)
    evaluation = commands.add_parser("eval", help="held-out accuracy of a run or a model, as a line and a JSON file")
    evaluation.add_argument("model", help="a run directory, or a model's folder or hub name")
    evaluation.set_defaults(run=run_eval)
    sample = commands.add_parser("sample", help="write an HTML table of prompts, responses and images")
    sample.add_argument("model", help="a run directory, or a model's folder or hub name")
    sample.add_argument("--count", type=at_least_one, default=16, help="held-out prompts; default: 16")
    sample.set_defaults(run=run_sample)
    for command in (evaluation, sample):
        words = "a YAML file, where the run's own configuration is not meant, and dotted overrides"
        command.add_argument("overrides", nargs="*", metavar="CONFIG key=value", help=words)
    embed = commands.add_parser("embed", help="what a pipeline's encoders say of a job's prompts, for model.embeddings")
    embed.add_argument("config", help="a YAML file")
    embed.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, as of mmrl train")
    embed.add_argument("--out", type=Path, required=True, help="the folder that they are written to")
    embed.set_defaults(run=run_embed)


def _add_looking(commands: Commands) -> None:
    """Commands that tell of runs, recipes and methods."""
    report = commands.add_parser("report", help="one HTML file about a run, or several: curves, health, images")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, whatever became of the run")
    report.add_argument("--output", type=Path, help="default: RUN/report.html; of several runs report.html here")
    report.set_defaults(run=run_report)
    watch = commands.add_parser("watch", help="a run's numbers live in the terminal, until it has ended")
    watch.add_argument("run_directory", metavar="RUN", type=Path, help="a run directory")
    watch.add_argument("--once", action="store_true", help="show them once, as where there is no terminal")
    watch.set_defaults(run=run_watch)
    recipes = commands.add_parser("recipes", help="the recipes that come with the package, by kind")
    recipes.add_argument("name", nargs="?", help="print this recipe")
    recipes.set_defaults(run=run_recipes)
    config = commands.add_parser("config", help="what a key of the configuration means; without a key, all of them")
    config.add_argument("key", nargs="?", help="such as rollout.temperature, or a section")
    config.set_defaults(run=run_config)
    methods = commands.add_parser(
        "methods", help="algorithms, loss terms, samplers and others; with a name, all about it"
    )
    methods.add_argument("name", nargs="?")
    methods.set_defaults(run=run_methods)


def _add_making(commands: Commands) -> None:
    """Commands that write files of one's own, and the one that checks the machine."""
    new = commands.add_parser("new", help="write something of your own that trains at once, with its recipe and test")
    new.add_argument("kind", choices=KINDS_OF_NEW)
    new.add_argument("name", help="of the class, such as MyAlgorithm")
    new.add_argument("--folder", type=Path, default=Path(), help="where its files go; default: here")
    new.set_defaults(run=run_new)
    check = commands.add_parser("check", help="what data, template, rewards, model and simulator do together")
    check.add_argument("config", help="a YAML file, or the name of a recipe (mmrl recipes)")
    check.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, optim.lr=1e-5")
    check.add_argument("--weights", action="store_true", default=None, help="read the model's weights, however large")
    check.add_argument("--html", type=Path, help="write a page too, with images, prompts and marks")
    check.set_defaults(run=run_check)
    conversion = commands.add_parser(
        "convert",
        help="a recipe of SimpleVLA-RL or cosmos-rl, or an earlier YAML of ours, as a configuration of today; "
        "OpenVLA-OFT's pickles as safetensors",
    )
    words = (
        "a script with SimpleVLA-RL's command, cosmos-rl's TOML, our YAML, or the folder of an OpenVLA-OFT checkpoint"
    )
    conversion.add_argument("source", type=Path, help=words)
    conversion.add_argument("--out", type=Path, help="of a recipe: where the YAML goes; default: to the terminal")
    words = "of a checkpoint: actions that its head makes at once; default: as sizes of action and state say"
    conversion.add_argument("--chunk", type=at_least_one, help=words)
    conversion.set_defaults(run=run_convert)
    doctor = commands.add_parser("doctor", help="say what is installed, what is missing, and how to mend it")
    words = (
        "check that everything works here: ranks, kernels, renderers, simulators, vLLM, training; go on where stopped"
    )
    doctor.add_argument("--gpu", action="store_true", help=words)
    doctor.add_argument("--folder", type=Path, default=Path("runs/doctor"), help="with --gpu; default: runs/doctor")
    doctor.add_argument("--only", default="", help="with --gpu: names of checks, with commas; default: all")
    doctor.add_argument("--again", action="store_true", help="with --gpu: also what is known to work")
    doctor.add_argument("--limit", type=at_least_one, default=600, help="with --gpu: seconds a check; default: 600")
    doctor.add_argument("--recipe", help="with --gpu: a configuration of yours too, three steps, memory as estimated")
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="of --recipe, such as model.path=FOLDER")
    doctor.set_defaults(run=run_doctor)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return int(text)


def run_control(options: argparse.Namespace) -> int:
    from mmrl.cli import control
    from mmrl.config import load

    without = control.overrides(load(options.config, options.overrides), options.config)
    options.overrides = [*without, *options.overrides]
    return run_train(options)


def run_check(options: argparse.Namespace) -> int:
    from mmrl.cli.check import JobCheck, lines

    check = JobCheck(options.config, options.overrides, options.weights)
    findings = check.run()
    print("\n".join(lines(findings)))
    if options.html is not None:
        from mmrl.preflight.page import write_page

        write_page(options.html, options.config, findings, check.rows)
    return 1 if findings.refused else 0


def run_recipes(options: argparse.Namespace) -> int:
    from mmrl.cli.recipes import described

    return show(described(options.name))


def run_train(options: argparse.Namespace) -> int:
    from mmrl.config import load, to_yaml

    config = load(options.config, options.overrides)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    if not options.dry_run:
        if options.gpu or options.ranks:
            raise UserError("--gpu and --ranks belong to --dry-run, which says what a job takes of such GPUs")
        return train(config)
    if options.gpu:
        print("\n".join(memory_on(options)))
        return 0
    if options.ranks:
        raise UserError(
            "--ranks belongs to --gpu, such as --gpu 80 --ranks 8; for a step of several ranks use torchrun"
        )
    from mmrl.job import before_warm_start

    tell_memory(options)
    config = before_warm_start(config)
    with tempfile.TemporaryDirectory(prefix="mmrl-dry-run-") as folder:
        return train(one_step(config, folder), dry=True)


def memory_on(options: argparse.Namespace) -> list[str]:
    """What the job takes of the GPUs that are named. Raises UserError where that can not be known."""
    from mmrl.config import load
    from mmrl.doctor.memory_plan import Gpu, told

    def make(more: Sequence[str]) -> Config:
        return load(options.config, [*options.overrides, *more])

    return told(make, options.ranks or 1, [Gpu.of(text) for text in options.gpu.split(",")])


def tell_memory(options: argparse.Namespace) -> None:
    """Of a dry run on this machine, before its step: what the job takes of the GPU that is here, if there is one."""
    import torch

    if not torch.cuda.is_available() or os.environ.get("RANK", "0") != "0":
        return
    options.ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options.gpu = f"{torch.cuda.mem_get_info()[1] / 2**30:.1f}"
    try:
        print("\n".join(memory_on(options)), flush=True)
    except UserError as error:
        print(f"memory is not estimated: {error}", flush=True)


def one_step(config: Any, folder: str) -> Any:
    """The configuration of a dry run: one step, a handful of evaluation prompts, nothing kept."""
    evaluation = config.evaluation.model_copy(update={"before": False, "every": 0, "prompts": 4})
    checkpoint = config.checkpoint.model_copy(update={"every": 0, "resume": False, "best": False})
    update = {"steps": 1, "run_dir": folder, "evaluation": evaluation, "checkpoint": checkpoint}
    return config.model_copy(update=update)


def train(config: Any, *, dry: bool = False) -> int:
    gc.disable()  # until the job stands: next to nothing that is imported and built is garbage
    from mmrl.job import Job, RunEnded

    try:
        with Job(config) as job:
            gc.freeze()  # nor later
            gc.enable()
            if dry and job.ranks.rank == 0:
                print(arithmetic(job.config, job.ranks.world, job.policy.module), flush=True)
            job.train()
            if job.ranks.rank == 0:
                print(last_line(job, dry), flush=True)
            stopped = job.stopped
    except RunEnded as ended:
        if os.environ.get("RANK", "0") == "0":
            print(ended, flush=True)
        return 0
    return 128 + stopped if stopped else 0


def last_line(job: Any, dry: bool) -> str:
    if job.stopped:
        return f"stopped at step {job.step} and saved; the same command goes on with checkpoint.resume=auto"
    return "dry run: one step done, nothing kept" if dry else summary(job.accuracies, Path(job.config.run_dir))


def summary(accuracies: dict[str, float], folder: Path) -> str:
    """What changed between the first evaluation and the last, where there were two."""
    if len(accuracies) < 2:
        return f"run directory {folder}"
    first, last = list(accuracies.values())[0], list(accuracies.values())[-1]
    return f"held-out accuracy before {first:.4f}, after {last:.4f} ({last - first:+.4f})\nrun directory {folder}"


def run_eval(options: argparse.Namespace) -> int:
    from mmrl.job import Job
    from mmrl.report.run import versions
    from mmrl.settings import plain
    from mmrl.tasks.manipulation.settings import ManipulationSettings

    with Job.of(options.model, *given(options)) as job:
        config = job.config
        if isinstance(config.task, ManipulationSettings):
            return eval_episodes(options, job)
        result, _, _ = job.measure()
    told = {"seed": config.seed, "evaluation": plain(config.evaluation), "task": plain(config.task)}
    told["sample"] = plain(config.sample)
    return write_evaluation(options.model, {**result, "protocol": told, "versions": versions()})


def eval_episodes(options: argparse.Namespace, job: Job) -> int:
    """The likeliest actions, then sampled ones, where evaluation.decoding does not leave one out; once for a head that
    has no temperature. What was played before under the same protocol is not played again."""
    from mmrl.evaluation import protocol as protocols
    from mmrl.evaluation.evaluate import Journal
    from mmrl.policies.vla.settings import EpisodeEvaluation

    task, ranks = job.task, job.ranks
    policy: Any = job.policy
    told = protocols.protocol(job.config, task, policy.action.chunk)
    found: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {}
    journals: list[Path] = []
    settings = job.config.evaluation
    asked = settings.decoding if isinstance(settings, EpisodeEvaluation) else "sampled"
    for decoding in ("greedy", "sampled") if asked == "both" else (asked,):
        if decoding == "sampled":
            policy.evaluation_temperature = policy.temperature.value
        mark = protocols.digest({**told, "decoding": decoding}, options.model)
        journal = Journal(beside(options.model, f"evaluation.{decoding}-{ranks.rank}.jsonl"), mark)
        if journal.parts:
            print(f"{journal.episodes} episodes ({decoding}) were played before; going on behind them")
        result, samples, _ = job.measure(told["episodes"], journal)
        journals.append(journal.file)
        if not record:
            print("\n".join(protocols.described(told, policy.evaluation_temperature)))
            record = {**result, "protocol": told, "versions": told["versions"]}
        found[decoding] = protocols.by_task(task, [s for part in ranks.gather(samples) for s in part])
        for name, of_task in found[decoding].items():
            print(protocols.success_line(name, decoding, of_task))
    if ranks.rank == 0:
        command = ["mmrl", "eval", options.model, *options.overrides]
        protocols.add_line(beside(options.model, protocols.LINES), command, told, found)
        write_evaluation(options.model, {**record, **found})
    for file in journals:
        file.unlink()
    return 0


def given(options: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The configuration and the overrides among the words behind RUN: a word without an equals sign is a file, and so
    is one that exists."""
    words = list(options.overrides)
    files = [word for word in words if "=" not in word or Path(word).is_file()]
    if len(files) > 1:
        raise UserError(f"one configuration is enough: {' '.join(files)}")
    return (files[0] if files else None), [word for word in words if word not in files]


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
    from mmrl.job import Job
    from mmrl.report.run import write_samples

    config, overrides = given(options)
    job = Job.of(options.model, config, overrides)
    if "action" in type(job.config).model_fields:
        job = Job.of(options.model, config, [*overrides, "action.film=true"])
    with job:
        _, samples, marks = job.measure(options.count)
    for sample, mark in zip(samples, marks, strict=True):
        drawn = "an image" if sample.image is not None else "a clip"
        told = sample.image is None and sample.frames is None
        made = repr(sample.response) if told else f"{drawn}, accuracy {mark:.3g}"
        gold = "" if sample.prompt.answer is None else f" (answer {sample.prompt.answer!r})"
        print(f"{sample.prompt.text!r} -> {made}{gold}")
    written = write_samples(beside(options.model, "samples.html"), samples, {"accuracy": marks})
    print(f"written to {', '.join(map(str, written))}")
    return 0


def beside(model: str, name: str) -> Path:
    """Where a result goes: into the run's or the model's folder, or here for a model from a hub."""
    return Path(model if Path(model).is_dir() else ".") / name


def run_embed(options: argparse.Namespace) -> int:
    from mmrl.build import build_policy, build_task
    from mmrl.config import load
    from mmrl.job import quieten, warm_started

    config = load(options.config, options.overrides)
    if config.model.type != "diffusion":
        raise UserError(f"mmrl embed is for model.type=diffusion; this job has model.type={config.model.type}")
    quieten()
    from mmrl.policies.diffusion import embeddings  # these are slow to import
    from mmrl.policies.diffusion.small import SmallFamily

    config = warm_started(config)
    config = config.model_copy(update={"model": config.model.model_copy(update={"embeddings": None})})
    task = build_task(config)
    policy: Any = build_policy(config, task)
    if isinstance(policy.family, SmallFamily):
        raise UserError("mmrl embed is for diffusers pipelines; a small network of our own has no encoders")
    count = embeddings.write(policy.family, embeddings.condition_inputs_of(task, policy), options.out)
    print(f"{count} prompts written to {options.out}; train with model.embeddings={options.out}")
    return 0


def run_report(options: argparse.Namespace) -> int:
    from mmrl.report.page import write_report
    from mmrl.report.records import read_run

    runs = [read_run(folder) for folder in options.runs]
    target = options.output or (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    try:
        write_report(runs, target)
    except OSError as error:
        raise UserError(f"--output={target}: {error}") from None
    for run in runs:
        print(run.ending.sentence if len(runs) == 1 else f"{run.name}: {run.ending.sentence}")
    print(f"written to {target}")
    return 0


def run_watch(options: argparse.Namespace) -> int:
    from mmrl.report.watch import watch

    watch(options.run_directory, once=options.once)
    return 0


def run_config(options: argparse.Namespace) -> int:
    from mmrl.cli.reference import describe_keys

    return show(describe_keys(options.key))


def run_methods(options: argparse.Namespace) -> int:
    from mmrl.cli.reference import describe_methods

    return show(describe_methods(options.name))


def show(lines: list[str]) -> int:
    """Prints what somebody may read only the beginning of."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print("\n".join(lines))
    return 0


def run_new(options: argparse.Namespace) -> int:
    from mmrl.cli.new import write

    for path in write(options.kind, options.name, options.folder):
        print(f"written {path}" + (f"; train it with: mmrl train {path}" if path.suffix == ".yaml" else ""))
    return 0


def run_convert(options: argparse.Namespace) -> int:
    if options.source.is_dir():
        return run_unpickling(options)
    from mmrl.cli.convert import convert, convert_own

    if options.chunk is not None:
        raise UserError(f"--chunk is for the folder of a checkpoint, which {options.source} is not")
    if options.source.suffix in (".yaml", ".yml"):
        text, said = convert_own(options.source), "with the present names of modules, kinds and recipes"
    else:
        found = convert(options.source)
        text = found.text(str(options.source))
        said = f"{len(found.without)} keys have no counterpart, see its first lines"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
        print(f"written to {options.out}; {said}")
    return 0


def run_unpickling(options: argparse.Namespace) -> int:
    from mmrl.policies.vla.backbones.checkpoint_conversion import convert

    if options.out is not None:
        raise UserError(f"--out is for recipes; what is made of a checkpoint is written into {options.source}")
    found = convert(options.source, options.chunk)
    for file in found.files:
        print(f"written {file}")
    if found.robot is not None:
        print(f"its chunk is taken to be {found.chunk} actions, as {found.robot}'s; --chunk says another")
    return 0


def run_diagnosis(options: argparse.Namespace) -> int:
    from mmrl.doctor.checks import CHECKS
    from mmrl.doctor.run import RECIPE, Check, diagnose, machine

    names = options.only.split(",") if options.only else list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        raise UserError(f"--only={unknown[0]}: checks are {', '.join(CHECKS)}")
    checks = [Check(name) for name in names]
    if options.recipe:
        checks.append(Check(RECIPE, (options.recipe, *options.overrides)))
    elif options.overrides:
        raise UserError(f"{options.overrides[0]} belongs to --recipe, which is not given")
    found = diagnose(checks, options.folder, machine(), limit=options.limit, again=options.again)
    print(f"written to {options.folder / 'report.md'}")
    return int(any(finding.status == "fails" for finding in found))


def run_doctor(options: argparse.Namespace) -> int:
    if options.gpu:
        return run_diagnosis(options)
    given = {"--only": options.only, "--again": options.again, "--recipe": options.recipe}
    if meant := [*(name for name, value in given.items() if value), *options.overrides]:
        raise UserError(f"{meant[0]} belongs to mmrl doctor --gpu")
    from mmrl.doctor.installed import examine, told

    checks = list(examine())
    print("\n".join(told(checks)))
    return 1 if any(check.needed and check.mend for check in checks) else 0


def arithmetic(config: Any, world: int, module: Any) -> str:
    """The batch in numbers and a memory estimate, for a dry run."""
    from mmrl.engine import memory_estimate

    rollouts, micro = config.rollouts_per_step, config.engine.micro_batch
    mine, tokens = rollouts // world // config.algorithm.minibatches, config.engine.token_limit
    moments = len(config.optim.moments)
    memory = memory_estimate(module, config.engine.zero_stage, world, config.model.dtype, moments)
    return "\n".join(
        [
            f"prompts {config.rollout.prompts} x group size {config.group_size} = {rollouts} rollouts a step",
            f"{rollouts} rollouts = {world} ranks x {config.algorithm.minibatches} minibatches x {mine} rollouts, "
            f"replayed as {-(-mine // micro)} micro-batches of up to {micro}"
            + ("" if tokens is None else f", or more of up to {tokens} tokens"),
            f"{config.algorithm.epochs} epochs x {config.algorithm.minibatches} minibatches = "
            f"{config.algorithm.epochs * config.algorithm.minibatches} optimizer steps a step",
            *memory,
        ]
    )


if __name__ == "__main__":
    main()
