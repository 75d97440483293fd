"""All cases: 60 planted misconfigurations, and sound inputs of the same shapes.

`python -m tests.checks.misconfigurations.cases NAME FOLDER` writes one, and prints the command that tries it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.checks.misconfigurations import generation, questions, robots
from tests.checks.misconfigurations.controls import CONTROLS
from tests.checks.misconfigurations.parts import Case

PLANTED: tuple[Case, ...] = (*questions.CASES, *generation.CASES, *robots.CASES)
EVERY: tuple[Case, ...] = (*PLANTED, *CONTROLS)


def main(name: str, folder: Path) -> None:
    found = {case.name: case for case in EVERY}
    if name not in found:
        raise SystemExit(f"no case {name}; there are {', '.join(found)}")
    folder.mkdir(parents=True, exist_ok=True)
    made = found[name].write(folder.resolve())
    print(f"cd {folder} && mmrl train {' '.join((made.config.name, *made.overrides))} --dry-run")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
