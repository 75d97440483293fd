"""Rewards for partly right answers, abstention, majority votes, tool calls and the form of a response."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from mmrl.rewards.overlap import to_box
from mmrl.rewards.parsing.boxes import parse_boxes
from mmrl.rewards.parsing.choices import OptionLetterReader
from mmrl.rewards.parsing.responses import (
    extract_answer,
    full_response,
    gold_answer_text,
    gold_answers,
    split_thoughts,
    texts_between,
    without_thoughts,
)
from mmrl.rewards.parsing.typography import normalize_text, normalize_typography
from mmrl.rewards.parsing.wording import normalize_answer
from mmrl.rewards.types import Reward, Score
from mmrl.rewards.verifiers import exact_match
from mmrl.rollouts import Sample

ABSTENTIONS = (
    "i don't know",
    "i do not know",
    "cannot be determined",
    "can not be determined",
    "not sure",
    "unanswerable",
)


def several_choices(*, letters: str = "ABCDEFGHIJ", credit: str = "subset") -> Reward:
    """Builds a reward for questions with several right letters.

    credit: subset gives |selected| / |right| if nothing wrong is selected, else 0. jaccard gives |selected and right| /
    |selected or right|, f1 the harmonic mean of precision and recall, exact 1 or 0. The gold answer is a list of
    letters, or a string such as "A, C"; the reward is None if it names none.
    """
    if credit not in ("subset", "jaccard", "f1", "exact"):
        raise ValueError(f"credit must be subset, jaccard, f1 or exact, not {credit!r}")
    reader = OptionLetterReader(letters)

    @lru_cache(maxsize=4096)
    def gold_letters(gold: str) -> list[str]:
        return reader.read(gold_answer_text(gold))

    def reward(sample: Sample) -> float | None:
        """Returns the credit for the letters that the answer selects; None if the gold answer names none."""
        right = {letter for gold in gold_answers(sample) for letter in gold_letters(str(gold))}
        if not right:
            return None
        selected = set(reader.read(extract_answer(full_response(sample))))
        shared = len(selected & right)
        if credit == "subset":
            return shared / len(right) if selected <= right else 0.0
        if credit == "jaccard":
            return shared / len(selected | right)
        return float(selected == right) if credit == "exact" else 2 * shared / (len(selected) + len(right))

    return reward


def abstention(
    *, phrases: Sequence[str] = ABSTENTIONS, silent: float = 0.0, wrong: float = -1.0, right: float = 1.0
) -> Reward:
    """Builds a reward with three levels, so that guessing does not pay.

    It is `right` if `exact_match` holds, `silent` if the answer contains one of `phrases`, else `wrong`. Raises
    ValueError unless wrong <= silent <= right.
    """
    if not wrong <= silent <= right:
        raise ValueError(f"wrong <= silent <= right must hold, but wrong={wrong}, silent={silent} and right={right}")
    is_right, abstentions = exact_match(), [normalize_text(phrase) for phrase in phrases]

    def reward(sample: Sample) -> float | None:
        if is_right(sample):
            return right
        answer = normalize_text(extract_answer(full_response(sample)))
        return silent if any(phrase in answer for phrase in abstentions) else wrong

    return reward


class Majority:
    """A reward by majority vote, without labels: 1 if an answer is the most frequent one of its group, else 0.

    graded: the answer's share of the group instead. Answers are compared as by `exact_match`. An empty answer has no
    vote; in a tie all the most frequent answers get 1.
    """

    def __init__(self, *, graded: bool = False) -> None:
        self.graded = graded

    @property
    def scope(self) -> Literal["sample", "group"]:
        return "group"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns for each sample of a group 1 if its answer is the most frequent one, else 0; if `graded`, the
        answer's share of the group."""
        answers = [normalize_answer(extract_answer(full_response(sample))) for sample in samples]
        votes = Counter(answer for answer in answers if answer)
        max_votes = max(votes.values(), default=0)
        if self.graded:
            return [votes[answer] / len(samples) if answer else 0.0 for answer in answers]
        return [float(bool(answer) and votes[answer] == max_votes) for answer in answers]


def tool_calls() -> Reward:
    """Builds a reward, 0 to 1, for tool calls <tool_call>{"name": ..., "arguments": {...}}</tool_call> that agree with
    the gold list.

    Each gold call is matched with the first unused call of its name. A pair scores the mean of three: 1 for the name,
    the share of argument names that both have, and the share of gold arguments with the right value. The sum is divided
    by the number of calls or gold calls, whichever is larger. The reward is 0 if a call is not JSON, and None if the
    gold answer is no such list.
    """

    def reward(sample: Sample) -> float | None:
        """Returns the agreement of a response's tool calls with the gold calls, 0 to 1; None without gold calls."""
        gold_calls = _gold_calls(sample.prompt.answer)
        if not gold_calls:
            return None
        calls = [
            _parse_call(text)
            for text in texts_between(without_thoughts(full_response(sample)), "<tool_call>", "</tool_call>")
        ]
        if any(call is None for call in calls):
            return 0.0
        unused, total = [call for call in calls if call is not None], 0.0
        for gold in gold_calls:
            match = next((call for call in unused if call["name"] == gold["name"]), None)
            if match is not None:
                unused.remove(match)
                total += _call_score(match.get("arguments") or {}, gold.get("arguments") or {})
        return total / max(len(calls), len(gold_calls))

    return reward


def boxes_in_reasoning(*, at_least: int = 1, at_most: int = 20) -> Reward:
    """Builds a reward: 1 if the reasoning, up to </think>, has `at_least` to `at_most` boxes, all with an area; else 0.

    So the reasoning refers to image regions. Forms of boxes: see `mmrl.rewards.parsing.boxes`.
    """
    if not 0 < at_least <= at_most:
        raise ValueError(f"0 < at_least <= at_most must hold, but at_least={at_least} and at_most={at_most}")

    def reward(sample: Sample) -> float:
        boxes = parse_boxes(split_thoughts(full_response(sample))[0])
        return float(at_least <= len(boxes) <= at_most and all(to_box(box) for box in boxes))

    return reward


def sections(*, tags: Sequence[str]) -> Reward:
    """Builds a reward: 1 if the full response consists of the sections of `tags` in their order, else 0.

    For example <info>...</info><think>...</think><answer>...</answer>: each tag once, none empty and nothing between
    them. The opening tag of a first section `think` may be in the prompt, where the chat template puts it.
    """
    if not tags or len(set(tags)) != len(tags):
        raise ValueError(f"tags must be different names, one or more, not {list(tags)}")

    def reward(sample: Sample) -> float:
        """Returns 1 if the response consists of the sections of `tags`, in order, else 0."""
        remaining = full_response(sample).strip()
        # `full_response` adds the prompt's <think>. Where it is unknown whether the prompt had one (None), a missing
        # one is assumed to be there.
        if tags[0] == "think" and "<think>" not in remaining and sample.prompt_opens_think is None:
            remaining = f"<think>{remaining}"
        for tag in tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if not remaining.startswith(opening) or remaining.count(opening) != 1 or remaining.count(closing) != 1:
                return 0.0
            content, _, remaining = remaining.removeprefix(opening).partition(closing)
            if not content.strip() or any(f"<{tag_inside}>" in content for tag_inside in tags):
                return 0.0
            remaining = remaining.lstrip()
        return float(not remaining)

    return reward


def _gold_calls(gold: Any) -> list[dict[str, Any]]:
    """Reads gold calls from a list, from its JSON, or from a string with calls in tags as in a response; [] if it
    is anything else."""
    if isinstance(gold, str):
        calls = texts_between(gold, "<tool_call>", "</tool_call>")
        gold = [_parse_call(text) for text in calls] if calls else _json(gold)
    if isinstance(gold, dict):
        gold = [gold]
    is_list = isinstance(gold, list) and all(isinstance(call, dict) and "name" in call for call in gold)
    return gold if is_list else []


def _json(text: str) -> Any:
    """Parses JSON; None if it is not valid, or too deeply nested."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parse_call(text: str) -> dict[str, Any] | None:
    """Parses a tool call; None if it is not a JSON object with a name."""
    call = _json(text)
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) else None


def _call_score(arguments: object, gold: dict[str, Any]) -> float:
    """Scores the arguments of a tool call whose name is right, 0 to 1: the mean of 1 for the name, the overlap of
    argument names, and the share of right values. gold: the right arguments."""
    arguments = arguments if isinstance(arguments, dict) else {}
    names = set(arguments) | set(gold)
    shared = len(set(arguments) & set(gold)) / len(names) if names else 1.0
    agreements = [
        name in arguments and _normalize_strings(arguments[name]) == _normalize_strings(value)
        for name, value in gold.items()
    ]
    values = sum(agreements) / len(agreements) if agreements else 1.0
    return (1 + shared + values) / 3  # 1: the name is right


def _normalize_strings(value: Any) -> Any:
    """Returns a JSON value with `normalize_typography` applied to every string in it, except keys of dicts."""
    if isinstance(value, str):
        return normalize_typography(value)
    if isinstance(value, list):
        return [_normalize_strings(part) for part in value]
    if isinstance(value, dict):
        return {name: _normalize_strings(part) for name, part in value.items()}
    return value
