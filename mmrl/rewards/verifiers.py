"""Verifiers of answers and of the form of responses.

Each public function takes options and returns a reward, `(sample) -> float | None`. Options are checked when the reward
is built. A reward is None only if a sample cannot be scored at all. The time to score a response grows linearly with
its length; therefore regular expressions that could match one position in many ways are possessive.
"""

from __future__ import annotations

import random as _random
import re
from functools import lru_cache

from mmrl.rewards.parsing.choices import OptionLetterReader, parse_options, strip_lead_in
from mmrl.rewards.parsing.quantities import Quantity, last_quantity
from mmrl.rewards.parsing.responses import (
    CLOSE,
    OPEN,
    extract_answer,
    full_response,
    gold_answer_text,
    gold_answers,
    last_answer_tag,
)
from mmrl.rewards.parsing.wording import normalize_answer
from mmrl.rewards.types import Reward
from mmrl.rollouts import Sample

_TAGS = ("<think>", "</think>", OPEN, CLOSE)
_FORMAT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)


def exact_match(*, articles: bool = False, punctuation: bool = False) -> Reward:
    """Builds a reward: 1 if the extracted answer equals the gold answer, else 0.

    Typography, script of digits, case, white space and the marks around words are ignored; see
    `mmrl.rewards.parsing.wording`. punctuation: keep marks. articles: keep a, an and the. If the gold answer is a list,
    any of its answers is right. An empty answer is never right; the reward is None if all gold answers are empty.
    """

    @lru_cache(maxsize=4096)
    def normalized_gold(gold: str) -> str:
        return normalize_answer(gold_answer_text(gold), articles, punctuation)

    def reward(sample: Sample) -> float | None:
        """Returns 1 if the answer equals a gold answer, else 0; None if all gold answers are empty."""
        golds = [text for gold in gold_answers(sample) if (text := normalized_gold(str(gold)))]
        if not golds:
            return None
        answer = normalize_answer(extract_answer(full_response(sample)), articles, punctuation)
        return float(answer != "" and answer in golds)

    return reward


def multiple_choice(*, letters: str = "ABCDEFGHIJ") -> Reward:
    """Builds a reward: 1 if the response selects the gold letter ('B', '(b)', 'B. a cat', 'The answer is B' and the
    like), else 0.

    If the question lists its options ("A. a cat", one on a line), the text of an option stands for its letter, in the
    response and in the gold answer. A response that names several letters, or none, gets 0: no letter is guessed for
    it. The reward is None if the gold answer is not an option.
    """
    reader = OptionLetterReader(letters)

    def choice(text: str, question: str) -> str | None:
        """Returns the one letter that a text selects; None for none or several."""
        selected = reader.read(text)
        if selected:
            return selected[0] if len(selected) == 1 else None
        options = parse_options(question)
        if not options or not text:
            return None
        texts = {normalize_answer(text), normalize_answer(strip_lead_in(text))}
        matches = [letter for letter, option in options.items() if option in texts]
        return matches[0] if len(matches) == 1 else None

    @lru_cache(maxsize=4096)
    def gold_choice(gold: str, question: str) -> str | None:
        return choice(gold_answer_text(gold), question)

    def reward(sample: Sample) -> float | None:
        question = sample.prompt.text
        golds = [letter for gold in gold_answers(sample) if (letter := gold_choice(str(gold), question))]
        return float(choice(extract_answer(full_response(sample)), question) in golds) if golds else None

    return reward


def numeric(*, rtol: float | None = None, atol: float | None = None) -> Reward:
    """Builds a reward: 1 if the last number of the answer is within atol + rtol |gold| of the gold number, else 0.

    Without rtol and atol, whole numbers have to be equal, and others lie within a millionth of the gold number. Numbers
    may have digits of any script, a sign, thousands separators, fractions (1/2, 1 1/2), powers of ten and scale words
    (2 million). Known units on both sides are converted, and have to measure the same; a unit on one side only is
    ignored. A percent sign is a unit, not a factor. The reward is None if no gold answer has a number.
    """
    if any(tolerance is not None and tolerance < 0 for tolerance in (rtol, atol)):
        raise ValueError(f"rtol and atol must not be negative, but rtol={rtol} and atol={atol}")

    @lru_cache(maxsize=4096)
    def gold_number(gold: str) -> Quantity | None:
        return last_quantity(gold_answer_text(gold))

    def reward(sample: Sample) -> float | None:
        """Returns 1 if the answer's last number is near a gold number, else 0; None without a gold number."""
        golds = [number for gold in gold_answers(sample) if (number := gold_number(str(gold))) is not None]
        if not golds:
            return None
        number = last_quantity(extract_answer(full_response(sample)))
        return float(number is not None and any(number.is_near(gold, rtol, atol) for gold in golds))

    return reward


def think_answer() -> Reward:
    """Builds a reward: 1 if the full response is <think>...</think><answer>...</answer>, each tag once and no part
    empty; else 0.

    The opening <think> may be in the prompt, where the chat template puts it.
    """

    def reward(sample: Sample) -> float:
        """Returns 1 if the response has the form <think>...</think><answer>...</answer>, else 0."""
        response = full_response(sample)
        counts = [response.count(tag) for tag in _TAGS]
        # Where it is unknown whether the prompt ended with <think> (None), the response need not have the tag.
        openings = (0, 1) if sample.prompt_opens_think is None else (1,)
        match = _FORMAT.fullmatch(response) if counts[1:] == [1, 1, 1] and counts[0] in openings else None
        return float(match is not None and "<think>" not in match[1] and all(part.strip() for part in match.groups()))

    return reward


def answer_tag() -> Reward:
    """Builds a reward: 1 if the response has exactly one <answer>...</answer>, else 0."""

    def reward(sample: Sample) -> float:
        tags = [sample.response.count(tag) for tag in (OPEN, CLOSE)]
        return float(tags == [1, 1] and last_answer_tag(sample.response) is not None)

    return reward


def overlong_penalty(*, buffer: int, max_length: int | None = None) -> Reward:
    """Builds a penalty for long responses: the soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476,
    equation 13), in tokens.

    It is 0 up to max_length - buffer tokens, then falls linearly to -1 at max_length, and is -1 beyond. max_length:
    default the maximal response length of the run.
    """
    if buffer < 1 or (max_length is not None and buffer > max_length):
        most = "" if max_length is None else f" and at most max_length={max_length}"
        raise ValueError(f"buffer must be at least 1{most}, not {buffer}")

    def reward(sample: Sample) -> float:
        limit = sample.max_response_length if max_length is None else max_length
        excess = sample.response_length - (limit - buffer)
        return -min(1.0, excess / buffer) if excess > 0 else 0.0

    return reward


def tokens_per_forward() -> Reward:
    """Builds a reward of speed for discrete diffusion with unmasking.threshold (LightningRL): response tokens per
    forward pass. None if the number of passes is unknown."""

    def reward(sample: Sample) -> float | None:
        return sample.response_length / sample.forwards if sample.forwards else None

    return reward


def random(*, seed: int = 0, probability: float = 0.5) -> Reward:
    """Builds a random reward for control runs: 1 with this probability, else 0, independent of the sample.

    A run that still improves under it does so for another reason than the reward.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be from 0 to 1, not {probability}")
    rng = _random.Random(seed)

    def reward(sample: Sample) -> float:
        return float(rng.random() < probability)

    return reward
