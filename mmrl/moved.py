"""What modules and classes of the layout before November 2026 are called now: no old name works, each is told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType

NAME = r"(?<![\w.\-/])mmrl(?:\.\w+)+(?::\w+)?"
NOT_THERE = r"cannot import name '(\w+)' from '(mmrl\.[\w.]+)'"


@cache
def _tables() -> dict[str, dict[str, str]]:
    """Modules by their former names, and classes, as module:Class, by former names in former and present modules."""
    import json  # here, as below: every process that imports mmrl imports this module, and hardly any asks it
    from pathlib import Path

    return json.loads(Path(__file__).with_suffix(".json").read_text())


def now(name: str) -> str | None:
    """Returns what "package.module" or "package.module:Class" is called now; None where the name is no former one."""
    module, colon, member = name.partition(":")
    tables = _tables()
    if colon and name in tables["classes"]:
        return tables["classes"][name]
    return tables["modules"][module] + colon + member if module in tables["modules"] else None


def hint(name: str) -> str:
    """Returns "; it is NAME now" for a former name, else nothing."""
    new = now(name)
    return "" if new is None else f"; it is {new} now"


def hint_of(error: ImportError) -> str:
    """Returns the hint about what an import asked for where the module is there and the name in it is a former one."""
    import re

    asked = re.search(NOT_THERE, str(error))
    return "" if asked is None else hint(f"{asked[2]}:{asked[1]}")


def renewed(text: str) -> str:
    """Returns a text with every former name in it replaced by the present one."""
    import re

    return re.sub(NAME, lambda found: now(found[0]) or found[0], text)


class FormerModules:
    """A finder of `sys.meta_path` that names the present module where an import asks for a former one."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.startswith("mmrl.") and (new := now(name)) is not None:
            raise ModuleNotFoundError(f"{name} is {new} now", name=name)


def tell_former_names() -> None:
    """Has imports of former modules end with a line that names the present one."""
    if not any(isinstance(finder, FormerModules) for finder in sys.meta_path):
        sys.meta_path.append(FormerModules())  # last: it is asked about modules that are not there
