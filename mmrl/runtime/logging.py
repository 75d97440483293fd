"""What keeps libraries from talking of themselves. A terminal shows their bars of downloads and of pipelines' parts, a
log does not."""

import os
import sys

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",  # else every installed package is asked for some, at each start
}


def quieten_environment() -> None:
    """For libraries that are imported from here on, and for children. What the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not bars_shown():
        os.environ.setdefault("TQDM_DISABLE", "1")


def bars_shown() -> bool:
    """Whether this process may draw bars: the first of all ranks, on a terminal."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
