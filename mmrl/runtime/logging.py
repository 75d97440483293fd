"""Silences libraries. Their progress bars are shown on a terminal, not in a log."""

import os
import sys

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",  # else it searches every installed package, at each start
}


def quieten_environment() -> None:
    """Sets ENVIRONMENT for libraries that are imported later and for child processes, without replacing the user's own
    values."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not bars_shown():
        os.environ.setdefault("TQDM_DISABLE", "1")


def bars_shown() -> bool:
    """Returns whether this process may draw bars: rank 0 on a terminal."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
