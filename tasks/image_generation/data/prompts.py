"""The user's own prompts, as GenEval's and OCR prompts come."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmrl.rewards.parsing.quotes import quoted_texts
from mmrl.rollouts import Prompt
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.prompt_files import Check, load_prompts, text_of, value_of
from mmrl.tasks.image_generation.data.sources_to_edit import ImagesToEdit

Format = Literal["plain", "geneval", "ocr"]
log = logging.getLogger(__name__)


def load(
    path: str | Path,
    *,
    format: Format = "plain",
    max_bad_share: float = 0.0,
    field: str = "prompt",
    images: ImagesToEdit | None = None,
) -> list[Prompt]:
    """Reads the prompts of a file or folder as `load_prompts` does. images: those to edit, which each row must name.

    `format` says what else a row must hold: geneval a `tag` and `include` (a list of {class, count}, each with `color`
    or `position`, [relation, index of another], where the prompt has them); ocr a text in double quotes in the
    prompt, or under the key `text`.
    """
    of_format = CHECKS[format]

    def check(row: Mapping[str, Any], prompt: str) -> None:
        if of_format is not None:
            of_format(row, prompt)
        if images is not None:
            images.check(row)

    return load_prompts(path, field=field, check=check, max_bad_share=max_bad_share)


def hold_out(prompts: list[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Splits prompts into training and held-out ones. A prompt's side depends on its text alone: on no seed, order or
    repetition.

    Raises ValueError where a side stays empty.
    """
    sides: tuple[list[Prompt], list[Prompt]] = [], []
    for prompt in prompts:
        digest = hashlib.sha256(prompt.text.encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < share * 2**64].append(prompt)
    if not all(sides):
        raise ValueError(
            f"task.data.heldout={share:g} leaves {len(sides[0])} prompts to train on and {len(sides[1])} held out; "
            "both need some: change it, or name a file of held-out prompts in task.data.eval"
        )
    return sides


def warn_of_overlap(train: list[Prompt], evaluation: list[Prompt], image_field: str | None = None) -> None:
    """Logs how many held-out prompts are trained on too, if any. image_field: of the image to edit; the same text for
    another image is another prompt."""

    def content(prompt: Prompt) -> tuple[str, str]:
        return prompt.text, "" if image_field is None else str(prompt.metadata[image_field])

    known = {content(prompt) for prompt in train}
    shared = sum(content(prompt) in known for prompt in evaluation)
    if shared:
        log.warning("%d of %d held-out prompts are among those to train on", shared, len(evaluation))


def _check_geneval(row: Mapping[str, Any], prompt: str) -> None:
    """Raises RowError where a row lacks GenEval's metadata (tag; include with class, count, color, position)."""
    text_of(row, "tag")
    include = value_of(row, "include", list, "a list")
    for index, item in enumerate(include):
        where = f"include[{index}]."
        if not isinstance(item, Mapping):
            raise RowError(f"key 'include[{index}]' must be an object, not {type(item).__name__}")
        text_of(item, "class", where)
        if value_of(item, "count", int, "a number", where) < 1:
            raise RowError(f"key '{where}count' must be at least 1, not {item['count']}")
        if "color" in item:
            text_of(item, "color", where)
        if "position" in item:
            relation, other = (*value_of(item, "position", list, "a list", where), None, None)[:2]
            if not isinstance(relation, str) or other not in range(len(include)) or other == index:
                raise RowError(
                    f"key '{where}position' must be [relation, index of another in include], not {item['position']}"
                )


def _check_ocr(row: Mapping[str, Any], prompt: str) -> None:
    if "text" in row:
        text_of(row, "text")
    elif not quoted_texts(prompt):
        raise RowError("the prompt puts no text in double quotes, and there is no key 'text'")


CHECKS: dict[Format, Check | None] = {"plain": None, "geneval": _check_geneval, "ocr": _check_ocr}
