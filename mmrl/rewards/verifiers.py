"""Verifiers of answers and of the form of responses.

Each public function takes its options and returns a reward, `(sample) -> float | None`. Options are checked when the
reward is made; None is returned only where a sample cannot be scored at all. The time that a response takes grows with
its length, never with the square of it: regular expressions that could match one position in many ways are possessive.
"""

from __future__ import annotations

import random as _random
import re
from functools import lru_cache

from mmrl.rewards.parsing.choices import Letters, options_of, without_lead_in
from mmrl.rewards.parsing.quantities import Quantity, last_quantity
from mmrl.rewards.parsing.responses import CLOSE, OPEN, extract_answer, full_response, gold_text, golds, last_tagged
from mmrl.rewards.parsing.wording import wording
from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample

_TAGS = ("<think>", "</think>", OPEN, CLOSE)
_FORMAT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)


def exact_match(*, articles: bool = False, punctuation: bool = False) -> Reward:
    """1 where the extracted answer equals the gold one in any typography and script of digits, case, white space and
    the marks around words aside; else 0. See `mmrl.rewards.parsing.wording` for what is left out.

    `punctuation=True` keeps marks, `articles=True` keeps a, an and the. A list of gold answers accepts any of them. An
    empty answer is never right; None where all gold answers are empty.
    """

    @lru_cache(maxsize=4096)
    def gold_wording(gold: str) -> str:
        return wording(gold_text(gold), articles, punctuation)

    def reward(sample: Sample) -> float | None:
        wanted = [words for gold in golds(sample) if (words := gold_wording(str(gold)))]
        if not wanted:
            return None
        words = wording(extract_answer(full_response(sample)), articles, punctuation)
        return float(words != "" and words in wanted)

    return reward


def multiple_choice(*, letters: str = "ABCDEFGHIJ") -> Reward:
    """1 where the chosen letter is the gold one ('B', '(b)', 'B. a cat', 'The answer is B' and the like); else 0.

    Where the question lists its options ("A. a cat" on a line each), the text of one option stands for its letter, in
    the response and in the gold answer. A response that names several letters, or none, gets 0: no guess is made for
    it. None where the gold answer is not an option.
    """
    reader = Letters(letters)

    def choice(text: str, question: str) -> str | None:
        named = reader.named(text)
        if named:
            return named[0] if len(named) == 1 else None
        options = options_of(question)
        if not options or not text:
            return None
        texts = {wording(text), wording(without_lead_in(text))}
        same = [letter for letter, option in options.items() if option in texts]
        return same[0] if len(same) == 1 else None

    @lru_cache(maxsize=4096)
    def gold_choice(gold: str, question: str) -> str | None:
        return choice(gold_text(gold), question)

    def reward(sample: Sample) -> float | None:
        question = sample.prompt.text
        wanted = [letter for gold in golds(sample) if (letter := gold_choice(str(gold), question))]
        return float(choice(extract_answer(full_response(sample)), question) in wanted) if wanted else None

    return reward


def numeric(*, rtol: float | None = None, atol: float | None = None) -> Reward:
    """1 where the last number of the answer is within atol + rtol |gold| of the gold number; else 0. Without either,
    whole numbers have to be equal and others lie within a millionth of the gold number.

    Numbers have digits of any script, sign, thousands, fractions (1/2, 1 1/2), powers of ten and words of scale (2
    million). Known units on both sides are converted, and have to measure the same thing; a unit on one side is not
    looked at. A percent sign is a unit and no factor. None where no gold answer holds a number.
    """
    if any(tolerance is not None and tolerance < 0 for tolerance in (rtol, atol)):
        raise ValueError(f"rtol and atol must not be negative, not {rtol} and {atol}")

    @lru_cache(maxsize=4096)
    def gold_number(gold: str) -> Quantity | None:
        return last_quantity(gold_text(gold))

    def reward(sample: Sample) -> float | None:
        wanted = [number for gold in golds(sample) if (number := gold_number(str(gold))) is not None]
        if not wanted:
            return None
        number = last_quantity(extract_answer(full_response(sample)))
        return float(number is not None and any(number.is_near(gold, rtol, atol) for gold in wanted))

    return reward


def think_answer() -> Reward:
    """1 where the whole response is <think>...</think><answer>...</answer>, each tag once and neither empty; else 0.
    The opening <think> may stand in the prompt, where the chat template puts it."""

    def reward(sample: Sample) -> float:
        response = full_response(sample)
        counts = [response.count(tag) for tag in _TAGS]
        # Where it is not known what the prompt ended in, the tag may have stood there.
        openings = (0, 1) if sample.prompt_opens_think is None else (1,)
        match = _FORMAT.fullmatch(response) if counts[1:] == [1, 1, 1] and counts[0] in openings else None
        return float(match is not None and "<think>" not in match[1] and all(part.strip() for part in match.groups()))

    return reward


def answer_tag() -> Reward:
    """1 where the response holds exactly one <answer>...</answer>; else 0."""

    def reward(sample: Sample) -> float:
        tags = [sample.response.count(tag) for tag in (OPEN, CLOSE)]
        return float(tags == [1, 1] and last_tagged(sample.response) is not None)

    return reward


def overlong_penalty(*, buffer: int, max_length: int | None = None) -> Reward:
    """Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13), in tokens.

    0 up to max_length - buffer, then linearly to -1 at max_length, -1 beyond; max_length defaults to the sample's
    maximal response length.
    """
    if buffer < 1 or (max_length is not None and buffer > max_length):
        raise ValueError(f"buffer must lie in 1 .. max_length, not {buffer}")

    def reward(sample: Sample) -> float:
        limit = sample.max_response_length if max_length is None else max_length
        excess = sample.response_length - (limit - buffer)
        return -min(1.0, excess / buffer) if excess > 0 else 0.0

    return reward


def tokens_per_forward() -> Reward:
    """Tokens of the response a forward pass, of discrete diffusion with unmasking.threshold: a reward of speed
    (LightningRL). None where the number of passes is unknown."""

    def reward(sample: Sample) -> float | None:
        return sample.response_length / sample.forwards if sample.forwards else None

    return reward


def random(*, seed: int = 0, probability: float = 0.5) -> Reward:
    """The control: 1 with this probability, else 0, independent of the sample.

    A run that still gains under it gains from something other than the reward.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must lie in 0 .. 1, not {probability}")
    generator = _random.Random(seed)

    def reward(sample: Sample) -> float:
        return float(generator.random() < probability)

    return reward
