"""The protocol of an evaluation in a simulator, in the words that papers use, so that others can repeat it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.protocols.job import JobConfig
from mmrl.protocols.parts import Task
from mmrl.report.run import versions, wilson
from mmrl.rollouts import Sample
from mmrl.settings import plain
from mmrl.sims.registry import PACKAGES, resolved

LINES = "evaluations.jsonl"
PLACEMENT = ("workers", "ray", "turns", "deadline_s")  # of a task: where it plays, which changes no result


def protocol(config: JobConfig, task: Task, chunk: int) -> dict[str, Any]:
    """Everything that a success rate depends on but the weights. task: a `mmrl.protocols.parts.SimulatedTask` with
    settings of `mmrl.tasks.manipulation`."""
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
        "task": {name: value for name, value in settings.items() if name not in PLACEMENT},
        "versions": versions() | packages(settings["simulator"]),
    }


def packages(simulator: str) -> dict[str, str]:
    """Versions of what a shipped simulator is made of."""
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    return {name: installed[name] for name in PACKAGES.get(simulator, ()) if name in installed}


def digest(facts: dict[str, Any], model: str) -> str:
    """A digest that tells evaluations apart: of the protocol `facts`, and of the size and age of the files of
    `model`."""
    folder = Path(model)
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin")) if folder.is_dir() else []
    weights = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps([facts, model, weights], sort_keys=True).encode()).hexdigest()[:16]


def described(facts: dict[str, Any], temperature: float) -> list[str]:
    """Lines for people. temperature: of the decoding that the success rates behind them are of."""
    action, options = facts["action"], facts["options"]
    shown = ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    tasks = facts["tasks"]
    named = ", ".join(tasks[:4]) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")
    units = action["statistics_key"] or ("of its own file" if action["statistics"] else "none")
    pinned = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        f"simulator   {facts['simulator']}: {shown or 'no options'}",
        f"tasks       {len(tasks)}: {named}; instructions {facts['instructions']}",
        f"episodes    {facts['episodes']}, start states {facts['starts'][0]} to {facts['starts'][1]} of each task, "
        f"{facts['split']}; seed {facts['seed']}",
        f"policy      chunk {facts['chunk']}, temperature {temperature:g}, crop {action['center_crop']:g}, statistics "
        f"{units}, state {'read' if action['proprioception'] else 'not read'}",
        f"versions    {pinned}",
    ]


def by_task(task: Task, samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Success at any time of each task, and of all where there are several, with its Wilson interval; success when the
    episode ended, and length. Episodes that the simulator lost are left out."""
    marks = task.accuracy(samples).tolist()
    episodes: dict[str, list[Any]] = {}
    for sample, mark in zip(samples, marks, strict=True):
        if mark == mark:  # not lost
            episodes.setdefault(sample.prompt.metadata["task"], []).append(sample.episode)
    if len(episodes) > 1:
        episodes["all"] = [episode for played in episodes.values() for episode in played]
    return {name: _summary(played) for name, played in episodes.items()}


def _summary(played: Sequence[Any]) -> dict[str, float]:
    """Returns success rate with its Wilson interval at 95 %, success at the end and length of episodes in actions,
    averaged."""
    n, solved = len(played), sum(e.success for e in played)
    low, high = wilson(solved, n)
    return {
        "success": solved / n,
        "low": low,
        "high": high,
        "success_at_end": sum(e.success_at_end for e in played) / n,
        "length": sum(e.length for e in played) / n,
        "episodes": n,
    }


def success_line(name: str, decoding: str, rates: dict[str, float]) -> str:
    return (
        f"{name + ', ' + decoding:>28}  {rates['success']:.4f}  ({rates['low']:.3f} .. {rates['high']:.3f} at 95 %, "
        f"{rates['episodes']} episodes; at their end {rates['success_at_end']:.4f}, {rates['length']:.1f} actions long)"
    )


def add_line(file: Path, command: Sequence[str], facts: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    """One line of JSON for a table, which `scripts/bench/evaluations.py` prints and runs again. results: by decoding,
    by task."""
    line = {"command": list(command), "protocol": facts, "found": results}
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
