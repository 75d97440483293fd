"""Commands that add an extra to this installation, a checkout or a wheel."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement  # workers of simulators run where it is not installed

DISTRIBUTION = "mmrl-train"
DEVELOPMENT_EXTRA = "dev"
CHECKOUT = Path(__file__).resolve().parents[2]


def is_checkout() -> bool:
    """Returns whether mmrl runs from a checkout, which has scripts and constraints.txt, and not from a wheel."""
    return (CHECKOUT / "pyproject.toml").is_file()


def extra_command(*extras: str) -> str:
    """Returns the command that installs extras: from the checkout, or, if mmrl came as a wheel, the packages that the
    extras name."""
    if is_checkout():
        return f"pip install -e '.[{','.join(extras)}]'"
    return "pip install " + " ".join(f"'{requirement}'" for requirement in requirements(extras))


def extra_with(package: str) -> str | None:
    """Returns the extra that installs a package, whose distribution has the same name as its module; None if none
    does."""
    from packaging.requirements import Requirement

    declared = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    extras = (extra_that_requires(r) for r in declared if canonical_name(r.name) == canonical_name(package))
    return next((extra for extra in extras if extra not in (None, DEVELOPMENT_EXTRA)), None)


def extra_that_requires(requirement: Requirement) -> str | None:
    """Returns the extra of mmrl that has a requirement; None if mmrl itself has it."""
    if requirement.marker is None:
        return None
    names = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    return next((name for name in names if requirement.marker.evaluate({"extra": name})), None)


def canonical_name(package: str) -> str:
    """Returns a package's name in lower case with hyphens, in which names are compared."""
    return package.lower().replace("_", "-").replace(".", "-")


def requirements(extras: tuple[str, ...]) -> list[str]:
    """Returns the requirements of extras as the installed distribution names them, without their markers."""
    from packaging.requirements import Requirement

    declared = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    wanted = [r for r in declared if r.marker is not None and not r.marker.evaluate({"extra": ""})]
    return [_bare(r) for r in wanted if r.marker and any(r.marker.evaluate({"extra": name}) for name in extras)]


def _bare(requirement: Requirement) -> str:
    """Returns a requirement as text, without its marker."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"
