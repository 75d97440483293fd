"""`mmrl recipes`: lists the recipes that come with the package."""

from __future__ import annotations

import re
from itertools import groupby, takewhile
from pathlib import Path

from mmrl.errors import UserError
from mmrl.settings import recipes
from mmrl.settings.section import nearest


def describe_recipes(name: str | None) -> list[str]:
    """Returns the lines of `mmrl recipes`: the text of the recipe `name`, or for None one line about each recipe, by
    kind of task. Raises UserError for an unknown name."""
    shipped = recipes.shipped()
    if name is not None:
        if name not in shipped:
            raise UserError(f"there is no recipe {name}{nearest(name, shipped)}; mmrl recipes lists them")
        return [f"# {recipes.relative_to_working_folder(shipped[name])}", *shipped[name].read_text().splitlines()]
    lines: list[str] = []
    # the folders of a recipe's run directory, without runs/ and its own name, say the kind of task
    for folders, paths in groupby(shipped.values(), key=lambda path: recipes.run_dir(path).split("/")[1:-1]):
        lines += ["", "/".join(folders)]
        lines += [f"  {path.stem:<38} {_first_sentence(path)}" for path in paths]
    return lines[1:]


def _first_sentence(path: Path) -> str:
    """Returns the first sentence of the comment at the top of a recipe."""
    comment = [
        line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    ]
    return re.split(r"(?<=[.:;]) ", " ".join(comment))[0].rstrip(".:;")
