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
    """Names `key` where a message names model.path: a teacher or a frozen generator is loaded by the code of the
    trained model, and its own key is the one to change."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path=", f"{key}=")) from error


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
    return printable(f"{line}{where}".encode("ascii", "backslashreplace").decode())


def printable(text: str) -> str:
    """Returns a string whose control characters, but for line ends and tabs, are written as \\x1b: foreign text (a
    response, the answer of a server) could else move a terminal's cursor, clear it or set its title."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
