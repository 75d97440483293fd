"""The exception whose message a user reads: one line that says what to change."""

import traceback
from pathlib import Path


class UserError(Exception):
    """Input that cannot be used. The command line prints the message and exits with 2, without a traceback."""


def describe_error(error: BaseException, longest: int = 300) -> str:
    """Returns type, message and source line of an exception of foreign code as one ASCII line.

    longest: characters of type and message together.
    """
    try:
        text = str(error)
    except Exception as second:  # its __str__ is foreign code too
        text = f"(its text raises {type(second).__name__})"
    line = " ".join(f"{type(error).__name__}: {text}".split())[:longest]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{line}{where}".encode("ascii", "backslashreplace").decode()
