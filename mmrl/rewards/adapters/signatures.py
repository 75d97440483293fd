"""Rewards with the signatures of TRL, verl and EasyR1."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from mmrl.errors import UserError
from mmrl.rewards.types import BatchReward, Reward, Score
from mmrl.rollouts import Prompt, Sample

Signature = Literal["mmrl", "trl", "trl_text", "verl", "easyr1"]
GOLDS = ("answer", "solution", "ground_truth")  # names under which rewards of TRL look for the gold
GIVEN_BY_TRL = ("prompts", "completions")
GIVEN_BY_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
INPUTS, INPUT = "reward_inputs", "reward_input"  # of EasyR1: all of a batch, or one


def resembling(function: Callable[..., Any]) -> Signature | None:
    """Returns the signature of another library that a function's parameters have, None where they have none."""
    names = list(inspect.signature(function).parameters)
    if names[:1] == ["sample"]:
        return None
    if "completions" in names[:2]:
        return "trl"
    if "solution_str" in names[:2]:
        return "verl"
    return "easyr1" if names[:1] in ([INPUTS], [INPUT]) else None


def adapted(name: str, target: Callable[..., Any], signature: Signature, options: dict[str, Any]) -> Any:
    """Returns the reward around a function of another library, or around what a class of such functions makes.

    Raises ValueError for options that it does not take, and for what is not a function of that signature.
    """
    if inspect.isclass(target):
        instance: Any = target(**options)
        target, options = instance, {}
    if not callable(target) or inspect.iscoroutinefunction(target):
        raise ValueError(f"reward {name!r}: signature: {signature} is for a function that returns its values")
    parameters = inspect.signature(target).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    unknown = [key for key in options if key not in parameters and not takes_all]
    if unknown:
        raise ValueError(f"reward {name!r} has no option {unknown[0]!r}; known: {', '.join(parameters)}")
    _check_parameters(name, list(parameters), signature)
    function = partial(target, **options)
    if signature == "verl":
        needed = [key for key, one in parameters.items() if one.default is one.empty and one.kind in _NAMED]
        missing = [key for key in needed if key not in (*GIVEN_BY_VERL, *options)]
        if missing:
            raise ValueError(f"reward {name!r} needs option {', '.join(missing)}")
        arguments = GIVEN_BY_VERL if takes_all else tuple(key for key in GIVEN_BY_VERL if key in parameters)
        return VerlReward(function, arguments)
    if signature == "easyr1":
        return EasyR1Reward(function, at_once=INPUT not in parameters)
    further = {key: one for key, one in parameters.items() if one.kind in _NAMED}
    columns = {key: one.default is one.empty for key, one in further.items() if key not in (*GIVEN_BY_TRL, *options)}
    return TrlReward(function, columns, takes_all, "prompts" in parameters or takes_all, signature == "trl")


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _check_parameters(name: str, parameters: Sequence[str], signature: Signature) -> None:
    """Raises ValueError for a function without the parameter that its signature needs."""
    wanted = {"verl": "solution_str", "trl": "completions", "trl_text": "completions"}.get(signature)
    if wanted is not None and wanted not in parameters:
        raise ValueError(
            f"reward {name!r}: signature: {signature} is for a function with the parameter {wanted}; it has "
            f"{', '.join(parameters) or 'none'}"
        )


class TrlReward(BatchReward):
    """A function of TRL, which gets `completions`, `prompts` and the rows' columns as lists, and returns a list.

    columns: its further parameters, and whether each must be given. messages: completions are lists of one message, as
    TRL gives them for prompts that are messages; otherwise texts. The gold is in `answer`, `solution` and
    `ground_truth`, where the row has no other column of that name.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self, function: Callable[..., Any], columns: Mapping[str, bool], takes_all: bool, prompts: bool, messages: bool
    ):
        self._function, self._columns, self._takes_all = function, columns, takes_all
        self._prompts, self._messages = prompts, messages

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """Raises UserError for a parameter that no row has a column for."""
        rows = [_columns(sample.prompt) for sample in samples]
        available = list(dict.fromkeys(key for row in rows for key in row))
        for name, must in self._columns.items():
            if must and name not in available:
                raise UserError(
                    f"its parameter {name!r} is not a column of prompt {samples[0].prompt.id} "
                    f"(columns: {', '.join(available)}); give it a default, or set it in options"
                )
        names = available if self._takes_all else [name for name in self._columns if name in available]
        arguments = {name: [row.get(name) for row in rows] for name in names if name not in GIVEN_BY_TRL}
        if self._prompts:
            arguments["prompts"] = [
                _asked(sample.prompt) if self._messages else sample.prompt.text for sample in samples
            ]
        completions = [_reply(sample.response) if self._messages else sample.response for sample in samples]
        values: Sequence[Score] = self._function(completions=completions, **arguments)
        return values


class VerlReward:
    """A function of verl of one sample, which returns a number or a mapping with `score`. arguments: the
    parameters that it takes. `data_source` and `extra_info` are the row's columns, None where it has none."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[str]):
        self._function, self._arguments = function, arguments

    def __call__(self, sample: Sample) -> Score:
        columns = sample.prompt.metadata
        facts = {
            "data_source": columns.get("data_source"),
            "solution_str": sample.response,
            "ground_truth": sample.prompt.answer,
            "extra_info": columns.get("extra_info"),
        }
        return _number(self._function(**{name: facts[name] for name in self._arguments}), "score")


class EasyR1Reward(BatchReward):
    """A function of EasyR1, which gets mappings of `response`, `response_length` and `ground_truth`, and returns one
    with `overall` for each. at_once: it gets all of a batch in a list."""

    scope: Literal["sample"] = "sample"

    def __init__(self, function: Callable[..., Any], *, at_once: bool):
        self._function, self._at_once = function, at_once

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        inputs = [
            {"response": one.response, "response_length": one.response_length, "ground_truth": one.prompt.answer}
            for one in samples
        ]
        values = self._function(inputs) if self._at_once else [self._function(one) for one in inputs]
        if not isinstance(values, list | tuple):
            raise UserError(f"it must return a list of mappings with 'overall', not {type(values).__name__}")
        return [_number(value, "overall") for value in values]


def _number(value: Any, key: str) -> Score:
    """Returns the score, or that under `key` of a mapping. Raises UserError where the key is missing."""
    if isinstance(value, Mapping):
        if key not in value:
            raise UserError(f"it returned a mapping without {key!r} (keys: {', '.join(map(str, value)) or 'none'})")
        value = value[key]
    number: Score = value
    return number


def _columns(prompt: Prompt) -> dict[str, Any]:
    return {**dict.fromkeys(GOLDS, prompt.answer), **prompt.metadata}


def _reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _asked(prompt: Prompt) -> list[dict[str, str]]:
    conversation = [{"role": message.role, "content": message.text} for message in prompt.messages]
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return conversation or [*system, {"role": "user", "content": prompt.text}]


def check_signature(name: str, function: Reward) -> None:
    """Raises ValueError for a function of another library, with the line to write."""
    signature = resembling(function)
    if signature is not None:
        library = {"trl": "TRL", "verl": "verl", "easyr1": "EasyR1"}[signature]
        texts = "; signature: trl_text gives it completions as strings, not as messages" if signature == "trl" else ""
        raise ValueError(
            f"reward {name!r} has the parameters of a reward of {library} "
            f"({', '.join(inspect.signature(function).parameters)}); write "
            f'{{name: "{name}", signature: {signature}}}{texts}'
        )
