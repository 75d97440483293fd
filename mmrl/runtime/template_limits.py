"""Limits for chat templates, which come with a model and are untrusted: time, memory and length of the text."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import jinja2

from mmrl.errors import UserError
from mmrl.runtime.time_limits import time_limit

TEMPLATE_S = 20.0  # seconds; a usual template takes a millisecond
TEMPLATE_BYTES = 2**31  # by which the process may grow while a template runs; its other threads count too
LONGEST = 10_000_000  # characters of a conversation; a context of a million tokens has about four million
ADVICE = "fix it, or use the chat_template.jinja of its instruction-tuned version"

_lock = threading.Lock()
_within: list[int] = []  # the limits of address space before each block that is active


@contextmanager
def limit_memory_growth(size: int, message: str) -> Iterator[None]:
    """Raises UserError with `message` where the process needs more than `size` further bytes of memory in the block.
    Blocks of several threads at the same time share the limit of the first. Does nothing on systems without
    RLIMIT_AS."""
    if sys.platform != "linux":
        yield
        return
    try:
        with _address_space_limited(size):
            yield
    except MemoryError:
        raise UserError(message) from None


@contextmanager
def _address_space_limited(size: int) -> Iterator[None]:
    """A context in which the process may allocate only `size` further bytes of address space."""
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if not _within:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + size
            lowered = limit if soft == resource.RLIM_INFINITY else min(limit, soft)
            resource.setrlimit(resource.RLIMIT_AS, (lowered, hard))
        _within.append(soft)
    try:
        yield
    finally:
        with _lock:
            before = _within.pop()  # the limit before the first block is restored when the last one ends
            if not _within:
                resource.setrlimit(resource.RLIMIT_AS, (before, hard))


class HasTemplate(Protocol):
    """A tokenizer or a processor of transformers, which renders conversations by a chat template."""

    @property
    def chat_template(self) -> object: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool, **more: Any
    ) -> str: ...


def render_template(name: str, owner: HasTemplate, messages: list[Any], **options: Any) -> str:
    """Returns the text that a chat template makes of messages. Raises UserError for a template with a power, one that
    takes too long or too much memory, or whose text is too long.

    name: the model that has the template, for error messages.
    """
    template = options.get("chat_template", owner.chat_template)
    named = template.values() if isinstance(template, Mapping) else [template]
    if any(_has_power(text) for text in named if isinstance(text, str)):
        raise UserError(f"{name}: its chat template computes a power (**), which may take hours; {ADVICE}")
    too_slow = f"{name}: its chat template did not finish within {TEMPLATE_S:g} s; fix its loops, or use the "
    too_large = f"{name}: its chat template takes more than {TEMPLATE_BYTES / 2**30:g} GiB of memory; {ADVICE}"
    limit = time_limit(TEMPLATE_S, f"{too_slow}chat_template.jinja of its instruction-tuned version")
    with limit, limit_memory_growth(TEMPLATE_BYTES, too_large):
        text = owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    if len(text) > LONGEST:
        raise UserError(
            f"{name}: its chat template makes {len(text)} characters of a conversation, more than {LONGEST}; {ADVICE}"
        )
    return text


@lru_cache(maxsize=32)
def _has_power(template: str) -> bool:
    """Returns whether a template computes a power. 9**9**9 is a single operation of C, which no time limit stops;
    Jinja computes it while it compiles the template. A `**` behind a bracket or a comma unpacks arguments."""
    before = ""
    try:
        for _, kind, text in jinja2.Environment().lex(template):
            if text == "**" and kind == "operator" and before not in ("(", ","):
                return True
            if kind not in ("whitespace", "comment"):
                before = text
    except jinja2.TemplateSyntaxError:  # reported when the template is rendered
        return False
    return False
