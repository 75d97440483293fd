"""What modules, classes and kinds of before November 2026 are called now: no old name works, each is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

NAME = r"(?<![\w.\-/])mmrl(?:\.\w+)+(?::\w+)?"
NOT_THERE = r"cannot import name '(\w+)' from '(mmrl\.[\w.]+)'"


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """Modules by their former names, classes, as module:Class, by former names in former and present modules,
    keys of sections, and forms of choices, see `present_forms`."""
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


def present_key(name: str) -> str:
    """Returns what a key of a configuration is called now: the name itself where it is no former one."""
    return _tables()["keys"].get(name, name)


def present_forms(title: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what a choice is written as today, where it is of a former kind or has a key that its kind has no more:
    one mapping, or several that together do the same; else none.

    The table `kinds` has them by the title of the choice and the former kind. In them "$key" is what the former mapping
    has there, "$key|default" that or else the default, and {"$key": {value: form}} is chosen by it, "*" by any other.
    What comes out as null is left out. Where it becomes one mapping, keys that none of this names stay as they are.
    """
    import json
    import re

    forms = _tables()["kinds"].get(title, {}).get(str(tree.get("type")), [])
    used = set(re.findall(r"\$(\w+)", json.dumps(forms)))
    if not used & tree.keys() and any(form["type"] == tree["type"] for form in forms):
        return []
    rest = {key: value for key, value in tree.items() if key not in used} if len(forms) == 1 else {}
    return [rest | _filled(form, tree) for form in forms]


def _filled(form: Any, tree: Mapping[str, Any]) -> Any:
    import json

    if isinstance(form, Mapping):
        first = next(iter(form))
        if first.startswith("$"):
            value = json.dumps(tree[first[1:]], default=str) if first[1:] in tree else ""
            return _filled(form[first].get(value, form[first].get("*")), tree)
        filled = {key: _filled(inner, tree) for key, inner in form.items()}
        return {key: inner for key, inner in filled.items() if inner is not None}
    if not isinstance(form, str) or not form.startswith("$"):
        return form
    key, _, default = form[1:].partition("|")
    return tree[key] if tree.get(key) is not None else json.loads(default or "null")


class FormerModules:
    """A finder of `sys.meta_path` that names the present module where an import asks for a former one."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.startswith("mmrl.") and (new := now(name)) is not None:
            raise ModuleNotFoundError(f"{name} is {new} now", name=name)


def tell_former_names() -> None:
    """Has imports of former modules end with a line that names the present one."""
    if not any(isinstance(finder, FormerModules) for finder in sys.meta_path):
        sys.meta_path.append(FormerModules())  # last: it is asked about modules that are not there
