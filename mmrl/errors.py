"""The one exception a user is meant to read: its text is a single line that says what to change."""

import traceback
from pathlib import Path


class UserError(Exception):
    """Input that cannot be used. The command line prints the message and exits with 2, without a traceback."""


def told(error: BaseException, longest: int = 300) -> str:
    """Kind, text and place of an exception of somebody else's code, in one line that any log can hold."""
    try:
        text = str(error)
    except Exception as second:  # its own __str__ is somebody else's code too
        text = f"(its text raises {type(second).__name__})"
    line = " ".join(f"{type(error).__name__}: {text}".split())[:longest]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{line}{where}".encode("ascii", "backslashreplace").decode()
