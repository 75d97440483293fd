"""`mmrl eval` and `mmrl sample`: measuring a model and showing its rollouts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError

if TYPE_CHECKING:
    from mmrl.job import Job


def run_eval(options: argparse.Namespace) -> int:
    """Runs `mmrl eval`: evaluates a model on held-out prompts or episodes, and writes the results as JSON."""
    from mmrl.evaluation.protocol import RESULTS_FILE, add_line
    from mmrl.job import Job
    from mmrl.report.run import versions
    from mmrl.settings import plain
    from mmrl.tasks.manipulation.settings import ManipulationSettings

    with Job.from_weights(options.model, *config_and_overrides(options)) as job:
        config = job.config
        if isinstance(config.task, ManipulationSettings):
            return eval_episodes(options, job)
        result, _, _ = job.measure()
        rank = job.ranks.rank
    protocol = {"seed": config.seed, "evaluation": plain(config.evaluation), "task": plain(config.task)}
    protocol["sample"] = plain(config.sample)
    if rank == 0:
        command = ["mmrl", "eval", options.model, *options.overrides]
        add_line(output_path(options.model, RESULTS_FILE), command, protocol, metrics=result)
        write_evaluation(options.model, {**result, "protocol": protocol, "versions": versions()})
    return 0


def eval_episodes(options: argparse.Namespace, job: Job) -> int:
    """Evaluates a robot policy on held-out episodes and writes the results as JSON.

    Episodes are played with greedy decoding, with sampling, or both, as evaluation.decoding says; once for an action
    head without temperature. Episodes that an earlier, stopped evaluation with the same protocol has played are read
    from its journal files, which are removed at the end.
    """
    from mmrl.evaluation import protocol as protocols
    from mmrl.evaluation.evaluate import Journal
    from mmrl.policies.vla.settings import EpisodeEvaluation

    task, ranks = job.task, job.ranks
    policy: Any = job.policy
    protocol = protocols.protocol(job.config, task, policy.action.chunk)
    by_decoding: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {}
    journal_files: list[Path] = []
    settings = job.config.evaluation
    mode = settings.decoding if isinstance(settings, EpisodeEvaluation) else "sampled"
    for decoding in ("greedy", "sampled") if mode == "both" else (mode,):
        if decoding == "sampled":  # until then actions are greedy
            policy.evaluation_temperature = policy.temperature.value
        digest = protocols.digest({**protocol, "decoding": decoding}, options.model)
        journal = Journal(output_path(options.model, f"evaluation.{decoding}-{ranks.rank}.jsonl"), digest)
        if journal.parts:
            print(f"continuing after {journal.episodes} episodes ({decoding}) of an earlier evaluation")
        result, samples, _ = job.measure(protocol["episodes"], journal)
        journal_files.append(journal.file)
        if not record:  # only for the first decoding
            print("\n".join(protocols.protocol_lines(protocol, policy.evaluation_temperature)))
            record = {**result, "protocol": protocol, "versions": protocol["versions"]}
        all_samples = [sample for rank_samples in ranks.gather(samples) for sample in rank_samples]
        by_decoding[decoding] = protocols.rates_by_task(task, all_samples)
        for name, rates in by_decoding[decoding].items():
            print(protocols.success_line(name, decoding, rates))
    if ranks.rank == 0:
        command = ["mmrl", "eval", options.model, *options.overrides]
        protocols.add_line(output_path(options.model, protocols.RESULTS_FILE), command, protocol, found=by_decoding)
        write_evaluation(options.model, {**record, **by_decoding})
    for file in journal_files:
        file.unlink()
    return 0


def run_sample(options: argparse.Namespace) -> int:
    """Runs `mmrl sample`: prints rollouts of held-out prompts, and writes them to samples.html."""
    from mmrl.job import Job
    from mmrl.report.run import write_samples

    config, overrides = config_and_overrides(options)
    job = Job.from_weights(options.model, config, overrides)
    if "action" in type(job.config).model_fields:
        # a robot policy: keep the images of episodes, for their videos; the first job has built nothing yet
        job = Job.from_weights(options.model, config, [*overrides, "action.film=true"])
    with job:
        _, samples, accuracies = job.measure(options.count)
    for sample, accuracy in zip(samples, accuracies, strict=True):
        media = "an image" if sample.image is not None else "a video"
        is_text = sample.image is None and sample.frames is None
        output = repr(sample.response) if is_text else f"{media}, accuracy {accuracy:.3g}"
        answer = "" if sample.prompt.answer is None else f" (answer {sample.prompt.answer!r})"
        print(f"{sample.prompt.text!r} -> {output}{answer}")
    written = write_samples(output_path(options.model, "samples.html"), samples, {"accuracy": accuracies})
    print(f"written to {', '.join(map(str, written))}")
    return 0


def config_and_overrides(options: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Splits the arguments after RUN into the configuration file, if any, and the overrides.

    An argument is a file if it has no equals sign or such a file exists. Raises UserError if there are several files.
    """
    arguments = list(options.overrides)
    files = [argument for argument in arguments if "=" not in argument or Path(argument).is_file()]
    if len(files) > 1:
        raise UserError(f"give one configuration, not {len(files)}: {' '.join(files)}; overrides are KEY=VALUE")
    return (files[0] if files else None), [argument for argument in arguments if argument not in files]


def write_evaluation(model: str, record: dict[str, Any]) -> None:
    """Prints the metrics of an evaluation and writes the whole record as JSON beside the model."""
    from mmrl.report.run import replace

    for name, value in record.items():
        if isinstance(value, float):
            print(f"{name.removeprefix('evaluation/'):>28}  {value:.4f}")
    target = output_path(model, "evaluation.json")
    replace(target, json.dumps({"model": model, **record}, indent=2).encode())
    print(f"written to {target}")


def output_path(model: str, name: str) -> Path:
    """Returns the path of a result file: in the folder `model`, or in the working directory for a model on the hub."""
    return Path(model if Path(model).is_dir() else ".") / name
