"""Names of modules, classes, configuration keys and types before they were renamed in November 2026, so that error
messages can say what they are called now."""

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
    """Returns the tables of moved.json, from former to current names. modules: "package.module". classes:
    "package.module:Class". keys: dotted configuration keys. kinds: templates of choices, see `present_forms`."""
    import json  # imported here, as in the functions below, since every process imports this module and few call it
    from pathlib import Path

    return json.loads(Path(__file__).with_suffix(".json").read_text())


def current_name(name: str) -> str | None:
    """Returns the current name of a former "package.module" or "package.module:Class"; None for other names."""
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
    """Returns the hint for a failed `from module import name` with a former name; "" for other errors."""
    import re

    match = re.search(NOT_THERE, str(error))
    return "" if match is None else hint(f"{match[2]}:{match[1]}")


def update_names(text: str) -> str:
    """Replaces every former module or class name in a string by the current one."""
    import re

    return re.sub(NAME, lambda match: current_name(match[0]) or match[0], text)


def present_key(name: str) -> str:
    """Returns the current name of a configuration's key: the name itself where it is not a former one."""
    return _tables()["keys"].get(name, name)


def present_forms(title: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rewrites a section of the configuration that has a former `type`, or a key that its type no longer has.

    Returns one mapping, or several that together do the same; an empty list where the section is up to date. title: the
    title of the `Choice` that the section belongs to, such as "optimizer". tree: the section.

    The table `kinds` holds templates by title and former type. In a template "$key" stands for the value of that key in
    `tree`, "$key|default" has a default, and {"$key": {value: template}} selects a template by the value, "*" for any
    other value. Null values are dropped. If there is one template, keys of `tree` that it does not name are kept.
    """
    import json
    import re

    templates = _tables()["kinds"].get(title, {}).get(str(tree.get("type")), [])
    used = set(re.findall(r"\$(\w+)", json.dumps(templates)))
    if not used & tree.keys() and any(template["type"] == tree["type"] for template in templates):
        return []
    unchanged = {key: value for key, value in tree.items() if key not in used} if len(templates) == 1 else {}
    return [unchanged | _fill_template(template, tree) for template in templates]


def _fill_template(template: object, tree: Mapping[str, Any]) -> Any:
    """Returns a template with the values of `tree` in the place of "$key", "$key|default" and {"$key": {...}}; see
    `present_forms`."""
    import json

    if isinstance(template, Mapping):
        first_key = next(iter(template))
        if first_key.startswith("$"):
            former = first_key[1:]
            value = json.dumps(tree[former], default=str) if former in tree else ""
            return _fill_template(template[first_key].get(value, template[first_key].get("*")), tree)
        filled = {key: _fill_template(inner, tree) for key, inner in template.items()}
        return {key: inner for key, inner in filled.items() if inner is not None}
    if not isinstance(template, str) or not template.startswith("$"):
        return template
    key, _, default = template[1:].partition("|")
    return tree[key] if tree.get(key) is not None else json.loads(default or "null")


class FormerModules:
    """A finder of `sys.meta_path` that raises an error naming the current module where a former one is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.startswith("mmrl.") and (new := current_name(name)) is not None:
            raise ModuleNotFoundError(f"{name} is {new} now", name=name)


def tell_former_names() -> None:
    """Installs `FormerModules`, so that imports of former modules name the current one."""
    if not any(isinstance(finder, FormerModules) for finder in sys.meta_path):
        sys.meta_path.append(FormerModules())  # last: only for modules that no other finder finds
