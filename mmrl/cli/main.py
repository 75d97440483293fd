"""The command line: `mmrl COMMAND`; `parser` names all commands."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mmrl.children.processes import end_with_starter
from mmrl.cli.evaluation import config_and_overrides, run_eval, run_sample
from mmrl.cli.training import run_train
from mmrl.errors import UserError, describe_error, printable
from mmrl.runtime.lazy_imports import defer_imports
from mmrl.runtime.logging import quieten_environment

quieten_environment()  # before anything heavy is imported
defer_imports()

SKELETONS = [
    *("task", "reward", "tool", "simulator", "environment", "algorithm", "term", "shaper", "mask", "surrogate"),
    *("baseline", "transform", "view", "transition", "head", "sampler", "source", "measurement"),
]
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # errors of a full or read-only disk


def main(arguments: list[str] | None = None) -> None:
    """Runs a command of mmrl and exits with its code.

    arguments: those after `mmrl`; None: sys.argv. The code is 2 after a UserError or a full disk, each in one line on
    stderr, and 130 after Ctrl-C. If other code calls sys.exit before the command has ended, it is that code, but 1 in
    place of 0.
    """
    end_with_starter()
    root = parser()
    options, unparsed = root.parse_known_args(arguments)
    if unparsed and ("overrides" not in options or any(argument.startswith("-") for argument in unparsed)):
        root.error(f"unrecognized arguments: {' '.join(unparsed)}")
    if unparsed:  # overrides that follow an option: argparse leaves them over
        options.overrides += unparsed
    sys.path.append(os.getcwd())  # for the user's modules; last, so that installed packages come first
    print_log_messages()
    try:
        code = options.run(options)
    except UserError as error:
        print(f"mmrl: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = "" if error.filename is None else f" ({error.filename})"
        print(f"mmrl: {printable(f'{error.strerror}{where}')}: nothing more is written", file=sys.stderr, flush=True)
        sys.exit(2)
    except SystemExit as error:
        reason = f"code outside of mmrl ended the command: {describe_error(error)}"
        print(f"mmrl: {reason}; raise an exception instead", file=sys.stderr, flush=True)
        sys.exit((error.code if isinstance(error.code, int) else 1) % 256 or 1)  # 256 would be success, too
    except KeyboardInterrupt:
        print("mmrl: stopped by Ctrl-C; nothing new to save", file=sys.stderr, flush=True)
        sys.exit(130)
    sys.exit(code)


def print_log_messages() -> None:
    """Prints the log messages of the package, such as which kernels are used, among the lines of a run."""
    log = logging.getLogger("mmrl")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(LogLines())


class LogLines(logging.Handler):
    """A log handler that prints each record as a line above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        from mmrl.runtime.progress import display

        display.line(self.format(record))


Commands = argparse._SubParsersAction


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each sets `run`, the function that takes the parsed options."""
    root = argparse.ArgumentParser(prog="mmrl", description="Post-train multimodal models with reinforcement learning.")
    # torchrun and the deepspeed launcher both end up here; the latter adds --local_rank
    root.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands: Commands = root.add_subparsers(required=True, metavar="COMMAND")
    _add_training(commands)
    _add_inspection(commands)
    _add_writing(commands)
    return root


def _add_training(commands: Commands) -> None:
    """Adds the commands that load a model: train, control, eval, sample, serve and embed."""
    for name, text, run in (
        ("train", "train a model from a configuration", run_train),
        (
            "control",
            "the same run with random rewards, as the control of a recipe's gain",
            run_control,
        ),
    ):
        train = commands.add_parser(name, help=text)
        train.add_argument("--print-config", action="store_true", help="print the complete configuration and stop")
        text = "print the batch arithmetic, run one step, save nothing"
        train.add_argument("--dry-run", action="store_true", help=text)
        text = (
            "with --dry-run: GPUs that the job is meant for, as GiB or names (80,48,rtx4090); nothing is loaded or run"
        )
        train.add_argument("--gpu", metavar="GPU,...", help=text)
        train.add_argument("--ranks", type=at_least_one, help="with --gpu: the number of GPUs; default: 1")
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
    serving = commands.add_parser("serve", help="answer clients of OpenAI (text) or openpi (robots)")
    serving.add_argument("model", help="a run directory, or a model's folder or hub name")
    serving.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any free port")
    serving.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; one other than loopback needs --key-env"
    )
    serving.add_argument("--key-env", metavar="NAME", help="the environment variable with the API key of clients")
    serving.set_defaults(run=run_serve)
    for command in (evaluation, sample, serving):
        text = "a YAML file to use in place of the run's own configuration, and dotted overrides"
        command.add_argument("overrides", nargs="*", metavar="CONFIG key=value", help=text)
    embed = commands.add_parser(
        "embed", help="compute text embeddings of a job's prompts with a pipeline's encoders, for model.embeddings"
    )
    embed.add_argument("config", help="a YAML file")
    embed.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, as for mmrl train")
    embed.add_argument("--out", type=Path, required=True, help="the folder that the embeddings are written to")
    embed.set_defaults(run=run_embed)


def _add_inspection(commands: Commands) -> None:
    """Adds the commands that show runs, recipes and methods: report, watch, push, recipes, config, rewards and
    methods."""
    report = commands.add_parser("report", help="write one HTML file about one or several runs: curves, health, images")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run directory")
    report.add_argument(
        "--output", type=Path, help="default: RUN/report.html; for several runs report.html in the current folder"
    )
    report.set_defaults(run=run_report)
    watch = commands.add_parser("watch", help="show a run's metrics live in the terminal")
    watch.add_argument("run_directory", metavar="RUN", type=Path, help="a run directory")
    watch.add_argument(
        "--once", action="store_true", help="show the current metrics once and stop, as happens without a terminal"
    )
    watch.add_argument("--serve", action="store_true", help="show the report live in a browser, on this machine only")
    watch.add_argument("--port", type=int, default=0, help="with --serve; default: any free port")
    watch.set_defaults(run=run_watch)
    push = commands.add_parser("push", help="upload a run's weights and a model card to the hub, or write a folder")
    push.add_argument("run_directory", metavar="RUN", type=Path, help="a run directory")
    push.add_argument("name", help="the repository's name, such as user/model")
    push.add_argument("--best", action="store_true", help="the best checkpoint in place of the final one")
    push.add_argument("--folder", type=Path, help="write the repository here and upload nothing")
    push.add_argument("--public", action="store_true", help="make a new repository public; default: private")
    push.set_defaults(run=run_push)
    recipes = commands.add_parser("recipes", help="list the recipes that come with the package")
    recipes.add_argument("name", nargs="?", help="print this recipe")
    recipes.set_defaults(run=run_recipes)
    config = commands.add_parser("config", help="describe a key of the configuration, or all")
    config.add_argument("key", nargs="?", help="such as rollout.temperature, or a section")
    config.set_defaults(run=run_config)
    rewards = commands.add_parser("rewards", help="list rewards that need packages or weights, or install one")
    rewards.set_defaults(run=run_rewards)
    actions: Commands = rewards.add_subparsers(metavar="install")
    install = actions.add_parser("install", help="make the environment of a reward, and print the lines of a recipe")
    install.add_argument("name", help="a name that mmrl rewards lists")
    text = "where environments are made; default: $MMRL_REWARDS, else ~/.cache/mmrl/rewards"
    install.add_argument("--folder", type=Path, help=text)
    install.add_argument("--dry-run", action="store_true", help="print the commands, and run none")
    install.set_defaults(run=run_rewards_install)
    methods = commands.add_parser("methods", help="list algorithms, loss terms, samplers and others, or describe one")
    methods.add_argument("name", nargs="?")
    methods.set_defaults(run=run_methods)


def _add_writing(commands: Commands) -> None:
    """Adds the commands that write or check a user's files (new, check, convert), and doctor, which checks the
    machine."""
    new = commands.add_parser(
        "new", help="write a skeleton of your own method, task or simulator, with recipe and test"
    )
    new.add_argument("kind", choices=SKELETONS)
    new.add_argument("name", help="name of the class, such as MyAlgorithm")
    new.add_argument("--folder", type=Path, default=Path(), help="where its files go; default: the current folder")
    new.set_defaults(run=run_new)
    check = commands.add_parser("check", help="test data, template, rewards, model and simulator before training")
    check.add_argument("config", nargs="?", help="a YAML file, or the name of a recipe (mmrl recipes)")
    check.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, optim.lr=1e-5")
    check.add_argument("--model", metavar="PATH", help="check an image-text model alone: does it sample, score, learn?")
    check.add_argument("--random", action="store_true", help="with --model: build it from config.json, random weights")
    check.add_argument("--weights", action="store_true", default=None, help="read the model's weights, however large")
    check.add_argument("--html", type=Path, help="also write a page with images, prompts and their rewards")
    check.set_defaults(run=run_check)
    conversion = commands.add_parser(
        "convert",
        help="convert a configuration of verl, EasyR1, TRL, ms-swift, flow_grpo, RLinf, SimpleVLA-RL, cosmos-rl or an "
        "earlier mmrl; OpenVLA-OFT's pickles to safetensors; LLaDA, MMaDA, Dream and SDAR to Llama, Qwen2 and Qwen3",
    )
    text = "a YAML, JSON, TOML or Python file, a shell script, or the folder of a checkpoint"
    conversion.add_argument("source", type=Path, help=text)
    conversion.add_argument(
        "--out",
        type=Path,
        help="for a configuration: the YAML file, default: the terminal; for a model: a new folder",
    )
    text = "for a checkpoint: actions per call of its head; default: from the sizes of action and state"
    conversion.add_argument("--chunk", type=at_least_one, help=text)
    conversion.set_defaults(run=run_convert)
    doctor = commands.add_parser("doctor", help="list what is installed and missing, and how to install it")
    text = (
        "check that everything works here: ranks, kernels, renderers, simulators, vLLM, training; a second call "
        "continues where the first stopped"
    )
    doctor.add_argument("--gpu", action="store_true", help=text)
    doctor.add_argument("--folder", type=Path, default=Path("runs/doctor"), help="with --gpu; default: runs/doctor")
    doctor.add_argument("--only", default="", help="with --gpu: names of checks, with commas; default: all")
    doctor.add_argument("--again", action="store_true", help="with --gpu: repeat checks that passed before")
    doctor.add_argument("--limit", type=at_least_one, default=600, help="with --gpu: seconds per check; default: 600")
    doctor.add_argument(
        "--recipe", help="with --gpu: also train your configuration for three steps and compare memory to the estimate"
    )
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="for --recipe, such as model.path=FOLDER")
    doctor.set_defaults(run=run_doctor)


def at_least_one(text: str) -> int:
    """Converts an option to an integer. Raises ArgumentTypeError if it is not a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return int(text)


def run_control(options: argparse.Namespace) -> int:
    """Runs `mmrl control`: trains the job with random rewards; the user's overrides come last."""
    from mmrl.cli import control
    from mmrl.config import load

    random_rewards = control.overrides(load(options.config, options.overrides), options.config)
    options.overrides = [*random_rewards, *options.overrides]
    return run_train(options)


def run_model_check(path: str, *, random: bool) -> int:
    """Runs `mmrl check --model`. Returns 1 where a check fails."""
    from mmrl.job import quieten

    quieten()
    from mmrl.preflight.conformance import ModelCheck, table

    check = ModelCheck(path, random)
    print("\n".join(table(check.run())))
    return 1 if check.failed else 0


def run_check(options: argparse.Namespace) -> int:
    """Runs `mmrl check` for a configuration, or for a model alone. Returns 1 if training cannot work."""
    if options.model is not None:
        if options.config is not None:
            raise UserError(f"--model checks a model alone; leave out either {options.config} or --model")
        return run_model_check(options.model, random=options.random)
    if options.config is None:
        raise UserError("mmrl check needs the name of a configuration, or --model PATH")
    if options.random:
        raise UserError(f"--random is for --model PATH, but mmrl check got the configuration {options.config}")
    from mmrl.cli.check import JobCheck, report_lines

    check = JobCheck(options.config, options.overrides, options.weights)
    report = check.run()
    print("\n".join(report_lines(report)))
    if options.html is not None:
        from mmrl.preflight.page import write_page

        write_page(options.html, options.config, report, check.rows)
    return 1 if report.refused else 0


def run_recipes(options: argparse.Namespace) -> int:
    from mmrl.cli.recipes import describe_recipes

    return show(describe_recipes(options.name))


def run_serve(options: argparse.Namespace) -> int:
    """Runs `mmrl serve`: answers clients with the policy of a run or a model until Ctrl-C."""
    from mmrl.cli.serve import read_key, serve_model
    from mmrl.job import Job

    read_key(options)  # before weights are read
    with Job.from_weights(options.model, *config_and_overrides(options)) as job:
        serve_model(options, job)
    return 0


def run_embed(options: argparse.Namespace) -> int:
    """Runs `mmrl embed`: writes text embeddings of all prompts of a diffusion job to a folder, for
    model.embeddings."""
    from mmrl.build import build_policy, build_task
    from mmrl.config import load
    from mmrl.job import quieten, run_warm_start

    config = load(options.config, options.overrides)
    if config.model.type != "diffusion":
        raise UserError(f"mmrl embed is for model.type=diffusion; this job has model.type={config.model.type}")
    quieten()
    from mmrl.policies.diffusion import embeddings  # these are slow to import
    from mmrl.policies.diffusion.small import SmallFamily

    config = run_warm_start(config)
    # without `embeddings`, so that the text encoders are loaded
    config = config.model_copy(update={"model": config.model.model_copy(update={"embeddings": None})})
    task = build_task(config)
    policy: Any = build_policy(config, task)
    if isinstance(policy.family, SmallFamily):
        raise UserError(
            "mmrl embed is for diffusers pipelines, but this job's model is one of mmrl's small networks, which have "
            "no text encoders; train it without model.embeddings"
        )
    count = embeddings.write(policy.family, embeddings.job_inputs(task, policy), options.out)
    print(f"{count} prompts written to {options.out}; train with model.embeddings={options.out}")
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Runs `mmrl report`: writes report.html of one or several runs."""
    from mmrl.report.html.page import write_report
    from mmrl.report.records import read_run

    runs = [read_run(folder) for folder in options.runs]
    target = options.output or (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    try:
        write_report(runs, target)
    except OSError as error:
        raise UserError(f"--output={target}: {error}") from None
    for run in runs:
        print(printable(run.ending.sentence if len(runs) == 1 else f"{run.name}: {run.ending.sentence}"))
    print(f"written to {target}")
    return 0


def run_push(options: argparse.Namespace) -> int:
    """Runs `mmrl push`: writes the repository of a run's model, with its card, to a folder or uploads it to the hub."""
    from tempfile import TemporaryDirectory

    from mmrl.report.model_card import upload, write_repository

    if options.folder is not None:
        written = write_repository(options.run_directory, options.name, options.folder, best=options.best)
        print(f"{len(written)} files written to {options.folder}")
        return 0
    with TemporaryDirectory() as scratch:
        write_repository(options.run_directory, options.name, Path(scratch), best=options.best)
        print(f"uploaded: {upload(Path(scratch), options.name, private=not options.public)}")
    return 0


def run_watch(options: argparse.Namespace) -> int:
    """Runs `mmrl watch`: shows a run's curves in the terminal, or serves its report."""
    if options.serve:
        from mmrl.report.html.serve import serve

        serve(options.run_directory, options.port)
        return 0
    from mmrl.report.watch import watch

    watch(options.run_directory, once=options.once)
    return 0


def run_config(options: argparse.Namespace) -> int:
    from mmrl.cli.keys import describe_keys

    return show(describe_keys(options.key))


def run_methods(options: argparse.Namespace) -> int:
    from mmrl.cli.methods import describe_methods

    return show(describe_methods(options.name))


def run_rewards(options: argparse.Namespace) -> int:
    from mmrl.rewards.models.environments import describe_catalogue

    return show(describe_catalogue())


def run_rewards_install(options: argparse.Namespace) -> int:
    from mmrl.rewards.models.environments import install, plan

    return show((plan if options.dry_run else install)(options.name, options.folder))


def show(lines: list[str]) -> int:
    """Prints lines. Ends quietly when the reader closes the pipe, as `head` does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print("\n".join(lines))
    return 0


def run_new(options: argparse.Namespace) -> int:
    """Runs `mmrl new`: writes the files of a skeleton, and prints their paths."""
    from mmrl.cli.new import write

    for path in write(options.kind, options.name, options.folder):
        print(f"written {path}" + (f"; train it with: mmrl train {path}" if path.suffix == ".yaml" else ""))
    return 0


def run_convert(options: argparse.Namespace) -> int:
    """Runs `mmrl convert` for a configuration of another library or of an earlier mmrl, or the folder of a checkpoint.

    Raises UserError if the source cannot be converted.
    """
    if options.source.is_dir():
        return run_model_conversion(options)
    from mmrl.cli.convert import convert_former, convert_robot_recipe
    from mmrl.cli.external.recipes import convert_external

    if options.chunk is not None:
        raise UserError(f"--chunk is for the folder of a checkpoint, which {options.source} is not; leave it out")
    converted = None if options.source.suffix == ".toml" else convert_external(options.source)
    if converted is None and options.source.suffix in (".yaml", ".yml"):
        text, note = convert_former(options.source), "with the current names of modules, types and recipes"
    else:
        converted = converted or convert_robot_recipe(options.source)
        text = converted.text(str(options.source))
        note = f"{len(converted.unmatched)} keys have no counterpart, see its first lines"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
        print(f"written to {options.out}; {note}")
    return 0


def run_model_conversion(options: argparse.Namespace) -> int:
    """Converts the folder of a masked-diffusion checkpoint into one of transformers, or else an OpenVLA-OFT one."""
    from mmrl.policies.discrete_diffusion.checkpoint_conversion import can_convert, convert

    if not can_convert(options.source):
        return run_unpickling(options)
    out = convert(options.source, options.out or options.source.with_name(f"{options.source.name}-transformers"))
    print(f"written {out}: train it with model.type=discrete_diffusion model.path={out}")
    return 0


def run_unpickling(options: argparse.Namespace) -> int:
    """Converts the pickled action head and projector of an OpenVLA-OFT checkpoint to safetensors in the same folder."""
    from mmrl.policies.vla.backbones.checkpoint_conversion import convert

    if options.out is not None:
        raise UserError(f"--out is for configurations; a checkpoint is converted inside {options.source}; leave it out")
    conversion = convert(options.source, options.chunk)
    for file in conversion.files:
        print(f"written {file}")
    if conversion.robot is not None:
        print(f"assumed a chunk of {conversion.chunk} actions, as for {conversion.robot}; --chunk sets another")
    return 0


def run_diagnosis(options: argparse.Namespace) -> int:
    """Runs `mmrl doctor --gpu`: runs checks, each in a process of its own, and writes report.md. Returns 1 if one
    fails."""
    from mmrl.doctor.checks import CHECKS
    from mmrl.doctor.run import RECIPE, Check, diagnose, machine

    names = options.only.split(",") if options.only else list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        raise UserError(f"--only={unknown[0]} is not a check; choose from {', '.join(CHECKS)}")
    checks = [Check(name) for name in names]
    if options.recipe:
        checks.append(Check(RECIPE, (options.recipe, *options.overrides)))
    elif options.overrides:
        raise UserError(
            f"the override {options.overrides[0]} needs --recipe RECIPE; add that, or leave the override out"
        )
    results = diagnose(checks, options.folder, machine(), limit=options.limit, rerun=options.again)
    print(f"written to {options.folder / 'report.md'}")
    return int(any(result.status == "fails" for result in results))


def run_doctor(options: argparse.Namespace) -> int:
    """Runs `mmrl doctor`: lists the packages, compilers and devices of this machine. Returns 1 if mmrl cannot run
    without something that is missing."""
    if options.gpu:
        return run_diagnosis(options)
    gpu_options = {"--only": options.only, "--again": options.again, "--recipe": options.recipe}
    if unusable := [*(name for name, value in gpu_options.items() if value), *options.overrides]:
        raise UserError(f"{unusable[0]} needs --gpu: mmrl doctor --gpu {unusable[0]}")
    from mmrl.doctor.installed import check_installation, report_lines

    checks = list(check_installation())
    print("\n".join(report_lines(checks)))
    return 1 if any(check.required and check.fix for check in checks) else 0


if __name__ == "__main__":
    main()
