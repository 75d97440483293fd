"""Credit for a part of the answer, for silence, for agreement, and for form."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from mmrl.rewards.overlap import proper
from mmrl.rewards.types import Reward, Score
from mmrl.rewards.verifiers import exact_match, extract_answer
from mmrl.rewards.visual.coordinates import boxes_in
from mmrl.rollouts import Sample

SILENCE = ("i don't know", "i do not know", "cannot be determined", "can not be determined", "not sure", "unanswerable")


def several_choices(*, letters: str = "ABCDEFGHIJ", credit: str = "subset") -> Reward:
    """For questions with several right letters. credit: subset gives |chosen| / |right| where nothing wrong is chosen,
    else 0; jaccard |chosen and right| / |chosen or right|; f1 their harmonic mean; exact 1 or 0.

    The gold answer is a list of letters, or a text such as "A, C"; None where it names none.
    """
    if credit not in ("subset", "jaccard", "f1", "exact"):
        raise ValueError(f"credit must be subset, jaccard, f1 or exact, not {credit!r}")
    alone = re.compile(rf"(?<![A-Za-z])([{letters.upper()}])(?![A-Za-z'])")

    def reward(sample: Sample) -> float | None:
        gold = sample.prompt.answer
        right = set(alone.findall(gold if isinstance(gold, str) else " ".join(map(str, gold or ()))))
        if not right:
            return None
        chosen = set(alone.findall(extract_answer(sample.response)))
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
    """Three grades: `right` where `exact_match` holds, `silent` where the answer is one of `phrases`, else `wrong`, so
    that guessing does not pay. Raises ValueError unless wrong <= silent <= right."""
    if not wrong <= silent <= right:
        raise ValueError(f"wrong <= silent <= right must hold, got {wrong}, {silent}, {right}")
    same, quiet = exact_match(), [phrase.lower() for phrase in phrases]

    def reward(sample: Sample) -> float | None:
        if same(sample):
            return right
        answer = extract_answer(sample.response).lower()
        return silent if any(phrase in answer for phrase in quiet) else wrong

    return reward


class Majority:
    """No label is needed: 1 where an answer is the one that most of its group gave, else 0; with graded=true the share
    of the group that gave it. An answer that is empty has no vote. A tie has several majorities."""

    def __init__(self, *, graded: bool = False) -> None:
        self.graded = graded

    @property
    def scope(self) -> Literal["sample", "group"]:
        return "group"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        answers = [" ".join(extract_answer(sample.response).lower().split()).rstrip(".") for sample in samples]
        votes = Counter(answer for answer in answers if answer)
        most = max(votes.values(), default=0)
        if self.graded:
            return [votes[answer] / len(samples) if answer else 0.0 for answer in answers]
        return [float(bool(answer) and votes[answer] == most) for answer in answers]


def tool_calls() -> Reward:
    """How well the calls <tool_call>{"name": ..., "arguments": {...}}</tool_call> fit the gold list of such mappings.

    Each gold call is matched with the first unused call of its name, and counts the mean of 1 for the name, the share
    of argument names that both have, and that of the gold arguments with the right value; the sum is divided by the
    number of the larger side. 0 where a call is no JSON; None where the gold answer is no such list."""

    def reward(sample: Sample) -> float | None:
        golds = sample.prompt.answer
        if not isinstance(golds, list) or not golds or not all(isinstance(g, dict) and "name" in g for g in golds):
            return None
        calls = [_parsed(text) for text in _between(sample.response, "<tool_call>", "</tool_call>")]
        if any(call is None for call in calls):
            return 0.0
        left, total = [call for call in calls if call is not None], 0.0
        for gold in golds:
            same = next((call for call in left if call["name"] == gold["name"]), None)
            if same is not None:
                left.remove(same)
                total += _call_score(same.get("arguments") or {}, gold.get("arguments") or {})
        return total / max(len(calls), len(golds))

    return reward


def boxes_in_reasoning(*, at_least: int = 1, at_most: int = 20) -> Reward:
    """1 where the reasoning, in <think>, holds at_least to at_most boxes [x1, y1, x2, y2] that all have an area, so
    that what is said is tied to places; else 0."""
    if not 0 < at_least <= at_most:
        raise ValueError(f"0 < at_least <= at_most must hold, got {at_least} and {at_most}")

    def reward(sample: Sample) -> float:
        thoughts = _between(sample.response, "<think>", "</think>")
        boxes = boxes_in(thoughts[0]) if thoughts else []
        return float(at_least <= len(boxes) <= at_most and all(proper(box) for box in boxes))

    return reward


def sections(*, tags: Sequence[str]) -> Reward:
    """1 where the whole response is the sections of `tags` in their order, such as <info>...</info><think>...</think>
    <answer>...</answer>, each tag once, none empty and nothing between them; else 0."""
    if not tags or len(set(tags)) != len(tags):
        raise ValueError(f"tags must be different names, at least one, got {list(tags)}")

    def reward(sample: Sample) -> float:
        left = sample.response.strip()
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


def _between(text: str, opening: str, closing: str) -> list[str]:
    """What stands between the tags of each pair; in time that grows with the length alone."""
    found, place = [], 0
    while (begin := text.find(opening, place)) >= 0 and (end := text.find(closing, begin)) >= 0:
        found.append(text[begin + len(opening) : end])
        place = end + len(closing)
    return found


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) else None


def _call_score(own: Any, gold: dict[str, Any]) -> float:
    own = own if isinstance(own, dict) else {}
    names = set(own) | set(gold)
    shared = len(set(own) & set(gold)) / len(names) if names else 1.0
    values = sum(own.get(name) == value for name, value in gold.items()) / len(gold) if gold else 1.0
    return (1 + shared + values) / 3
