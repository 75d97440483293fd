"""`mmrl new`: writes skeletons of methods, tasks, rewards, tools, simulators and environments, which train at once."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mmrl.errors import UserError

# The section of a method's recipe, and the lines in it that name the method.
METHODS = {
    "algorithm": ("algorithm", "type: {module}:{name}\n  scale_by: 1.0"),
    "term": ("algorithm", "terms:\n    - {{type: '{module}:{name}', coefficient: 0.01}}"),
    "shaper": ("algorithm", "shaping:\n    - {{type: '{module}:{name}', gamma: 0.99}}"),
    "mask": ("algorithm", "masks:\n    - {{type: '{module}:{name}', first: 32}}"),
    "surrogate": ("algorithm", "minibatches: 2\n  surrogate: {{type: '{module}:{name}', price: 1.0}}"),
    "baseline": ("algorithm", "baseline: {{type: '{module}:{name}', share: 0.5}}\n  scale: none"),
    "transform": ("algorithm", "transforms: [{{type: '{module}:{name}', power: 2.0}}]"),
    "view": (
        "algorithm",
        "terms:\n    - type: kl\n      against: {{type: view, view: {{type: '{module}:{name}', radius: 2.0}}}}",
    ),
    "source": ("rollout", "extras: [{{type: '{module}:{name}', least: 0.5}}]"),
    "sampler": ("rollout", "sampler: {{type: '{module}:{name}', floor: 0.1}}"),
}
WHOLE = ("transition", "head")  # parts with a recipe of their own and the test of a method
KINDS = (*METHODS, *WHOLE, "tool", "task", "reward", "simulator", "environment")


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Writes a module, a recipe and a test into `folder`. Returns the files.

    Raises UserError for a name that is not a name of a class, and where one of the files exists.
    """
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name):
        raise UserError(f"{name!r} is not a name of a class; write it like MyAlgorithm")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    variables = {"name": name, "module": module, "rollout": "", "algorithm": ""}
    shared = kind
    if kind in METHODS:
        section, line = METHODS[kind]
        line = line.format(**variables)
        variables[section] = f"\n  {line}" if section == "rollout" else f"\nalgorithm:\n  {line}"
        shared = "method"
    templates = {f"{module}.py": f"{kind}.py", f"{module}.yaml": f"{shared}.yaml"}
    templates[f"test_{module}.py"] = "method_test.py" if kind in WHOLE else f"{shared}_test.py"
    for file in templates:
        if (folder / file).exists():
            raise UserError(f"{folder / file} exists; choose another name or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder={folder}: {error}") from None
    templates_in = Environment(
        loader=PackageLoader("mmrl.cli", "skeletons"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    for file, template in templates.items():
        (folder / file).write_text(templates_in.get_template(f"{template}.jinja").render(variables))
    return [folder / file for file in templates]
