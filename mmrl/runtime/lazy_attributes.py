"""Lazy attributes of a package: they are imported on first use, so that importing the package is cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attributes(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` (PEP 562) for `package`. where: the module of each name."""

    def __getattr__(name: str) -> Any:
        """Imports the module of `name`, and returns its attribute of that name."""
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return vars(importlib.import_module(where[name]))[name]

    return __getattr__
