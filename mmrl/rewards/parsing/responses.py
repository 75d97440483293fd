"""Parts of a response: the thoughts (what a reasoning model writes between <think> and </think>), the text after them,
and the answer in that text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mmrl.errors import UserError
from mmrl.rollouts import Sample

OPEN, CLOSE = "<answer>", "</answer>"
# Tags of reasoning models around their thoughts: Qwen, GLM and DeepSeek; others; Kimi; Mistral.
THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("[THINK]", "[/THINK]"),
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname|bm|emph)\*?\s*+\{"
)
_MAX_WRAPPERS = 8  # nested around one answer
_FINAL_LINE = re.compile(r"(?:^|\n)####[ \t]++(\S[^\n]*+)\s*+\Z")  # as GSM8K ends its solutions
_BOXES = (("<|begin_of_box|>", "<|end_of_box|>"), ("<\uff5cbegin_of_box\uff5c>", "<\uff5cend_of_box\uff5c>"))
_MATHEMATICS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def extract_answer(response: str) -> str:
    """Returns the answer of a response, stripped; "" if there is none.

    Thoughts are removed first. Of the rest, the last <answer>...</answer> is taken, if there is one. In it, the last
    \\boxed{...} or <|begin_of_box|>...<|end_of_box|> is the answer, else all of the text. Dollar signs or \\text{...}
    around the answer are removed.
    """
    return answer_in_text(without_thoughts(response))


def answer_in_text(text: str) -> str:
    """Returns the answer in a text that has no thoughts; see `extract_answer`."""
    tagged = last_answer_tag(text)
    text = text if tagged is None else tagged
    boxed = _last_boxed(text)
    if boxed is not None:
        return _unwrap(boxed)
    final = _FINAL_LINE.search(text) if "####" in text else None
    return _unwrap(text if final is None else final[1])


def without_thoughts(response: str) -> str:
    """Returns the text after the thoughts.

    Thoughts end with the last closing tag, whether the response or the prompt's template opened them. Without a closing
    tag, everything after the opening one is thought.
    """
    return split_thoughts(response)[1]


def full_response(sample: Sample) -> str:
    """Returns a sample's response, with the tag <think> in front if the prompt ended with it."""
    return f"<think>{sample.response}" if sample.prompt_opens_think else sample.response


def split_thoughts(response: str) -> tuple[str, str]:
    """Splits a response into its thoughts and the text after them. The thoughts are "" if it has no tags of
    THOUGHTS."""
    thoughts, remainder = "", response
    for opening, closing in THOUGHTS:  # the text before the last closing tag is thought
        if closing in remainder:
            inside, _, remainder = remainder.rpartition(closing)
            thoughts += inside.lstrip().removeprefix(opening)
    for opening, _ in THOUGHTS:  # so is the text after an opening tag that is not closed
        if opening in remainder:
            remainder, _, inside = remainder.partition(opening)
            thoughts += inside
    return thoughts, remainder


def texts_between(text: str, opening: str, closing: str) -> list[str]:
    """Returns the texts between the tags of each pair. A pair begins at the first opening tag after the previous
    pair."""
    texts, position = [], 0
    while (begin := text.find(opening, position)) >= 0 and (end := text.find(closing, begin)) >= 0:
        texts.append(text[begin + len(opening) : end])
        position = end + len(closing)
    return texts


def last_answer_tag(text: str) -> str | None:
    """Returns the text in the last <answer>...</answer>; None if there is none."""
    texts = texts_between(text, OPEN, CLOSE) if OPEN in text else []
    return texts[-1] if texts else None


def gold_answers(sample: Sample) -> Sequence[Any]:
    """Returns the gold answers of a sample; any of them is right. Raises UserError if the prompt has none."""
    if sample.prompt.answer is None:
        raise UserError(f"prompt {sample.prompt.id!r} has no answer to compare with; add one to its row")
    return sample.prompt.answer if isinstance(sample.prompt.answer, (list, tuple)) else [sample.prompt.answer]


@lru_cache(maxsize=4096)
def gold_answer_text(gold: str) -> str:
    """Returns the answer in a gold text, extracted as from a response; all of the text if the extracted answer is
    empty."""
    return extract_answer(gold) or gold.strip()


def _last_boxed(text: str) -> str | None:
    """Returns the content of the last closed box, \\boxed{...} or <|begin_of_box|>...; None without one."""
    latest, content = -1, None
    for opening, closing in _BOXES:
        end = text.rfind(closing)
        begin = text.rfind(opening, 0, end) if end >= 0 else -1
        if begin > latest:
            latest, content = begin, text[begin + len(opening) : end]
    if content is not None and "\\boxed{" in content:  # a box of LaTeX inside the other box
        return _last_braced(content)
    braced = _last_braced(text) if text.rfind("\\boxed{") > latest else None
    return content if braced is None else braced


def _last_braced(text: str) -> str | None:
    """Returns the content of the last \\boxed{...} whose braces are balanced; None without one."""
    start = text.rfind("\\boxed{")
    end = _closing_brace(text, start + len("\\boxed{")) if start >= 0 else None
    return None if end is None else text[start + len("\\boxed{") : end]


def _closing_brace(text: str, begin: int) -> int | None:
    """Returns the index of the brace that closes the one right before `begin`; None if it is not closed."""
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


def _unwrap(text: str) -> str:
    """Removes dollar signs, \\text{...} and the like if they enclose the whole text."""
    text = text.strip()
    for _ in range(_MAX_WRAPPERS):
        inner = _unwrap_once(text) if text and text[-1] in "$})]" else None
        if inner is None:
            break
        text = inner
    return text


def _unwrap_once(text: str) -> str | None:
    """Removes one LaTeX wrapper or pair of math delimiters that encloses the whole text; None if there is none."""
    wrapped = _WRAPPER.match(text) if text[0] == "\\" else None
    if wrapped:
        encloses_all = _closing_brace(text, wrapped.end()) == len(text) - 1
        return text[wrapped.end() : -1].strip() if encloses_all else None
    for opening, closing in _MATHEMATICS:
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            if opening not in inner and closing not in inner:
                return inner.strip()
    return None
