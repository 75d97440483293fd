"""Makes tables of evaluations, and repeats them.

    .venv/bin/python scripts/bench/evaluations.py RUN/evaluations.jsonl [...] [--again]

Each `mmrl eval` adds a line to evaluations.jsonl in the run directory. This prints all lines as Markdown tables. Of
robots: one row for each way to choose actions, with the success rate over all tasks and its 95 % Wilson interval. Of
other policies: one row for each metric, with its standard error where the evaluation has one. --again runs the command
of every line again and says which results are equal; then it exits with 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROBOTS = "| model | simulator | tasks | episodes | starts | chunk | decoding | success (95 %) |"
METRICS = "| model | overrides | seed | prompts | metric | value |"
BESIDE_ACCURACY = ("evaluation/standard_error", "evaluation/n")  # metrics that are shown with the accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--again", action="store_true", help="repeat the evaluation of each line and compare")
    options = parser.parse_args()
    lines = [json.loads(line) for file in options.files for line in file.read_text().splitlines()]
    unequal = 0
    for head, results in ((ROBOTS, "found"), (METRICS, "metrics")):
        chosen = [line for line in lines if results in line]
        if chosen:
            print(f"{head}{' again |' if options.again else ''}\n|{' --- |' * (head.count('|') - 1 + options.again)}")
        for line in chosen:
            repeated = again(line)[results] if options.again else None
            for name, cells in (robot_rows if results == "found" else metric_rows)(line):
                equal = repeated is None or repeated[name] == line[results][name]
                unequal += not equal
                verdict = "" if repeated is None else f" {'equal' if equal else 'OTHER'} |"
                print("| " + " | ".join(map(str, cells)) + " |" + verdict)
    sys.exit(unequal > 0)


def robot_rows(line: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the decoding and the cells of each row of an evaluation in a simulator."""
    protocol = line["protocol"]
    names = protocol["tasks"]
    tasks = ", ".join(names) if len(names) < 4 else f"{len(names)} of {names[0]} ..."
    starts = " to ".join(map(str, protocol["starts"]))
    for decoding, rates in line["found"].items():
        over = rates["all"] if "all" in rates else next(iter(rates.values()))
        success = f"{over['success']:.3f} ({over['low']:.3f} .. {over['high']:.3f})"
        model, simulator, chunk = line["command"][2], protocol["simulator"], protocol["chunk"]
        yield decoding, [model, simulator, tasks, over["episodes"], starts, chunk, decoding, success]


def metric_rows(line: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the name of each metric of an evaluation on prompts, and the cells of its row."""
    metrics = line["metrics"]
    model, overrides = line["command"][2], " ".join(line["command"][3:])
    for name, value in metrics.items():
        if name not in BESIDE_ACCURACY:
            error = f" ± {metrics['evaluation/standard_error']:.4f}" if name == "evaluation/accuracy" else ""
            cells = [model, overrides, line["protocol"]["seed"], round(metrics["evaluation/n"])]
            yield name, [*cells, name.removeprefix("evaluation/"), f"{value:.4f}{error}"]


def again(line: dict[str, Any]) -> dict[str, Any]:
    """Runs the command of a line again and returns the line that it adds."""
    command = line["command"]
    folder = Path(command[2]) if Path(command[2]).is_dir() else Path()
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=sys.stderr)
    return json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])


if __name__ == "__main__":
    main()
