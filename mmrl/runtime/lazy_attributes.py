"""Names of a package that are imported when they are first asked for, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attributes(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` (PEP 562) for `package`; where: the module that each name comes from."""

    def __getattr__(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return vars(importlib.import_module(where[name]))[name]

    return __getattr__
