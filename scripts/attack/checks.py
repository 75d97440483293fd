"""Runs `mmrl check` on every shipped recipe, and prints exit code, seconds and last line of each.

    python scripts/attack/checks.py [--part] [--only PATTERN] [--seconds S] [--json FILE]

Shipped recipes are correct. So the check has to end within `--seconds`, without a traceback, and report only what
WANTED lists: what is absent on this machine (an optional package, a file that users bring), in one line that names it.
Each check runs in a process and a folder of its own. Exits with 1 if a check had an unexpected result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.attack.table import Table  # noqa: E402

SECONDS = 60.0  # within which a check ends
PART = r"vlm/visual_qa_digits|vla/manipulation_tabletop\.yaml"
WANTED = (
    r"is not installed|pip install|task\.data\.\w+=\S+: no such file or folder|needs a CUDA device|cannot be downloaded"
)
NO_ALARM, ABSENT = "no alarm", "an absent part, named in one line"


@dataclass(frozen=True)
class Checked:
    """One check. code: None where it took longer than allowed."""

    recipe: str
    code: int | None
    seconds: float
    lines: list[str]

    @property
    def outcome(self) -> str:
        """Says in a word what came of it."""
        text = "\n".join(self.lines)
        if self.code is None:
            return "too slow"
        if "Traceback (most recent call last)" in text:
            return "traceback"
        alarms = [line for line in self.lines if re.match(r"(refused|warned|mmrl:)\s", line)]
        if self.code == 0 and not alarms:
            return NO_ALARM
        return ABSENT if alarms and all(re.search(WANTED, line) for line in alarms) else "false alarm"


def checked(recipe: str, folder: Path, seconds: float) -> Checked:
    """Runs `mmrl check` on a recipe in `folder`; what both streams said is kept in order."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "mmrl", "check", str(ROOT / "configs" / recipe)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **streams) as process:  # type: ignore[call-overload]
        try:
            said, _ = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            code = None
    lines = [line for line in said.splitlines() if line.strip()]
    return Checked(recipe, code, round(time.monotonic() - began, 1), lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="store_true", help="check two recipes only")
    parser.add_argument("--only", default="", help="check the recipes whose path matches this regular expression")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of a check")
    parser.add_argument("--json", type=Path, help="file for the whole output, one line for each recipe")
    options = parser.parse_args(arguments)
    recipes = sorted(str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.yaml"))
    pattern = options.only or (PART if options.part else "")
    table = Table("mmrl check on shipped recipes")
    with tempfile.TemporaryDirectory() as folder:
        for recipe in (name for name in recipes if re.search(pattern, name)):
            done = checked(recipe, Path(folder) / recipe.replace("/", "-"), options.seconds)
            last = done.lines[-1] if done.lines else ""
            print(f"{done.seconds:6.1f} s  exit {done.code}  {recipe}  {last}", flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(asdict(done) | {"outcome": done.outcome}) + "\n")
            table.case(recipe.split("/")[-2], recipe, lambda done=done: done.outcome, NO_ALARM, ABSENT)  # type: ignore[misc]
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
