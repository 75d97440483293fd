"""Extracts the program or the drawing of a response."""

from __future__ import annotations

import re

from mmrl.rewards.parsing.responses import full_response, last_answer_tag, without_thoughts
from mmrl.rollouts import Sample

_FENCE = "```"  # around a code block of Markdown
_LANGUAGE = re.compile(r"[A-Za-z0-9_+#-]*+[ \t]*+\r?\n")

_SVG = re.compile(r"<svg(?=[\s/>])[^<>]*+>|</svg\s*+>")


def extract_program(sample: Sample) -> str:
    """Returns the last fenced code block of the text after the thoughts (of the last <answer>, if there is one); all of
    that text if it has no fence.

    A block that is not closed extends to the end.
    """
    text = without_thoughts(full_response(sample))
    tagged = last_answer_tag(text)
    text = text if tagged is None else tagged
    parts = text.split(_FENCE)
    if len(parts) == 1:
        return text.strip()
    # with an odd number of parts every fence is closed, and the last block is the part before the last
    block = parts[-2] if len(parts) % 2 else parts[-1]
    language = _LANGUAGE.match(block)
    return block[language.end() if language else 0 :].rstrip()


def extract_svg(sample: Sample) -> str:
    """Returns the last outermost <svg> element of a response; "" if there is none."""
    text, depth, start, last = without_thoughts(full_response(sample)), 0, 0, ""
    for tag in _SVG.finditer(text):
        if tag[0].startswith("</"):
            depth = max(0, depth - 1)
        else:
            start = start if depth else tag.start()
            depth += not tag[0].endswith("/>")
        if depth == 0:
            last = text[start : tag.end()]
            start = tag.end()
    return last
