"""What keeps libraries from talking of themselves. Bars of downloads stay: a terminal shows them, a log does not."""

import os

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}


def quieten_environment() -> None:
    """For libraries that are imported from here on, and for children. What the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
