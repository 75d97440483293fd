"""The exception whose message a user reads: one line that says what to change."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(Exception):
    """Input that cannot be used. The command line prints the message and exits with 2, without a traceback."""


@contextmanager
def name_second_model(key: str) -> Iterator[None]:
    """Replaces model.path by `key` in messages of UserErrors from the block. The code that loads the trained model also
    loads a second one, such as a teacher, whose path is under another key."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path=", f"{key}=")) from error


def describe_error(error: BaseException, max_chars: int = 300) -> str:
    """Returns type, message and source line of an exception from user code or a library, as one ASCII line.

    max_chars: limit of type and message together; longer ones are cut.
    """
    try:
        text = str(error)
    except Exception as second:  # the exception's __str__ is user code too
        text = f"(its text raises {type(second).__name__})"
    line = " ".join(f"{type(error).__name__}: {text}".split())[:max_chars]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return printable(f"{line}{where}".encode("ascii", "backslashreplace").decode())


def printable(text: str) -> str:
    """Escapes control characters other than tab and newline, as in \\x1b. Otherwise text from a model or a server could
    move the terminal's cursor, clear the screen or set its title."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
