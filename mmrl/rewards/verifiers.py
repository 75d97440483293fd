"""Verifiers: does a response answer its prompt, and does it have the wanted form?

Each public function here takes its options and returns a reward, `(sample) -> float | None`. Options are checked when
the reward is made; None is returned only where a sample cannot be scored at all. The time that a response takes grows
with its length, never with the square of it: regular expressions that could try one place in many ways are possessive.
"""

from __future__ import annotations

import logging
import random as _random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from mmrl.errors import UserError
from mmrl.rewards.overlap import Box, giou, iou, proper
from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample

_OPEN, _CLOSE = "<answer>", "</answer>"
_FORMAT = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", _OPEN, _CLOSE)
_EXPONENT = r"(?:[eE][-+]?\d++)?+"
_NUMBER = rf"[-+]?(?:\d[\d,]*+(?:\.\d*+)?+|\.\d++){_EXPONENT}"
_SIDE = rf"\s*+([-+]?(?:\d++(?:\.\d*+)?+|\.\d++){_EXPONENT})\s*+"
_BOX = re.compile(rf"\[{_SIDE},{_SIDE},{_SIDE},{_SIDE}\]")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract_answer(response: str) -> str:
    """The last <answer>...</answer>, in it or else in the response the last \\boxed{...}, else all of it; stripped."""
    tagged = _last_tagged(response)
    text = response if tagged is None else tagged
    boxed = _last_boxed(text)
    return (text if boxed is None else boxed).strip()


def _last_tagged(response: str) -> str | None:
    """What stands between the tags of the last pair; a pair begins at the first opening tag after the one before."""
    found, place = None, 0
    while (begin := response.find(_OPEN, place)) >= 0 and (end := response.find(_CLOSE, begin)) >= 0:
        found, place = response[begin + len(_OPEN) : end], end + len(_CLOSE)
    return found


def _last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} whose braces are balanced; a regular expression cannot count them."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def exact_match(*, articles: bool = False, punctuation: bool = False) -> Reward:
    """1 where the extracted answer equals the gold one, after lower case and single spaces; else 0.

    Unless kept by `punctuation=True`, marks are dropped, save the sign and the point of a number; `articles=True` keeps
    a, an and the. A list of gold answers accepts any of them.
    """

    def reward(sample: Sample) -> float:
        got = _normalise(extract_answer(sample.response), articles, punctuation)
        return float(any(got == _normalise(str(gold), articles, punctuation) for gold in _golds(sample)))

    return reward


def _normalise(text: str, articles: bool, punctuation: bool) -> str:
    words = [word if punctuation else _strip_marks(word) for word in text.lower().split()]
    return " ".join(word for word in words if word and (articles or word not in ("a", "an", "the")))


def _strip_marks(word: str) -> str:
    number = re.fullmatch(rf"\W*?({_NUMBER})\W*+", word)
    return number[1].replace(",", "").removesuffix(".") if number else word.translate(_PUNCTUATION)


def _golds(sample: Sample) -> Sequence[Any]:
    if sample.prompt.answer is None:
        raise UserError(f"prompt {sample.prompt.id!r} has no answer to compare with")
    return sample.prompt.answer if isinstance(sample.prompt.answer, (list, tuple)) else [sample.prompt.answer]


def math(*, precision: int = 6) -> Reward:
    """1 where math-verify finds the response equal to the gold answer, 0 where not; None where the gold does not parse.

    Build it through the registry, which runs it in a process with a deadline: symbolic simplification may take for
    ever.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for name in ("math_verify", "math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it logs a traceback for each answer it cannot read
    kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def parsed(text: str) -> list:
        # its own timeouts use SIGALRM, which works in a main thread only; ours is the deadline of the process
        return parse(text, kinds, parsing_timeout=None, raise_on_error=False)

    def reward(sample: Sample) -> float | None:
        golds = [parsed(_delimited(str(gold))) for gold in _golds(sample)]
        if not all(golds):
            return None
        answer = extract_answer(sample.response)
        whole = answer == sample.response.strip()  # prose, perhaps, with the result somewhere in it
        got = (whole and parsed(answer)) or parsed(_delimited(answer))
        return float(any(verify(gold, got, float_rounding=precision, timeout_seconds=None) for gold in golds))

    return reward


def _delimited(text: str) -> str:
    """LaTeX is looked for between delimiters, and a gold answer seldom has any."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def multiple_choice(*, letters: str = "ABCDEFGHIJ") -> Reward:
    """1 where the chosen letter is the gold one ('B', '(b)', 'B. a cat', 'The answer is B' and the like); else 0.

    A response that names several letters, or none, gets 0: no guess is made for it.
    """
    upper = letters.upper()
    alone = re.compile(rf"(?<![A-Za-z])([{upper}])(?![A-Za-z'])")  # in capitals: "a cat" names no letter
    leading = re.compile(rf"\W*([{upper}])(?:\W*$|\s*[).:])", re.IGNORECASE)

    def choice(text: str) -> str | None:
        first = leading.match(text)
        if first:
            return first[1].upper()
        found = set(alone.findall(text))
        return found.pop() if len(found) == 1 else None

    def reward(sample: Sample) -> float | None:
        golds = [letter for gold in _golds(sample) if (letter := choice(str(gold)))]
        return float(choice(extract_answer(sample.response)) in golds) if golds else None

    return reward


def numeric(*, rtol: float = 0.0, atol: float = 1e-6) -> Reward:
    """1 where the last number of the answer is within atol + rtol |gold| of the gold number; else 0.

    A percent sign is not read as a factor. None where no gold answer holds a number.
    """
    if rtol < 0 or atol < 0:
        raise ValueError(f"rtol and atol must not be negative, not {rtol} and {atol}")

    def number(value: Any) -> float | None:
        found = re.findall(_NUMBER, str(value))
        return float(found[-1].replace(",", "")) if found else None

    def reward(sample: Sample) -> float | None:
        golds = [value for gold in _golds(sample) if (value := number(gold)) is not None]
        if not golds:
            return None
        got = number(extract_answer(sample.response))
        return float(got is not None and any(abs(got - gold) <= atol + rtol * abs(gold) for gold in golds))

    return reward


def think_answer() -> Reward:
    """1 where the whole response is <think>...</think><answer>...</answer>, each tag once and neither empty; else 0."""

    def reward(sample: Sample) -> float:
        once = all(sample.response.count(tag) == 1 for tag in _TAGS)
        match = _FORMAT.fullmatch(sample.response) if once else None
        return float(match is not None and all(part.strip() for part in match.groups()))

    return reward


def answer_tag() -> Reward:
    """1 where the response holds exactly one <answer>...</answer>; else 0."""

    def reward(sample: Sample) -> float:
        tags = [sample.response.count(tag) for tag in (_OPEN, _CLOSE)]
        return float(tags == [1, 1] and _last_tagged(sample.response) is not None)

    return reward


def box_iou(*, threshold: float | None = None) -> Reward:
    """Intersection over union, 0 to 1, of the last [x1, y1, x2, y2] of the answer and the best gold box.

    With `threshold` the reward is 1 where it is reached and 0 elsewhere. No box, or a box with no area, gets 0. The
    gold answer is one box or a list of them; None where it is not.
    """
    return _box_reward(iou, missing=0.0, threshold=threshold)


def box_giou(*, threshold: float | None = None) -> Reward:
    """As `box_iou` with the generalised IoU, -1 to 1 (Rezatofighi et al. 2019, arXiv:1902.09630); no box gets -1."""
    return _box_reward(giou, missing=-1.0, threshold=threshold)


def _box_reward(overlap: Callable[[Box, Box], float], missing: float, threshold: float | None) -> Reward:
    def reward(sample: Sample) -> float | None:
        golds = _gold_boxes(sample.prompt.answer)
        if not golds:
            return None
        found = _BOX.findall(extract_answer(sample.response)) or _BOX.findall(sample.response)
        box = proper(found[-1]) if found else None
        value = missing if box is None else max(overlap(box, gold) for gold in golds)
        return value if threshold is None else float(value >= threshold)

    return reward


def _gold_boxes(answer: Any) -> list[Box]:
    if isinstance(answer, str):
        rows: list[Any] = list(_BOX.findall(answer))
    elif isinstance(answer, (list, tuple)) and answer:
        rows = list(answer) if isinstance(answer[0], (list, tuple)) else [answer]
    else:
        rows = []
    boxes = [proper(row) if len(row) == 4 else None for row in rows]
    return [] if None in boxes else [box for box in boxes if box is not None]


def overlong_penalty(*, buffer: int, max_length: int | None = None) -> Reward:
    """Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13), in tokens.

    0 up to max_length - buffer, then linearly to -1 at max_length, -1 beyond; max_length is the sample's own maximal
    response length unless given.
    """
    if buffer < 1 or (max_length is not None and buffer > max_length):
        raise ValueError(f"buffer must lie in 1 .. max_length, not {buffer}")

    def reward(sample: Sample) -> float:
        limit = sample.max_response_length if max_length is None else max_length
        excess = sample.response_length - (limit - buffer)
        return -min(1.0, excess / buffer) if excess > 0 else 0.0

    return reward


def tokens_per_forward() -> Reward:
    """Tokens of the response for each time that the model had to be asked, of discrete diffusion with
    unmasking.threshold: a reward of speed (LightningRL). None where that is not known."""

    def reward(sample: Sample) -> float | None:
        return sample.response_length / sample.forwards if sample.forwards else None

    return reward


def random(*, seed: int = 0, probability: float = 0.5) -> Reward:
    """The control: 1 with the given probability, else 0, independently for each call and blind to the sample.

    A run that still gains under it gains from something other than the reward.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must lie in 0 .. 1, not {probability}")
    generator = _random.Random(seed)

    def reward(sample: Sample) -> float:
        return float(generator.random() < probability)

    return reward
