"""The table of extras in scripts/README.md has every extra of pyproject.toml, and no other."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_extra_is_in_the_table():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    table = (ROOT / "scripts/README.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`([\w-]+)`", row.partition(" | ")[0])}
    assert listed == extras
