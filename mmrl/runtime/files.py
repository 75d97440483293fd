"""Files that others read."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def share(folder: Path) -> None:
    """Gives all files in `folder` the mode that a new file of this user has. safetensors writes through a private
    temporary file, which nobody else could read."""
    new = folder / ".new"
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def user_cache(kind: str, variable: str) -> Path:
    """The folder that the environment's `variable` names, or mmrl/KIND in the user's cache folder. What lies there can
    be made again."""
    if chosen := os.environ.get(variable):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl" / kind
