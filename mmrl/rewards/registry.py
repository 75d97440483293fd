"""Rewards by name: the ones that come with mmrl, and the user's own as 'package.module:function'."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mmrl.rewards import verifiers
from mmrl.rewards.isolated import IsolatedReward
from mmrl.rewards.verifiers import Reward

REWARDS: dict[str, Callable[..., Reward]] = {
    "exact_match": verifiers.exact_match,
    "math": verifiers.math,
    "multiple_choice": verifiers.multiple_choice,
    "numeric": verifiers.numeric,
    "think_answer": verifiers.think_answer,
    "answer_tag": verifiers.answer_tag,
    "box_iou": verifiers.box_iou,
    "box_giou": verifiers.box_giou,
    "overlong_penalty": verifiers.overlong_penalty,
    "random": verifiers.random,
}
ISOLATED = frozenset({"math"})  # may hang, so they never run in this process
DEADLINE_S = 5.0


def build(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    isolated: bool | None = None,
    deadline_s: float | None = None,
) -> Reward:
    """The reward `name` made with `options`; an isolated one runs in a worker process killed after `deadline_s`
    seconds.

    name: a key of REWARDS, or 'package.module:function' for a reward of one's own, `function(sample, **options)`.
    `isolated` None isolates those that are known to hang. Raises ValueError in one line for an unknown name, an unknown
    or missing option, and an option's value that the reward refuses.
    """
    options = dict(options or {})
    if deadline_s is not None and deadline_s <= 0:
        raise ValueError(f"reward {name!r}: deadline_s must be positive, not {deadline_s}")
    isolated = name in ISOLATED if isolated is None else isolated
    if deadline_s is not None and not isolated:
        raise ValueError(f"reward {name!r}: deadline_s needs isolated: true, for only a process can be stopped in time")
    if ":" in name:
        function = _load(name)
        _check_options(name, list(inspect.signature(function).parameters.values())[1:], options)
        reward: Reward = partial(function, **options)
    else:
        _check_name(name)
        _check_options(name, inspect.signature(REWARDS[name]).parameters.values(), options)
        reward = REWARDS[name](**options)
    return IsolatedReward(name, options, deadline_s or DEADLINE_S) if isolated else reward


def _check_name(name: str) -> None:
    if name not in REWARDS:
        known = f"{', '.join(REWARDS)}, or 'package.module:function'"
        raise ValueError(f"unknown reward {name!r}{_nearest(name, REWARDS)}; known: {known}")


def _load(name: str) -> Callable[..., float | None]:
    module_name, _, attribute = name.partition(":")
    try:
        members = vars(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        raise ValueError(f"reward {name!r}: {error}; is its folder on PYTHONPATH?") from error
    if attribute not in members:
        raise ValueError(f"reward {name!r}: module {module_name} has no {attribute!r}{_nearest(attribute, members)}")
    return members[attribute]


def _check_options(name: str, parameters: Iterable[inspect.Parameter], options: Mapping[str, Any]) -> None:
    parameters = list(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for key in options:
        if key not in known:
            valid = ", ".join(known) or "none"
            raise ValueError(f"reward {name!r} has no option {key!r}{_nearest(key, known)}; known: {valid}")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"reward {name!r} needs option {', '.join(missing)}")


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
