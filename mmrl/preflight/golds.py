"""Tests rewards with golds as responses. A gold is the reference answer of a row of data.

A reward that fits its data gives its maximum to the row's own gold, and less to an empty response and to the golds of
other rows.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.preflight.alarms import Alarm, abbreviate, one_line
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rewards.compose import applies
from mmrl.rewards.registry import is_custom
from mmrl.rollouts import Prompt, Sample

NUM_OTHER_GOLDS = 3  # golds of other rows that are scored as responses to a row
RESPONSE_TEMPLATES = (
    "{gold}",
    "<answer>{gold}</answer>",
    "<think>I look.</think><answer>{gold}</answer>",
    "\\boxed{{{gold}}}",
)
RESPONSE_LENGTH = 8  # length in tokens that rewards are told; the responses are not tokenized
# Shipped rewards that compare a response in one of these templates with the gold; none of them asks a judge or server.
GOLD_VERIFIERS = frozenset(
    {
        *("exact_match", "math", "multiple_choice", "numeric", "several_choices", "abstention"),
        *("box_iou", "box_giou", "boxes_matched", "labelled_boxes", "average_precision", "interval_iou"),
    }
)


@dataclass
class GoldScores:
    """The values of one reward for responses to one prompt.

    gold: the highest value of the prompt's gold over all response templates, NaN if it is not scored. empty: the value
    of an empty response. other_golds: the highest value of each gold of another row.
    """

    prompt: Prompt
    gold: float
    empty: float
    other_golds: dict[str, float] = field(default_factory=dict)

    @property
    def confused_with(self) -> list[str]:
        """The golds of other rows that get at least the value of the prompt's own gold."""
        return [
            other
            for other, value in self.other_golds.items()
            if not math.isnan(self.gold) and value >= self.gold > self.empty
        ]


def gold_strings(gold: Any) -> list[str]:
    """Returns a gold as text: a string as it is; a list of strings as each of them and all, joined by commas; anything
    else as JSON."""
    if isinstance(gold, str):
        return [gold]
    if isinstance(gold, list | tuple) and gold and all(isinstance(item, str) for item in gold):
        return [*gold, ", ".join(gold)]
    return [json.dumps(gold, ensure_ascii=False, default=str)]


def components_to_try(rewards: RewardSet, *, custom: bool) -> list[RewardSpec]:
    """Returns the rewards that are tested: those in GOLD_VERIFIERS, and if `custom` the user's own rewards of single
    samples."""
    scopes = [component.scope for component in rewards.components]
    return [
        spec
        for spec, scope in zip(rewards.specs, scopes, strict=True)
        if spec.name in GOLD_VERIFIERS or (custom and is_custom(spec.name) and scope == "sample")
    ]


def score_golds(
    prompts: Sequence[Prompt], rewards: RewardSet, specs: Sequence[RewardSpec], limit: int
) -> list[list[GoldScores]]:
    """Scores golds as responses. Returns one list for each reward in `specs`, with an item for each prompt that the
    reward applies to.

    limit: the maximum response length in tokens, for rewards that depend on it.
    """
    columns, names = [rewards.specs.index(spec) for spec in specs], {spec.column for spec in specs}
    golds = [gold_strings(prompt.answer) for prompt in prompts]
    scores: list[list[GoldScores]] = [[] for _ in specs]
    for row, prompt in enumerate(prompts):
        own = {gold: _responses(gold) for gold in golds[row]}
        others = {gold: _responses(gold) for gold in _other_golds(golds, row)}
        responses = ["", *(text for texts in (*own.values(), *others.values()) for text in texts)]
        samples = [Sample(prompt, text, RESPONSE_LENGTH if text else 1, False, limit) for text in responses]
        values = rewards.score(samples, torch.full((len(samples),), row), only=names)  # [response, component]
        for component_scores, spec, column in zip(scores, specs, columns, strict=True):
            if not applies(spec, prompt):
                continue
            by_text = dict(zip(responses, values[:, column].tolist(), strict=True))
            best = {gold: _max_scored(by_text[text] for text in texts) for gold, texts in (own | others).items()}
            own_best = _max_scored(best[gold] for gold in own)
            component_scores.append(GoldScores(prompt, own_best, by_text[""], {gold: best[gold] for gold in others}))
    return scores


def _responses(gold: str) -> list[str]:
    """Returns the responses that contain a gold, one for each template."""
    return [template.format(gold=gold) for template in RESPONSE_TEMPLATES]


def _other_golds(golds: Sequence[list[str]], row: int) -> list[str]:
    """Returns up to NUM_OTHER_GOLDS golds of other rows that differ from the row's own. The longest come first: they
    may contain a short own gold."""
    own = {text.strip().lower() for text in golds[row]}
    others = [
        text for texts in (*golds[row + 1 :], *golds[:row]) for text in texts[:1] if text.strip().lower() not in own
    ]
    return sorted(dict.fromkeys(others), key=len, reverse=True)[:NUM_OTHER_GOLDS]


def _max_scored(values: Iterator[float]) -> float:
    """Returns the maximum of the values that are not NaN; NaN if all are."""
    scored = [value for value in values if not math.isnan(value)]
    return max(scored, default=math.nan)


def probe_golds(spec: RewardSpec, rows: Sequence[GoldScores], key: str, reason: str = "") -> Iterator[Alarm]:
    """Yields alarms about the scores of one reward.

    key: the configuration key that holds the reward. reason: what the reward logged about unscored rows.
    """
    name = spec.column
    yield from _unscored(name, rows, key, reason)
    scored = [row for row in rows if not math.isnan(row.gold)]
    values = {value for row in scored for value in (row.gold, row.empty, *row.other_golds.values())}
    if is_custom(spec.name) and values == {0.0}:
        return  # it may ask for a response format of its own
    if len(values) == 1:
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: {name} gives the same value, {scored[0].gold:g}, to golds, golds of other rows and an empty "
            f"response, such as in {scored[0].prompt.id}: it rewards all responses alike; check its options and the "
            "golds",
        )
        return
    yield from _empty_rewarded(name, scored, key)
    yield from _confused(name, scored, key)


def _unscored(name: str, rows: Sequence[GoldScores], key: str, reason: str) -> Iterator[Alarm]:
    """Yields an alarm if the gold itself, as a response, is left unscored (NaN)."""
    unscored = [row for row in rows if math.isnan(row.gold)]
    if not unscored:
        return
    share = f"{len(unscored)} of {len(rows)} rows" if len(unscored) < len(rows) else "every row"
    cause = f": {reason}" if reason else "; the reward cannot read a gold of this form"
    yield Alarm(
        "rewards",
        "refused" if len(unscored) == len(rows) else "warned",
        f"{key}: {name} leaves {share} unscored, such as {abbreviate(row.prompt.id for row in unscored)} with the gold "
        f"{_short(unscored[0].prompt.answer)}{cause}",
    )


def _empty_rewarded(name: str, rows: Sequence[GoldScores], key: str) -> Iterator[Alarm]:
    """Yields alarms if an empty response gets at least the value of the gold."""
    rewarded = [row for row in rows if row.empty >= row.gold and row.gold > 0]
    if rewarded:
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: {name} gives an empty response {rewarded[0].empty:g}, as much as the gold, in "
            f"{abbreviate(row.prompt.id for row in rewarded)}: the policy would learn to say nothing",
        )
    unrewarded = [row for row in rows if row.gold <= row.empty and row not in rewarded]
    if unrewarded:
        yield Alarm(
            "rewards",
            "refused" if len(unrewarded) == len(rows) else "warned",
            f"{key}: {name} gives the gold no more than an empty response ({unrewarded[0].gold:g}), in any format, in "
            f"{len(unrewarded)} of {len(rows)} rows, such as {abbreviate(row.prompt.id for row in unrewarded)} with "
            f"the gold {_short(unrewarded[0].prompt.answer)}",
        )


def _confused(name: str, rows: Sequence[GoldScores], key: str) -> Iterator[Alarm]:
    """Yields an alarm if golds of other rows score as high as the row's own gold.

    No alarm if that holds for all golds in all rows: then the reward judges the format alone.
    """
    if all(len(row.confused_with) == len(row.other_golds) for row in rows):
        return
    confused = [row for row in rows if row.confused_with]
    if confused:
        example = confused[0]
        yield Alarm(
            "rewards",
            "warned",
            f"{key}: {name} gives {_short(example.confused_with[0])}, the gold of another row, as much as the gold "
            f"{_short(example.prompt.answer)} of {abbreviate(row.prompt.id for row in confused)}",
        )


def _short(gold: Any) -> str:
    """Returns the repr of a gold, cut to 60 characters."""
    text = one_line(repr(gold))
    return text if len(text) <= 60 else f"{text[:57]}..."


def probe_rewards(
    prompts: Sequence[Prompt], rewards: RewardSet, key: str, limit: int, *, custom: bool
) -> tuple[list[Alarm], dict[str, list[GoldScores]]]:
    """Scores the golds of some prompts as responses. Returns alarms, and the scores by the reward's column.

    key: the configuration key that holds the rewards. limit: the maximum response length. custom: whether to include
    the user's own rewards.
    """
    specs, reasons = components_to_try(rewards, custom=custom), Reasons()
    if not specs:
        return [], {}
    with reasons.collected():
        scores = score_golds(prompts, rewards, specs, limit)
    by_spec = list(zip(specs, scores, strict=True))
    alarms = [alarm for spec, rows in by_spec for alarm in probe_golds(spec, rows, key, reasons.first(spec.column))]
    return alarms, {spec.column: rows for spec, rows in by_spec}


class Reasons(logging.Handler):
    """Collects the warnings that rewards log about samples that they cannot score."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(one_line(record.getMessage()))

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Context in which warnings of rewards are collected."""
        logger = logging.getLogger("mmrl.rewards")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)

    def first(self, name: str) -> str:
        """Returns the first warning of the reward `name`; "" if there is none."""
        return next((text for text in self.texts if text.startswith(f"reward {name} ")), "")
