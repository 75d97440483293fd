"""Tries golds as responses: full marks for the gold in the required form, the least for an empty response, and not the
gold's marks for other golds."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.preflight.alarms import Alarm, one_line, some
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rewards.compose import applies
from mmrl.rewards.registry import is_custom
from mmrl.rollouts import Prompt, Sample

OTHERS = 3  # golds of other rows that a row is tried with
FORMS = ("{gold}", "<answer>{gold}</answer>", "<think>I look.</think><answer>{gold}</answer>", "\\boxed{{{gold}}}")
LENGTH = 8  # tokens that a tried response is said to have
# Verifiers whose gold is an answer that a response can give in one of these forms. They ask no judge and no server.
READING_GOLDS = frozenset(
    {
        *("exact_match", "math", "multiple_choice", "numeric", "several_choices", "abstention"),
        *("box_iou", "box_giou", "boxes_matched", "labelled_boxes", "average_precision", "interval_iou"),
    }
)


@dataclass
class Marks:
    """The marks of one component for one row. gold: the most over all forms of its gold; others: by other golds."""

    prompt: Prompt
    gold: float
    silence: float
    others: dict[str, float] = field(default_factory=dict)

    @property
    def confused(self) -> list[str]:
        return [
            other
            for other, paid in self.others.items()
            if not math.isnan(self.gold) and paid >= self.gold > self.silence
        ]


def written(gold: Any) -> list[str]:
    """Returns the strings that a gold stands for: each one of a list of strings; of anything else its JSON."""
    if isinstance(gold, str):
        return [gold]
    if isinstance(gold, list | tuple) and gold and all(isinstance(one, str) for one in gold):
        return [*gold, ", ".join(gold)]
    return [json.dumps(gold, ensure_ascii=False, default=str)]


def components_to_try(rewards: RewardSet, *, custom: bool) -> list[RewardSpec]:
    """Returns the components that are tried: verifiers of golds and, where `custom`, the user's own rewards of single
    samples."""
    scopes = [component.scope for component in rewards.components]
    return [
        spec
        for spec, scope in zip(rewards.specs, scopes, strict=True)
        if spec.name in READING_GOLDS or (custom and is_custom(spec.name) and scope == "sample")
    ]


def tried(prompts: Sequence[Prompt], rewards: RewardSet, specs: Sequence[RewardSpec], limit: int) -> list[list[Marks]]:
    """Returns the marks of the components `specs`, each by the rows that it applies to. limit: tokens that a response
    may have."""
    columns, names = [rewards.specs.index(spec) for spec in specs], {spec.column for spec in specs}
    golds = [written(prompt.answer) for prompt in prompts]
    marks: list[list[Marks]] = [[] for _ in specs]
    for row, prompt in enumerate(prompts):
        forms = {gold: _forms(gold) for gold in golds[row]}
        others = {other: _forms(other) for other in _others(golds, row)}
        responses = ["", *(text for texts in (*forms.values(), *others.values()) for text in texts)]
        samples = [Sample(prompt, text, LENGTH if text else 1, False, limit) for text in responses]
        paid = rewards.score(samples, torch.full((len(samples),), row), only=names)
        for of_component, spec, column in zip(marks, specs, columns, strict=True):
            if applies(spec, prompt):
                by_text = dict(zip(responses, paid[:, column].tolist(), strict=True))
                best = {gold: _most(by_text[text] for text in texts) for gold, texts in (forms | others).items()}
                of_component.append(
                    Marks(prompt, _most(best[gold] for gold in forms), by_text[""], {o: best[o] for o in others})
                )
    return marks


def _forms(gold: str) -> list[str]:
    return [form.format(gold=gold) for form in FORMS]


def _others(golds: Sequence[list[str]], row: int) -> list[str]:
    """Returns the longest golds of other rows, in which a short one may be contained, that are not this row's."""
    same = {text.strip().lower() for text in golds[row]}
    further = [
        one for texts in (*golds[row + 1 :], *golds[:row]) for one in texts[:1] if one.strip().lower() not in same
    ]
    return sorted(dict.fromkeys(further), key=len, reverse=True)[:OTHERS]


def _most(values: Iterator[float]) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return max(scored, default=math.nan)


def probe_golds(spec: RewardSpec, rows: Sequence[Marks], key: str, reason: str = "") -> Iterator[Alarm]:
    """Finds what is wrong with the marks of one component. key: of the configuration, that holds it; reason: why it
    left rows unscored, where it said so."""
    name = spec.column
    yield from _unscored(name, rows, key, reason)
    scored = [row for row in rows if not math.isnan(row.gold)]
    paid = {mark for row in scored for mark in (row.gold, row.silence, *row.others.values())}
    if is_custom(spec.name) and paid == {0.0}:
        return  # it may ask for a form of its own
    if len(paid) == 1:
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: {name} pays the same, {scored[0].gold:g}, for golds, golds of other rows and silence (an "
            f"empty response), such as in {scored[0].prompt.id}: it tells nothing apart",
        )
        return
    yield from _silence(name, scored, key)
    yield from _confused(name, scored, key)


def _unscored(name: str, rows: Sequence[Marks], key: str, reason: str) -> Iterator[Alarm]:
    """Yields an alarm where the gold itself, as a response, is left unscored."""
    lost = [row for row in rows if math.isnan(row.gold)]
    if not lost:
        return
    what = f"{len(lost)} of {len(rows)} rows" if len(lost) < len(rows) else "every row"
    why = f": {reason}" if reason else "; the gold is in no form that it reads"
    yield Alarm(
        "rewards",
        "refused" if len(lost) == len(rows) else "warned",
        f"{key}: {name} leaves {what} unscored, such as {some(row.prompt.id for row in lost)} with the gold "
        f"{_short(lost[0].prompt.answer)}{why}",
    )


def _silence(name: str, rows: Sequence[Marks], key: str) -> Iterator[Alarm]:
    """Yields alarms where an empty response earns as much as the gold."""
    paid = [row for row in rows if row.silence >= row.gold and row.gold > 0]
    if paid:
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: {name} pays silence (an empty response) {paid[0].silence:g}, as much as the gold, in "
            f"{some(row.prompt.id for row in paid)}: saying nothing is learned",
        )
    never = [row for row in rows if row.gold <= row.silence and row not in paid]
    if never:
        yield Alarm(
            "rewards",
            "refused" if len(never) == len(rows) else "warned",
            f"{key}: {name} pays the gold no more than silence ({never[0].gold:g}), in whatever form, in "
            f"{len(never)} of {len(rows)} rows, such as {some(row.prompt.id for row in never)} with the gold "
            f"{_short(never[0].prompt.answer)}",
        )


def _confused(name: str, rows: Sequence[Marks], key: str) -> Iterator[Alarm]:
    """A component that pays any gold in any row looks at the form alone, which is not a fault."""
    if all(len(row.confused) == len(row.others) for row in rows):
        return
    confused = [row for row in rows if row.confused]
    if confused:
        one = confused[0]
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: {name} pays {_short(one.confused[0])}, the gold of another row, as much as the gold "
            f"{_short(one.prompt.answer)} of {some(row.prompt.id for row in confused)}",
        )


def _short(gold: Any) -> str:
    text = one_line(repr(gold))
    return text if len(text) <= 60 else f"{text[:57]}..."


def probe_rewards(
    prompts: Sequence[Prompt], rewards: RewardSet, key: str, limit: int, *, custom: bool
) -> tuple[list[Alarm], dict[str, list[Marks]]]:
    """Tries the golds of some prompts; returns what is wrong, and the marks by component and row. custom: with rewards
    of the user's own."""
    specs, reasons = components_to_try(rewards, custom=custom), Reasons()
    if not specs:
        return [], {}
    with reasons.collected():
        marks = tried(prompts, rewards, specs, limit)
    both = list(zip(specs, marks, strict=True))
    alarms = [alarm for spec, rows in both for alarm in probe_golds(spec, rows, key, reasons.of(spec.column))]
    return alarms, {spec.column: rows for spec, rows in both}


class Reasons(logging.Handler):
    """Collects what rewards say of samples that they could not score, by the reward's name."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(one_line(record.getMessage()))

    @contextmanager
    def collected(self) -> Iterator[None]:
        logger = logging.getLogger("mmrl.rewards")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)

    def of(self, name: str) -> str:
        """Returns the first reason of a reward, "" where it gave none."""
        return next((text for text in self.texts if text.startswith(f"reward {name} ")), "")
