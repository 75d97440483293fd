"""Makes a table of evaluations in simulators, and repeats them.

    .venv/bin/python scripts/bench/evaluations.py RUN/evaluations.jsonl [...] [--again]

Each `mmrl eval` adds a line to evaluations.jsonl in the run directory. This prints all lines as a Markdown table: one
row for each way to choose actions, with the success rate over all tasks and its 95 % Wilson interval. --again runs the
command of every line again and says which success rates are equal; then it exits with 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HEAD = "| model | simulator | tasks | episodes | starts | chunk | decoding | success (95 %) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--again", action="store_true", help="repeat the evaluation of each line and compare")
    options = parser.parse_args()
    lines = [json.loads(line) for file in options.files for line in file.read_text().splitlines()]
    print(f"{HEAD}{' again |' if options.again else ''}\n|{' --- |' * (HEAD.count('|') - 1 + options.again)}")
    wrong = 0
    for line in lines:
        repeated = again(line) if options.again else None
        for decoding, found in line["found"].items():
            same = None if repeated is None else repeated["found"][decoding] == found
            wrong += same is False
            print(row(line, decoding, found) + ("" if same is None else f" {'equal' if same else 'OTHER'} |"))
    sys.exit(wrong > 0)


def row(line: dict[str, Any], decoding: str, found: dict[str, dict[str, float]]) -> str:
    told = line["protocol"]
    over = found["all"] if "all" in found else next(iter(found.values()))
    success = f"{over['success']:.3f} ({over['low']:.3f} .. {over['high']:.3f})"
    tasks = ", ".join(told["tasks"]) if len(told["tasks"]) < 4 else f"{len(told['tasks'])} of {told['tasks'][0]} ..."
    starts = " to ".join(map(str, told["starts"]))
    cells = [line["command"][2], told["simulator"], tasks, over["episodes"], starts, told["chunk"], decoding, success]
    return "| " + " | ".join(map(str, cells)) + " |"


def again(line: dict[str, Any]) -> dict[str, Any]:
    """What the line's command says now: the last line that it adds."""
    command = line["command"]
    folder = Path(command[2]) if Path(command[2]).is_dir() else Path()
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=sys.stderr)
    return json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])


if __name__ == "__main__":
    main()
