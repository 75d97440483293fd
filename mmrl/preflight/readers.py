"""Probes of prompts through a model's own template, processor and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from mmrl.errors import UserError
from mmrl.preflight.alarms import Alarm, one_line, some
from mmrl.preflight.golds import written
from mmrl.rollouts import Prompt

Read = Callable[[Prompt], Any]


def probe_reading(prompts: Sequence[Prompt], read: Read, allowed: float = 0.0) -> Iterator[Alarm]:
    """Finds prompts that the model's reader refuses, with the reason; read raises for them. allowed: share of rows that
    training leaves out and names."""
    lines: dict[str, list[str]] = {}
    for prompt in prompts:
        try:
            read(prompt)
        except UserError as error:
            lines.setdefault(one_line(str(error)).replace(prompt.id, "PROMPT"), []).append(prompt.id)
        except Exception as error:  # of libraries, about a prompt that they do not take
            lines.setdefault(one_line(f"PROMPT: {type(error).__name__}: {error}"), []).append(prompt.id)
    within = sum(map(len, lines.values())) <= allowed * len(prompts)
    for text, rows in lines.items():
        more = f" ({len(rows)} of {len(prompts)} rows: {some(rows)})" if len(rows) > 1 else ""
        more += "; left out within task.data.max_bad_share" if within else ""
        yield Alarm("template", "warned" if within else "refused", text.replace("PROMPT", rows[0]) + more)


def probe_system(prompts: Sequence[Prompt], moved: Callable[[Prompt], str | None]) -> Iterator[Alarm]:
    """Finds system texts that stand elsewhere than where they were put. moved: the line about it, for a prompt."""
    for prompt in prompts[:1]:
        with suppress(UserError):  # which `probe_reading` names
            if line := moved(prompt):
                yield Alarm("template", "warned", line)


def probe_placeholders(prompts: Sequence[Prompt], special: Sequence[str]) -> Iterator[Alarm]:
    """Finds questions whose text holds a special token of the tokenizer, which is read as such."""
    for token in special:
        rows = [prompt.id for prompt in prompts if token in prompt.text]
        if rows:
            yield Alarm(
                "template",
                "refused",
                f"the text of {some(rows)} holds {token}, a special token of the model; take it out or write it in "
                "another way",
            )


def probe_lengths(prompts: Sequence[Prompt], count: Callable[[str], int], limit: int) -> Iterator[Alarm]:
    """Finds golds that no response can hold. count: tokens of a string; limit: rollout.max_response_length."""
    golds = [prompt for prompt in prompts if prompt.answer is not None]
    long = [prompt for prompt in golds if min(count(text) for text in written(prompt.answer)) >= limit]
    if long:
        yield Alarm(
            "rewards",
            "warned",
            f"the gold of {len(long)} of {len(golds)} rows, such as {some(p.id for p in long)}, has at least "
            f"rollout.max_response_length={limit} tokens, so no response can hold it; raise it",
        )
