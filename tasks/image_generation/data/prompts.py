"""Prompts from the user's own files, with the metadata of GenEval or of OCR rewards."""

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
    """Reads the prompts of a file or folder, as `load_prompts` does.

    images: checks the images to edit that each row must refer to; None: there are none. `format` says what else a row
    must hold. geneval: `tag` and `include`, a list of {class, count} with optional `color` and `position` ([relation,
    index of another entry]). ocr: a text in double quotes in the prompt, or the key `text`.
    """
    check_format = CHECKS[format]

    def check(row: Mapping[str, Any], prompt: str) -> None:
        """Raises RowError if a row lacks what `format` needs, or an image to edit."""
        if check_format is not None:
            check_format(row, prompt)
        if images is not None:
            images.check(row)

    return load_prompts(path, field=field, check=check, max_bad_share=max_bad_share)


def hold_out(prompts: list[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Splits prompts into training and held-out prompts by a hash of their text, so that equal texts are in one split,
    whatever the order or the seed. share: the expected share of held-out prompts.

    Raises ValueError if a split is empty.
    """
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    for prompt in prompts:
        digest = hashlib.sha256(prompt.text.encode()).digest()
        is_heldout = int.from_bytes(digest[:8], "big") < share * 2**64
        (heldout if is_heldout else train).append(prompt)
    if not train or not heldout:
        raise ValueError(
            f"task.data.heldout={share:g} leaves {len(train)} training and {len(heldout)} held-out prompts, but both "
            "are needed; change heldout, or name a file of held-out prompts in task.data.eval"
        )
    return train, heldout


def warn_of_overlap(train: list[Prompt], evaluation: list[Prompt], image_field: str | None = None) -> None:
    """Logs a warning if held-out prompts are among the training prompts. image_field: the column of the image to edit;
    prompts with the same text but different images are not the same."""

    def content(prompt: Prompt) -> tuple[str, str]:
        """Returns what makes prompts the same: the text, and the reference of the image to edit."""
        return prompt.text, "" if image_field is None else str(prompt.metadata[image_field])

    training_contents = {content(prompt) for prompt in train}
    num_shared = sum(content(prompt) in training_contents for prompt in evaluation)
    if num_shared:
        log.warning(
            "%d of %d held-out prompts are training prompts too; remove them from task.data.train or eval",
            num_shared,
            len(evaluation),
        )


def _check_geneval(row: Mapping[str, Any], prompt: str) -> None:
    """Raises RowError if a row lacks GenEval's metadata (tag; include with class, count, color, position)."""
    text_of(row, "tag")
    include = value_of(row, "include", list, "a list")
    for index, item in enumerate(include):
        parent = f"include[{index}]."
        if not isinstance(item, Mapping):
            raise RowError(f"key 'include[{index}]' must be an object, not {type(item).__name__}")
        text_of(item, "class", parent)
        if value_of(item, "count", int, "a number", parent) < 1:
            raise RowError(f"key '{parent}count' must be at least 1, not {item['count']}")
        if "color" in item:
            text_of(item, "color", parent)
        if "position" in item:
            # Padded with None, so that a list that is too short is refused below
            relation, other = (*value_of(item, "position", list, "a list", parent), None, None)[:2]
            if not isinstance(relation, str) or other not in range(len(include)) or other == index:
                raise RowError(
                    f"key '{parent}position' must be [relation, index of another object in include], not "
                    f"{item['position']}"
                )


def _check_ocr(row: Mapping[str, Any], prompt: str) -> None:
    """Raises RowError if neither the key `text` nor double quotes in the prompt say which text an image must show."""
    if "text" in row:
        text_of(row, "text")
    elif not quoted_texts(prompt):
        raise RowError("format=ocr needs a text in double quotes in the prompt, or the key 'text'")


CHECKS: dict[Format, Check | None] = {"plain": None, "geneval": _check_geneval, "ocr": _check_ocr}
