"""The protocol of an evaluation in a simulator: the settings and versions that are needed to repeat it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.protocols.job import JobConfig
from mmrl.protocols.parts import Task
from mmrl.report.intervals import wilson
from mmrl.report.run import versions
from mmrl.rollouts import Sample
from mmrl.settings import plain
from mmrl.sims.registry import PACKAGES, resolved

RESULTS_FILE = "evaluations.jsonl"
# keys of a task about where episodes run, which do not change results
EXECUTION_KEYS = ("workers", "ray", "turns", "deadline_s")


def protocol(config: JobConfig, task: Task, chunk: int) -> dict[str, Any]:
    """Returns everything that a success rate depends on, except for the weights.

    task: a `mmrl.protocols.parts.SimulatedTask` with settings of `mmrl.tasks.manipulation`. chunk: actions that are
    executed before the next observation.
    """
    settings = plain(config.task)
    episodes = min(config.evaluation.prompts, len(task.evaluation))
    starts = [task.evaluation[i].metadata["seed"] for i in range(episodes)]
    return {
        "simulator": settings["simulator"],
        "options": resolved(settings["simulator"], settings["options"]),
        "tasks": list(settings["tasks"]),
        "episodes": episodes,
        "starts": [min(starts), max(starts)],
        "split": "held out: no start of training is among them",
        "instructions": settings["instructions"],
        "seed": config.seed,
        "chunk": chunk,
        "action": plain(config.section("action")),
        "evaluation": plain(config.evaluation),
        "task": {name: value for name, value in settings.items() if name not in EXECUTION_KEYS},
        "versions": versions() | simulator_packages(settings["simulator"]),
    }


def simulator_packages(simulator: str) -> dict[str, str]:
    """Returns the versions of the packages that a shipped simulator uses."""
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    return {name: installed[name] for name in PACKAGES.get(simulator, ()) if name in installed}


def digest(protocol_fields: dict[str, Any], model: str) -> str:
    """Returns a hash of the protocol and of name, size and modification time of the model's weight files. Episodes of
    an evaluation with another hash are not reused."""
    folder = Path(model)
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin")) if folder.is_dir() else []
    weights = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps([protocol_fields, model, weights], sort_keys=True).encode()).hexdigest()[:16]


def protocol_lines(protocol_fields: dict[str, Any], temperature: float) -> list[str]:
    """Returns printed lines that describe a protocol. temperature: sampling temperature; 0: greedy decoding."""
    action, options = protocol_fields["action"], protocol_fields["options"]
    option_texts = ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    tasks = protocol_fields["tasks"]
    task_names = ", ".join(tasks[:4]) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")
    statistics = action["statistics_key"] or ("of its own file" if action["statistics"] else "none")
    version_texts = ", ".join(f"{name} {version}" for name, version in protocol_fields["versions"].items())
    return [
        f"simulator   {protocol_fields['simulator']}: {option_texts or 'no options'}",
        f"tasks       {len(tasks)}: {task_names}; instructions {protocol_fields['instructions']}",
        f"episodes    {protocol_fields['episodes']}, start states {protocol_fields['starts'][0]} to "
        f"{protocol_fields['starts'][1]} of each task, {protocol_fields['split']}; seed {protocol_fields['seed']}",
        f"policy      chunk {protocol_fields['chunk']}, temperature {temperature:g}, crop {action['center_crop']:g}, "
        f"statistics {statistics}, state {'read' if action['proprioception'] else 'not read'}",
        f"versions    {version_texts}",
    ]


def rates_by_task(task: Task, samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Returns the results of each task by its name, see `_summary`; with several tasks, also the results of all
    together under "all".

    Episodes that the simulator lost, whose accuracy is NaN, are left out.
    """
    accuracies = task.accuracy(samples).tolist()
    episodes: dict[str, list[Any]] = {}
    for sample, accuracy in zip(samples, accuracies, strict=True):
        if accuracy == accuracy:  # not NaN
            episodes.setdefault(sample.prompt.metadata["task"], []).append(sample.episode)
    if len(episodes) > 1:
        episodes["all"] = [episode for episodes_of_task in episodes.values() for episode in episodes_of_task]
    return {name: _summary(episodes_of_task) for name, episodes_of_task in episodes.items()}


def _summary(episodes_of_task: Sequence[Any]) -> dict[str, float]:
    """Returns the rate of episodes with success at any time and its 95 % Wilson interval (low, high), the rate of
    success at the end, the mean length in actions, and the number of episodes."""
    n, num_successes = len(episodes_of_task), sum(e.success for e in episodes_of_task)
    low, high = wilson(num_successes, n)
    return {
        "success": num_successes / n,
        "low": low,
        "high": high,
        "success_at_end": sum(e.success_at_end for e in episodes_of_task) / n,
        "length": sum(e.length for e in episodes_of_task) / n,
        "episodes": n,
    }


def success_line(name: str, decoding: str, rates: dict[str, float]) -> str:
    """Returns the printed line of a task's results. decoding: such as greedy; rates: see `_summary`."""
    return (
        f"{name + ', ' + decoding:>28}  {rates['success']:.4f}  ({rates['low']:.3f} .. {rates['high']:.3f} at 95 %, "
        f"{rates['episodes']} episodes; at their end {rates['success_at_end']:.4f}, {rates['length']:.1f} actions long)"
    )


def add_line(file: Path, command: Sequence[str], protocol_fields: dict[str, Any], **results: object) -> None:
    """Appends an evaluation as one line of JSON, which `scripts/bench/evaluations.py` prints as a table and repeats.

    command: the command that ran the evaluation. results: `metrics` by name, or of robots `found`: results by
    decoding, then by task.
    """
    line = {"command": list(command), "protocol": protocol_fields, **results}
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
