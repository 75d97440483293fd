"""Adapters for reward functions with the signatures of TRL, verl and EasyR1."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from mmrl.errors import UserError
from mmrl.rewards.types import BatchReward, Reward, Score
from mmrl.rollouts import Prompt, Sample

Signature = Literal["mmrl", "trl", "trl_text", "verl", "easyr1"]
GOLDS = ("answer", "solution", "ground_truth")  # columns in which TRL's rewards expect the gold answer
TRL_ARGUMENTS = ("prompts", "completions")
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
INPUTS, INPUT = "reward_inputs", "reward_input"  # parameters of EasyR1: all inputs of a batch, or one


def detect_signature(function: Callable[..., Any]) -> Signature | None:
    """Returns the library whose signature a function's parameters have; None if it is none of these."""
    names = list(inspect.signature(function).parameters)
    if names[:1] == ["sample"]:
        return None
    if "completions" in names[:2]:
        return "trl"
    if "solution_str" in names[:2]:
        return "verl"
    return "easyr1" if names[:1] in ([INPUTS], [INPUT]) else None


def adapt(name: str, target: Callable[..., Any], signature: Signature, options: dict[str, Any]) -> Any:
    """Returns a reward that calls a function written for another library.

    name: the reward's name, for messages. target: the function, which also gets `options` as keyword arguments; or a
    class, built with `options`, whose objects are such functions.

    Raises ValueError for options that the function does not have, and if it does not have this signature.
    """
    if inspect.isclass(target):
        instance: Any = target(**options)
        target, options = instance, {}
    if not callable(target):
        raise ValueError(f"reward {name!r}: with signature: {signature} its class must define __call__")
    if inspect.iscoroutinefunction(target):
        raise ValueError(
            f"reward {name!r}: with signature: {signature} it must be a function that is not async; define it with "
            "def, not async def"
        )
    parameters = inspect.signature(target).parameters
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [key for key in options if key not in parameters and not has_kwargs]
    if unknown:
        raise ValueError(f"reward {name!r} has no option {unknown[0]!r}; known: {', '.join(parameters)}")
    _check_parameters(name, list(parameters), signature)
    function = partial(target, **options)
    if signature == "verl":
        needed = [key for key, p in parameters.items() if p.default is p.empty and p.kind in _NAMED]
        missing = [key for key in needed if key not in (*VERL_ARGUMENTS, *options)]
        if missing:
            raise ValueError(f"reward {name!r} needs option {', '.join(missing)}; write options: {{{missing[0]}: ...}}")
        arguments = VERL_ARGUMENTS if has_kwargs else tuple(key for key in VERL_ARGUMENTS if key in parameters)
        return VerlReward(function, arguments)
    if signature == "easyr1":
        return EasyR1Reward(function, at_once=INPUT not in parameters)
    named = {key: parameter for key, parameter in parameters.items() if parameter.kind in _NAMED}
    # the other parameters are columns of the rows; True: required, since there is no default
    columns = {key: p.default is p.empty for key, p in named.items() if key not in (*TRL_ARGUMENTS, *options)}
    return TrlReward(function, columns, has_kwargs, "prompts" in parameters or has_kwargs, signature == "trl")


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _check_parameters(name: str, parameters: Sequence[str], signature: Signature) -> None:
    """Raises ValueError for a function without the parameter that its signature requires."""
    required = {"verl": "solution_str", "trl": "completions", "trl_text": "completions"}.get(signature)
    if required is not None and required not in parameters:
        raise ValueError(
            f"reward {name!r}: signature: {signature} needs a function with the parameter {required}, but its "
            f"parameters are: {', '.join(parameters) or 'none'}; rename one, or choose another signature"
        )


class TrlReward(BatchReward):
    """A reward function of TRL: it gets `completions`, `prompts` and the rows' columns as lists, and returns a list.

    columns: the names of its other parameters, and whether each is required. takes_all: it has **kwargs and gets every
    column. prompts: it takes `prompts`. messages: completions are lists of one message, as TRL gives them for
    conversational prompts; otherwise strings. The gold answer is in `answer`, `solution` and `ground_truth`, unless the
    row has a column of that name.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self, function: Callable[..., Any], columns: Mapping[str, bool], takes_all: bool, prompts: bool, messages: bool
    ):
        """function: the reward function of TRL. columns: its other parameters, True where one is required. takes_all:
        it gets every column. prompts: it gets `prompts`. messages: completions and prompts are lists of messages, not
        strings."""
        self._function, self._columns, self._takes_all = function, columns, takes_all
        self._prompts, self._messages = prompts, messages

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """Calls the function and returns its scores. It gets lists: the completions, the prompts if it takes them, and
        the rows' columns that it takes, None where a row lacks one. Raises UserError for a required parameter that is
        not a column of any row."""
        rows = [_columns(sample.prompt) for sample in samples]
        available = list(dict.fromkeys(key for row in rows for key in row))
        for name, required in self._columns.items():
            if required and name not in available:
                raise UserError(
                    f"its parameter {name!r} is not a column of prompt {samples[0].prompt.id} "
                    f"(columns: {', '.join(available)}); give it a default, or set it in options"
                )
        names = available if self._takes_all else [name for name in self._columns if name in available]
        arguments = {name: [row.get(name) for row in rows] for name in names if name not in TRL_ARGUMENTS}
        if self._prompts:
            arguments["prompts"] = [
                _prompt_messages(sample.prompt) if self._messages else sample.prompt.text for sample in samples
            ]
        texts = [sample.response for sample in samples]
        completions = [_completion_messages(text) for text in texts] if self._messages else texts
        values: Sequence[Score] = self._function(completions=completions, **arguments)
        return values


class VerlReward:
    """A reward function of verl for one sample: it returns a number, or a dict with `score`. arguments: the parameters
    that it takes. `data_source` and `extra_info` are the row's columns, None if it has none."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[str]):
        self._function, self._arguments = function, arguments

    def __call__(self, sample: Sample) -> Score:
        """Calls the function with those of verl's arguments that it takes, and returns its score."""
        columns = sample.prompt.metadata
        values = {
            "data_source": columns.get("data_source"),
            "solution_str": sample.response,
            "ground_truth": sample.prompt.answer,
            "extra_info": columns.get("extra_info"),
        }
        return _number(self._function(**{name: values[name] for name in self._arguments}), "score")


class EasyR1Reward(BatchReward):
    """A reward function of EasyR1: it gets dicts of `response`, `response_length` and `ground_truth`, and returns a
    dict with `overall` for each. at_once: it gets the whole batch as a list; otherwise one dict at a time."""

    scope: Literal["sample"] = "sample"

    def __init__(self, function: Callable[..., Any], *, at_once: bool):
        self._function, self._at_once = function, at_once

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """Returns the key "overall" of each mapping that the function returns. Raises UserError if it returns no
        list."""
        inputs = [
            {
                "response": sample.response,
                "response_length": sample.response_length,
                "ground_truth": sample.prompt.answer,
            }
            for sample in samples
        ]
        values = self._function(inputs) if self._at_once else [self._function(item) for item in inputs]
        if not isinstance(values, list | tuple):
            raise UserError(f"it must return a list of mappings with 'overall', not {type(values).__name__}")
        return [_number(value, "overall") for value in values]


def _number(value: Any, key: str) -> Score:
    """Returns `value`, or its entry `key` if it is a dict. Raises UserError if the key is missing."""
    if isinstance(value, Mapping):
        if key not in value:
            raise UserError(f"it returned a mapping without {key!r} (keys: {', '.join(map(str, value)) or 'none'})")
        value = value[key]
    number: Score = value
    return number


def _columns(prompt: Prompt) -> dict[str, Any]:
    """Returns the columns of a prompt's row, with its gold answer under the usual names."""
    return {**dict.fromkeys(GOLDS, prompt.answer), **prompt.metadata}


def _completion_messages(text: str) -> list[dict[str, str]]:
    """Returns a completion as TRL's list of one message."""
    return [{"role": "assistant", "content": text}]


def _prompt_messages(prompt: Prompt) -> list[dict[str, str]]:
    """Returns a prompt as a list of messages."""
    conversation = [{"role": message.role, "content": message.text} for message in prompt.messages]
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return conversation or [*system, {"role": "user", "content": prompt.text}]


def check_signature(name: str, function: Reward) -> None:
    """Raises ValueError for a function with the signature of another library; the message says what to write in the
    configuration."""
    signature = detect_signature(function)
    if signature is not None:
        library = {"trl": "TRL", "verl": "verl", "easyr1": "EasyR1"}[signature]
        texts = "; signature: trl_text gives it completions as strings, not as messages" if signature == "trl" else ""
        raise ValueError(
            f"reward {name!r} has the parameters of a reward of {library} "
            f"({', '.join(inspect.signature(function).parameters)}); write "
            f'{{name: "{name}", signature: {signature}}}{texts}'
        )
