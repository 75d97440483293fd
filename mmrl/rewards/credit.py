"""Rewards for partly right answers, abstention, agreement and form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from mmrl.rewards.overlap import proper
from mmrl.rewards.parsing.boxes import boxes_in
from mmrl.rewards.parsing.choices import Letters
from mmrl.rewards.parsing.responses import (
    between,
    extract_answer,
    full_response,
    gold_text,
    golds,
    split_thoughts,
    stated,
)
from mmrl.rewards.parsing.typography import plain, spaced
from mmrl.rewards.parsing.wording import wording
from mmrl.rewards.types import Reward, Score
from mmrl.rewards.verifiers import exact_match
from mmrl.rollouts import Sample

SILENCE = ("i don't know", "i do not know", "cannot be determined", "can not be determined", "not sure", "unanswerable")


def several_choices(*, letters: str = "ABCDEFGHIJ", credit: str = "subset") -> Reward:
    """A score for questions with several right letters. credit: subset gives |chosen| / |right| where nothing wrong is
    chosen, else 0; jaccard |chosen and right| / |chosen or right|; f1 their harmonic mean; exact 1 or 0.

    The gold answer is a list of letters, or a string such as "A, C"; None where it names none.
    """
    if credit not in ("subset", "jaccard", "f1", "exact"):
        raise ValueError(f"credit must be subset, jaccard, f1 or exact, not {credit!r}")
    reader = Letters(letters)

    @lru_cache(maxsize=4096)
    def gold_letters(gold: str) -> list[str]:
        return reader.named(gold_text(gold))

    def reward(sample: Sample) -> float | None:
        right = {letter for gold in golds(sample) for letter in gold_letters(str(gold))}
        if not right:
            return None
        chosen = set(reader.named(extract_answer(full_response(sample))))
        shared = len(chosen & right)
        if credit == "subset":
            return shared / len(right) if chosen <= right else 0.0
        if credit == "jaccard":
            return shared / len(chosen | right)
        return float(chosen == right) if credit == "exact" else 2 * shared / (len(chosen) + len(right))

    return reward


def abstention(
    *, phrases: Sequence[str] = SILENCE, silent: float = 0.0, wrong: float = -1.0, right: float = 1.0
) -> Reward:
    """Three levels: `right` where `exact_match` holds, `silent` where the answer is one of `phrases`, else `wrong`, so
    that guessing does not pay. Raises ValueError unless wrong <= silent <= right."""
    if not wrong <= silent <= right:
        raise ValueError(f"wrong <= silent <= right must hold, got {wrong}, {silent}, {right}")
    same, quiet = exact_match(), [spaced(phrase) for phrase in phrases]

    def reward(sample: Sample) -> float | None:
        if same(sample):
            return right
        answer = spaced(extract_answer(full_response(sample)))
        return silent if any(phrase in answer for phrase in quiet) else wrong

    return reward


class Majority:
    """A majority vote without labels: 1 where an answer is the most frequent one of its group, else 0; with graded=true
    its share of the group. Answers are equal as in `exact_match`. An empty answer has no vote. A tie has several
    majorities."""

    def __init__(self, *, graded: bool = False) -> None:
        self.graded = graded

    @property
    def scope(self) -> Literal["sample", "group"]:
        return "group"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        answers = [wording(extract_answer(full_response(sample))) for sample in samples]
        votes = Counter(answer for answer in answers if answer)
        most = max(votes.values(), default=0)
        if self.graded:
            return [votes[answer] / len(samples) if answer else 0.0 for answer in answers]
        return [float(bool(answer) and votes[answer] == most) for answer in answers]


def tool_calls() -> Reward:
    """The agreement, 0 to 1, of the calls <tool_call>{"name": ..., "arguments": {...}}</tool_call> with the gold list.

    Each gold call is matched with the first unused call of its name, and counts the mean of 1 for the name, the share
    of argument names that both have, and that of the gold arguments with the right value; the sum is divided by the
    number of the larger side. 0 where a call is not JSON; None where the gold answer is no such list.
    """

    def reward(sample: Sample) -> float | None:
        wanted = _gold_calls(sample.prompt.answer)
        if not wanted:
            return None
        calls = [_parsed(text) for text in between(stated(full_response(sample)), "<tool_call>", "</tool_call>")]
        if any(call is None for call in calls):
            return 0.0
        left, total = [call for call in calls if call is not None], 0.0
        for gold in wanted:
            same = next((call for call in left if call["name"] == gold["name"]), None)
            if same is not None:
                left.remove(same)
                total += _call_score(same.get("arguments") or {}, gold.get("arguments") or {})
        return total / max(len(calls), len(wanted))

    return reward


def boxes_in_reasoning(*, at_least: int = 1, at_most: int = 20) -> Reward:
    """1 where the reasoning, up to </think>, holds at_least to at_most boxes that all have an area, so that the
    reasoning refers to image regions; else 0. For the forms of boxes see `mmrl.rewards.parsing.boxes`."""
    if not 0 < at_least <= at_most:
        raise ValueError(f"0 < at_least <= at_most must hold, got {at_least} and {at_most}")

    def reward(sample: Sample) -> float:
        boxes = boxes_in(split_thoughts(full_response(sample))[0])
        return float(at_least <= len(boxes) <= at_most and all(proper(box) for box in boxes))

    return reward


def sections(*, tags: Sequence[str]) -> Reward:
    """1 where the whole response is the sections of `tags` in their order, such as <info>...</info><think>...</think>
    <answer>...</answer>, each tag once, none empty and nothing between them; else 0. The opening tag of a first section
    `think` may stand in the prompt, where the chat template puts it."""
    if not tags or len(set(tags)) != len(tags):
        raise ValueError(f"tags must be different names, at least one, got {list(tags)}")

    def reward(sample: Sample) -> float:
        left = full_response(sample).strip()
        if tags[0] == "think" and "<think>" not in left and sample.prompt_opens_think is None:
            left = f"<think>{left}"
        for tag in tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if not left.startswith(opening) or left.count(opening) != 1 or left.count(closing) != 1:
                return 0.0
            inside, _, left = left.removeprefix(opening).partition(closing)
            if not inside.strip() or any(f"<{other}>" in inside for other in tags):
                return 0.0
            left = left.lstrip()
        return float(not left)

    return reward


def _gold_calls(gold: Any) -> list[dict[str, Any]]:
    """Gold calls of a list, of its JSON, or of a string with calls in tags as in a response; [] where it is none."""
    if isinstance(gold, str):
        calls = between(gold, "<tool_call>", "</tool_call>")
        gold = [_parsed(text) for text in calls] if calls else _json(gold)
    if isinstance(gold, dict):
        gold = [gold]
    is_list = isinstance(gold, list) and all(isinstance(call, dict) and "name" in call for call in gold)
    return gold if is_list else []


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _parsed(text: str) -> dict[str, Any] | None:
    call = _json(text)
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) else None


def _call_score(arguments: object, gold: dict[str, Any]) -> float:
    """Scores a tool call against the gold one in 0..1: the mean of 1 for the name, the overlap of parameter names, and
    the share of right values."""
    arguments = arguments if isinstance(arguments, dict) else {}
    names = set(arguments) | set(gold)
    shared = len(set(arguments) & set(gold)) / len(names) if names else 1.0
    same = [name in arguments and _typographic(arguments[name]) == _typographic(value) for name, value in gold.items()]
    values = sum(same) / len(same) if same else 1.0
    return (1 + shared + values) / 3


def _typographic(value: Any) -> Any:
    """A value whose texts have one typography."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_typographic(part) for part in value]
    if isinstance(value, dict):
        return {name: _typographic(part) for name, part in value.items()}
    return value
