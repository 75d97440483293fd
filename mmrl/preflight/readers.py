"""Probes of prompts through a model's own template, processor and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from mmrl.errors import UserError
from mmrl.preflight.alarms import Alarm, abbreviate, one_line
from mmrl.preflight.golds import gold_strings
from mmrl.rollouts import Prompt

ReadPrompt = Callable[[Prompt], Any]


def probe_reading(prompts: Sequence[Prompt], read: ReadPrompt, max_bad_share: float = 0.0) -> Iterator[Alarm]:
    """Yields alarms for prompts that the model cannot read, one for each error message.

    read: encodes a prompt, and raises if it cannot. max_bad_share: the share of such prompts that training leaves out;
    up to it alarms are only warnings.
    """
    rows_by_message: dict[str, list[str]] = {}
    for prompt in prompts:
        try:
            read(prompt)
        except UserError as error:
            rows_by_message.setdefault(one_line(str(error)).replace(prompt.id, "PROMPT"), []).append(prompt.id)
        except Exception as error:  # libraries raise many types for a prompt that they cannot encode
            rows_by_message.setdefault(one_line(f"PROMPT: {type(error).__name__}: {error}"), []).append(prompt.id)
    tolerated = sum(map(len, rows_by_message.values())) <= max_bad_share * len(prompts)
    for text, rows in rows_by_message.items():
        note = f" ({len(rows)} of {len(prompts)} rows: {abbreviate(rows)})" if len(rows) > 1 else ""
        note += "; left out within task.data.max_bad_share" if tolerated else ""
        yield Alarm("template", "warned" if tolerated else "refused", text.replace("PROMPT", rows[0]) + note)


def probe_system(prompts: Sequence[Prompt], system_remark: Callable[[Prompt], str | None]) -> Iterator[Alarm]:
    """Yields an alarm if the chat template moves the system text to another place.

    system_remark: returns a line about that for a prompt, or None.
    """
    for prompt in prompts[:1]:
        with suppress(UserError):  # `probe_reading` adds an alarm about it
            if line := system_remark(prompt):
                yield Alarm("template", "warned", line)


def probe_placeholders(prompts: Sequence[Prompt], special_tokens: Sequence[str]) -> Iterator[Alarm]:
    """Yields an alarm for each special token of the tokenizer that questions contain as text."""
    for token in special_tokens:
        rows = [prompt.id for prompt in prompts if token in prompt.text]
        if rows:
            yield Alarm(
                "template",
                "refused",
                f"the text of {abbreviate(rows)} holds {token}, a special token of the model; remove it or write it "
                "in another way",
            )


def probe_lengths(prompts: Sequence[Prompt], count_tokens: Callable[[str], int], limit: int) -> Iterator[Alarm]:
    """Yields an alarm for golds (reference answers) that are too long for any response.

    count_tokens: returns the number of tokens of a text. limit: rollout.max_response_length.
    """
    golds = [prompt for prompt in prompts if prompt.answer is not None]
    sizes = [min(count_tokens(text) for text in gold_strings(prompt.answer)) for prompt in golds]
    too_long = [prompt for prompt, size in zip(golds, sizes, strict=True) if size >= limit]
    if too_long:
        yield Alarm(
            "rewards",
            "warned",
            f"the gold of {len(too_long)} of {len(golds)} rows, such as {abbreviate(p.id for p in too_long)}, has at "
            f"least rollout.max_response_length={limit} tokens, so that no response can contain it; raise that key to "
            f"at least {max(sizes) + 1}: the longest of these golds, and the end token",
        )
