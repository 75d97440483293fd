"""Parts of a response: the thoughts, what is stated after them, and the answer within that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mmrl.errors import UserError
from mmrl.rollouts import Sample

OPEN, CLOSE = "<answer>", "</answer>"
# What reasoning models put around their thoughts: Qwen, GLM and DeepSeek; others; Kimi; Mistral.
THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("[THINK]", "[/THINK]"),
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname|bm|emph)\*?\s*+\{"
)
_WRAPPERS = 8  # around one answer
_FINAL_LINE = re.compile(r"(?:^|\n)####[ \t]++(\S[^\n]*+)\s*+\Z")  # as GSM8K ends its solutions
_BOXES = (("<|begin_of_box|>", "<|end_of_box|>"), ("<\uff5cbegin_of_box\uff5c>", "<\uff5cend_of_box\uff5c>"))
_MATHEMATICS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def extract_answer(response: str) -> str:
    """The answer of a response, stripped; "" where there is none.

    The thoughts do not count. Of the rest the last <answer>...</answer>, in it or else in all of it the last
    \\boxed{...} or <|begin_of_box|>...<|end_of_box|>, without dollar signs or \\text{...} around the whole.
    """
    return extract_from(stated(response))


def extract_from(text: str) -> str:
    """The answer of a string that has no thoughts."""
    tagged = last_tagged(text)
    text = text if tagged is None else tagged
    boxed = _last_boxed(text)
    if boxed is not None:
        return _unwrapped(boxed)
    final = _FINAL_LINE.search(text) if "####" in text else None
    return _unwrapped(text if final is None else final[1])


def stated(response: str) -> str:
    """Returns the text after the thoughts. Thoughts end with the last closing tag, whether the response or the prompt's
    template opened them; without a closing tag everything behind the opening one is thought."""
    return split_thoughts(response)[1]


def full_response(sample: Sample) -> str:
    """The response of a sample, with the tag that opens its thoughts where that stands in the prompt."""
    return f"<think>{sample.response}" if sample.prompt_opens_think else sample.response


def split_thoughts(response: str) -> tuple[str, str]:
    """Thoughts and the rest; the thoughts are "" where no tag marks any."""
    thoughts, remainder = "", response
    for opening, closing in THOUGHTS:
        if closing in remainder:
            inside, _, remainder = remainder.rpartition(closing)
            thoughts += inside.lstrip().removeprefix(opening)
    for opening, _ in THOUGHTS:
        if opening in remainder:
            remainder, _, inside = remainder.partition(opening)
            thoughts += inside
    return thoughts, remainder


def between(text: str, opening: str, closing: str) -> list[str]:
    """Texts between the tags of each pair; a pair begins at the first opening tag after the one before."""
    inside, position = [], 0
    while (begin := text.find(opening, position)) >= 0 and (end := text.find(closing, begin)) >= 0:
        inside.append(text[begin + len(opening) : end])
        position = end + len(closing)
    return inside


def last_tagged(text: str) -> str | None:
    """The text of the last <answer>...</answer>."""
    inside = between(text, OPEN, CLOSE) if OPEN in text else []
    return inside[-1] if inside else None


def golds(sample: Sample) -> Sequence[Any]:
    """The gold answers of a sample, of which each will do. Raises UserError where there is none."""
    if sample.prompt.answer is None:
        raise UserError(f"prompt {sample.prompt.id!r} has no answer to compare with")
    return sample.prompt.answer if isinstance(sample.prompt.answer, (list, tuple)) else [sample.prompt.answer]


@lru_cache(maxsize=4096)
def gold_text(gold: str) -> str:
    """The answer of a gold text, read as a response is; all of it where nothing would be left."""
    return extract_answer(gold) or gold.strip()


def _last_boxed(text: str) -> str | None:
    """Content of the last box, of either kind, that is closed."""
    latest, content = -1, None
    for opening, closing in _BOXES:
        end = text.rfind(closing)
        begin = text.rfind(opening, 0, end) if end >= 0 else -1
        if begin > latest:
            latest, content = begin, text[begin + len(opening) : end]
    if content is not None and "\\boxed{" in content:
        return _last_braced(content)
    braced = _last_braced(text) if text.rfind("\\boxed{") > latest else None
    return content if braced is None else braced


def _last_braced(text: str) -> str | None:
    """Content of the last \\boxed{...} whose braces are balanced."""
    start = text.rfind("\\boxed{")
    end = _closing(text, start + len("\\boxed{")) if start >= 0 else None
    return None if end is None else text[start + len("\\boxed{") : end]


def _closing(text: str, begin: int) -> int | None:
    """Position of the brace that closes the one before `begin`; a regular expression can not count them."""
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


def _unwrapped(text: str) -> str:
    """A string without what is around all of it: dollar signs, \\text{...} and its kin."""
    text = text.strip()
    for _ in range(_WRAPPERS):
        inner = _inside(text) if text and text[-1] in "$})]" else None
        if inner is None:
            break
        text = inner
    return text


def _inside(text: str) -> str | None:
    """Returns what stands inside a LaTeX wrapper or math delimiters that enclose the whole text; None where nothing
    does."""
    wrapped = _WRAPPER.match(text) if text[0] == "\\" else None
    if wrapped:
        closed = _closing(text, wrapped.end()) == len(text) - 1
        return text[wrapped.end() : -1].strip() if closed else None
    for opening, closing in _MATHEMATICS:
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            if opening not in inner and closing not in inner:
                return inner.strip()
    return None
