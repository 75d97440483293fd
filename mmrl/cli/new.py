"""`mmrl new`: writes skeletons of methods, tasks, rewards, tools, simulators and environments, which train at once."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mmrl.errors import UserError

# By type of method: the section of the recipe that names it, and the YAML lines in that section.
METHOD_SECTIONS = {
    "algorithm": ("algorithm", "type: {module}:{name}\n  scale_by: 1.0"),
    "term": ("algorithm", "terms:\n    - {{type: '{module}:{name}', coefficient: 0.01}}"),
    "shaper": ("algorithm", "shaping:\n    - {{type: '{module}:{name}', gamma: 0.99}}"),
    "mask": ("algorithm", "masks:\n    - {{type: '{module}:{name}', first: 32}}"),
    "surrogate": ("algorithm", "minibatches: 2\n  surrogate: {{type: '{module}:{name}', price: 1.0}}"),
    "baseline": ("algorithm", "baseline: {{type: '{module}:{name}', share: 0.5}}\n  scale: none"),
    "transform": ("algorithm", "transforms: [{{type: '{module}:{name}', power: 2.0}}]"),
    "measurement": ("algorithm", "shaping:\n    - {{type: '{module}:Uses{name}', power: 1.0}}"),
    "view": (
        "algorithm",
        "terms:\n    - type: kl\n      against: {{type: view, view: {{type: '{module}:{name}', radius: 2.0}}}}",
    ),
    "source": ("rollout", "extras: [{{type: '{module}:{name}', least: 0.5}}]"),
    "sampler": ("rollout", "sampler: {{type: '{module}:{name}', floor: 0.1}}"),
}
PARTS_WITH_RECIPE = ("transition", "head")  # these have recipes of their own, and share the test of methods
KINDS = (*METHOD_SECTIONS, *PARTS_WITH_RECIPE, "tool", "task", "reward", "simulator", "environment")


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Writes the skeleton of a part: a module, a recipe and a test in `folder`. Returns their paths.

    kind: one of KINDS. name: the name of the class, in CamelCase; the module has the same name in snake_case. Raises
    UserError if the name is not in CamelCase, the folder cannot be made, or one of the files exists.
    """
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name):
        raise UserError(f"{name!r} is not a class name in CamelCase; write it like MyAlgorithm")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    variables = {"kind": kind, "name": name, "module": module, "rollout": "", "algorithm": ""}
    template_kind = kind
    if kind in METHOD_SECTIONS:
        # the section of the recipe that selects the method, and its line there
        section, line = METHOD_SECTIONS[kind]
        line = line.format(**variables)
        variables[section] = f"\n  {line}" if section == "rollout" else f"\nalgorithm:\n  {line}"
        template_kind = "method"
    templates = {f"{module}.py": f"{kind}.py", f"{module}.yaml": f"{template_kind}.yaml"}
    templates[f"test_{module}.py"] = "method_test.py" if kind in PARTS_WITH_RECIPE else f"{template_kind}_test.py"
    for file in templates:
        if (folder / file).exists():
            raise UserError(f"{folder / file} exists; choose another name or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder={folder}: {error}") from None
    environment = Environment(
        loader=PackageLoader("mmrl.cli", "skeletons"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    for file, template in templates.items():
        (folder / file).write_text(environment.get_template(f"{template}.jinja").render(variables))
    return [folder / file for file in templates]
