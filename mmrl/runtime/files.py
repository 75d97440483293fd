"""File modes and cache folders."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def use_default_permissions(folder: Path) -> None:
    """Gives all files in `folder` the default mode of a new file of this user (by the umask), since safetensors writes
    files that only the user can read."""
    new = folder / ".new"
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def user_cache(kind: str, variable: str) -> Path:
    """Returns the folder in the environment variable `variable`, or mmrl/KIND in the user's cache folder."""
    if chosen := os.environ.get(variable):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl" / kind
