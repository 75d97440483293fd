"""Present names of the modules, classes and kinds that were renamed in November 2026, for error messages."""

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
    """Returns the tables of moved.json. modules: present by former name. classes: present "module:Class" by former name
    in the former and in the present module. keys: of sections. kinds: forms of choices, see `present_forms`."""
    import json  # late, as below: every process that imports mmrl imports this module, and hardly any uses it
    from pathlib import Path

    return json.loads(Path(__file__).with_suffix(".json").read_text())


def current_name(name: str) -> str | None:
    """Returns the present name of a former "package.module" or "package.module:Class"; None for other names."""
    module, colon, member = name.partition(":")
    tables = _tables()
    if colon and name in tables["classes"]:
        return tables["classes"][name]
    return tables["modules"][module] + colon + member if module in tables["modules"] else None


def hint(name: str) -> str:
    """Returns "; it is NAME now" for a former name, else nothing."""
    new = current_name(name)
    return "" if new is None else f"; it is {new} now"


def hint_of(error: ImportError) -> str:
    """Returns the hint for an import of a former name from a module that exists."""
    import re

    match = re.search(NOT_THERE, str(error))
    return "" if match is None else hint(f"{match[2]}:{match[1]}")


def update_names(text: str) -> str:
    """Returns a string with every former name in it replaced by the present one."""
    import re

    return re.sub(NAME, lambda match: current_name(match[0]) or match[0], text)


def present_key(name: str) -> str:
    """Returns the present name of a configuration's key: the name itself where it is not a former one."""
    return _tables()["keys"].get(name, name)


def present_forms(title: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the present form of a choice of a former kind, or with a key that its kind no longer has: one mapping, or
    several that together do the same. Empty where the choice is in its present form.

    The table `kinds` holds forms by the title of the choice and the former kind. In a form "$key" stands for the value
    of that key in `tree`, "$key|default" has a default, and {"$key": {value: form}} selects a form by the value, "*"
    for any other. Null values are dropped. If there is one form, keys of `tree` that it does not name are kept.
    """
    import json
    import re

    forms = _tables()["kinds"].get(title, {}).get(str(tree.get("type")), [])
    used = set(re.findall(r"\$(\w+)", json.dumps(forms)))
    if not used & tree.keys() and any(form["type"] == tree["type"] for form in forms):
        return []
    unchanged = {key: value for key, value in tree.items() if key not in used} if len(forms) == 1 else {}
    return [unchanged | _filled(form, tree) for form in forms]


def _filled(form: object, tree: Mapping[str, Any]) -> Any:
    """Fills a template of the present configuration: "$key" is the former key's value, "$key|default" with a JSON
    default, {"$key": {value: form}} a choice by value."""
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
    """A finder of `sys.meta_path` that raises an error naming the present module where a former one is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.startswith("mmrl.") and (new := current_name(name)) is not None:
            raise ModuleNotFoundError(f"{name} is {new} now", name=name)


def tell_former_names() -> None:
    """Installs `FormerModules`, so that imports of former modules name the present one."""
    if not any(isinstance(finder, FormerModules) for finder in sys.meta_path):
        sys.meta_path.append(FormerModules())  # last: only for modules that no other finder finds
