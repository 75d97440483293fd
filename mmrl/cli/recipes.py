"""What recipes come with the package: `mmrl recipes`."""

from __future__ import annotations

import re
from itertools import groupby, takewhile
from pathlib import Path

from mmrl.errors import UserError
from mmrl.settings import recipes
from mmrl.settings.section import nearest


def described(name: str | None) -> list[str]:
    """Lines about the recipes that come with the package, by kind; with a name, the recipe itself. Raises UserError for
    one that is not among them."""
    known = recipes.shipped()
    if name is not None:
        if name not in known:
            raise UserError(f"there is no recipe {name}{nearest(name, known)}; mmrl recipes lists them")
        return [f"# {recipes.shown(known[name])}", *known[name].read_text().splitlines()]
    lines: list[str] = []
    for kind, members in groupby(known.values(), key=lambda path: recipes.run_dir(path).split("/")[1:-1]):
        lines += ["", "/".join(kind)]
        lines += [f"  {path.stem:<38} {_first_sentence(path)}" for path in members]
    return lines[1:]


def _first_sentence(path: Path) -> str:
    """What a recipe says of itself first."""
    comment = [
        line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    ]
    return re.split(r"(?<=[.:;]) ", " ".join(comment))[0].rstrip(".:;")
