"""The gold is tried: full marks for it in the asked form, the least for silence, and not its marks for other golds."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmrl.preflight.alarms import Alarm, one_line, some
from mmrl.rollouts import Prompt, Sample

OTHERS = 3  # golds of other rows that a row is tried with
FORMS = ("{gold}", "<answer>{gold}</answer>", "<think>I look.</think><answer>{gold}</answer>", "\\boxed{{{gold}}}")
ONLY_FORM = frozenset({"think_answer", "answer_tag", "overlong_penalty", "tokens_per_forward", "random", "sections"})
LENGTH = 8  # tokens that a tried response is said to have
Score = Callable[[Sequence[Sample], Tensor], Tensor]  # [sample, component]


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
    """Returns the texts that a gold stands for: of a list of texts any of them, of anything else its JSON."""
    if isinstance(gold, str):
        return [gold]
    if isinstance(gold, list | tuple) and gold and all(isinstance(one, str) for one in gold):
        return [*gold, ", ".join(gold)]
    return [json.dumps(gold, ensure_ascii=False, default=str)]


def tried(prompts: Sequence[Prompt], score: Score, names: Sequence[str], limit: int) -> dict[str, list[Marks]]:
    """Returns the marks of every component, by row. limit: tokens that a response may have."""
    golds = [written(prompt.answer) for prompt in prompts]
    marks: dict[str, list[Marks]] = {name: [] for name in names}
    for row, prompt in enumerate(prompts):
        others = _others(golds, row)
        texts: list[tuple[str | None, str]] = [(None, form) for gold in golds[row] for form in _forms(gold)]
        texts += [(other, form) for other in others for form in _forms(other)]
        responses = ["", *(text for _, text in texts)]
        samples = [Sample(prompt, text, LENGTH if text else 1, False, limit) for text in responses]
        paid = score(samples, torch.full((len(samples),), row))
        for column, name in enumerate(names):
            values = paid[1:, column].tolist()
            best = Marks(
                prompt, _most(v for v, (o, _) in zip(values, texts, strict=True) if o is None), float(paid[0, column])
            )
            for other in others:
                best.others[other] = _most(v for v, (o, _) in zip(values, texts, strict=True) if o == other)
            marks[name].append(best)
    return marks


def _forms(gold: str) -> list[str]:
    return [form.format(gold=gold) for form in FORMS]


def _others(golds: Sequence[list[str]], row: int) -> list[str]:
    """Returns golds of other rows that are not this one's, the longest and the next ones."""
    own = {text.strip().lower() for text in golds[row]}
    further = [g for other in (*golds[row + 1 :], *golds[:row]) for g in other[:1] if g.strip().lower() not in own]
    return sorted(dict.fromkeys(further), key=len, reverse=True)[:OTHERS]


def _most(values: Iterator[float]) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return max(scored, default=math.nan)


def probe_golds(marks: dict[str, list[Marks]], key: str, reasons: dict[str, str] | None = None) -> Iterator[Alarm]:
    """Says what is wrong with marks. key: of the configuration, that holds the components; reasons: why a component
    left rows unscored, where it said so."""
    for name, rows in marks.items():
        yield from _unscored(name, rows, key, (reasons or {}).get(name, ""))
        scored = [row for row in rows if not math.isnan(row.gold)]
        if not scored or name in ONLY_FORM:
            continue
        if len({paid for row in scored for paid in (row.gold, row.silence, *row.others.values())}) == 1:
            yield Alarm(
                "rewards",
                "warned",
                f"{key}: {name} pays the same, {scored[0].gold:g}, for golds, golds of other rows and silence (an "
                f"empty response), such as in {scored[0].prompt.id}: it tells nothing apart",
            )
            continue
        yield from _silence(name, scored, key)
        yield from _confused(name, scored, key)


def _unscored(name: str, rows: Sequence[Marks], key: str, reason: str) -> Iterator[Alarm]:
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
    """A component that pays any gold in any row looks at the form alone, which is no fault."""
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


class Reasons(logging.Handler):
    """Collects what rewards say of samples that they could not score, by the reward's name."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(one_line(record.getMessage()))

    def by_name(self, names: Sequence[str]) -> dict[str, str]:
        return {name: text for name in names for text in reversed(self.texts) if name in text}
