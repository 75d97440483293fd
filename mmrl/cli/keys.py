"""`mmrl config`: describes every key of a configuration.

Which keys a configuration has depends on its model and its algorithm. Here a job is a pair of a model type and an
algorithm.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo

from mmrl.algorithms.algorithm import Algorithm
from mmrl.config import job
from mmrl.errors import UserError
from mmrl.policies.settings import ModelSettings
from mmrl.schedules.schedule import Schedule
from mmrl.settings import Choice, Section, kind_of, plain

MODEL_TREES: list[dict[str, Any]] = [
    {"type": "vision_language"},
    {"type": "diffusion"},
    {"type": "prompt_rewriting"},
    {"type": "few_step_diffusion"},
    {"type": "discrete_diffusion"},
    {"type": "uniform_diffusion"},
    {"type": "autoregressive_image"},
    *({"type": "vision_language_action", "head": head} for head in ("token", "flow", "regression", "bridge")),
]
ALGORITHMS = (
    *("grpo", "ppo", "supervised", "contrast", "matching", "offline_preference", "reward_gradient"),
    *("distribution_matching", "tilt_matching", "distillation"),
)


@dataclass(frozen=True)
class Key:
    """A key of the configuration of one job.

    path: dotted, with `*` for an item of a list or mapping. conditions: further choices that the key needs, as
    "path.type=NAME".
    """

    path: str
    field: FieldInfo
    conditions: tuple[str, ...]


def describe_keys(name: str | None) -> list[str]:
    """Returns the lines of `mmrl config`: all about the key `name`, or one line for each key below a section; None
    stands for the whole configuration.

    Raises UserError, with the nearest key, if there is no key `name`.
    """
    keys = all_keys()
    inside = {path: meanings for path, meanings in keys.items() if name is None or path.startswith(f"{name}.")}
    if name in keys and not inside:
        return [line for meaning in keys[name] for line in _meaning_lines(name, meaning)]
    if not inside:
        close = difflib.get_close_matches(name or "", keys, n=1, cutoff=0.3)
        raise UserError(f"there is no key {name}; {f'did you mean {close[0]}?' if close else 'mmrl config lists all'}")
    width = min(48, max(map(len, inside)))
    return [f"{path:<{width}}  {meanings[0].field.description}" for path, meanings in inside.items()]


@dataclass
class Meaning:
    """One of the meanings that a key has in different jobs.

    jobs: in which the key has this meaning, as "model x algorithm". conditions: the sets of further choices under which
    the key exists, each as one text "path.type=NAME and path.type=NAME".
    """

    field: FieldInfo
    jobs: list[str]
    conditions: list[str]


def all_keys() -> dict[str, list[Meaning]]:
    """Returns the meanings of every key, over all pairs of model and algorithm, by the key's dotted path."""
    keys: dict[str, list[Meaning]] = {}
    for model in MODEL_TREES:
        for algorithm in ALGORITHMS:
            tree = {"model": {"type": model["type"]}, "algorithm": {"type": algorithm}}
            tree["action"] = {"head": {"type": model.get("head", "token")}}
            fixed = {"model": kind_of(ModelSettings, tree["model"]), "algorithm": kind_of(Algorithm, tree["algorithm"])}
            for key in _walk(job(tree), (), fixed=fixed):
                meanings = keys.setdefault(key.path, [])
                meaning = next((m for m in meanings if m.field.description == key.field.description), None)
                if meaning is None:
                    meaning = Meaning(key.field, [], [])
                    meanings.append(meaning)
                meaning.jobs = list(dict.fromkeys([*meaning.jobs, f"{'/'.join(model.values())} x {algorithm}"]))
                meaning.conditions = list(dict.fromkeys([*meaning.conditions, " and ".join(key.conditions)]))
    return keys


def _walk(
    section: type[Section],
    path: tuple[str, ...],
    conditions: tuple[str, ...] = (),
    fixed: Mapping[str, type[Section]] = MappingProxyType({}),
) -> Iterator[Key]:
    """Yields the keys of a section and of the sections inside it.

    path: the keys that lead to the section. conditions: choices that lead to it. fixed: by key, the class of a choice
    that the job determines; a choice of any other key is walked once for each of its types.
    """
    for name, field in section.model_fields.items():
        key_path = (*path, name)
        yield Key(".".join(key_path), field, conditions)
        for inner, item_path in _sections_of(field.annotation):
            inner_path = (*key_path, *item_path)
            type_path = ".".join((*inner_path, "type"))
            if name in fixed:
                assert issubclass(inner, Choice)
                yield Key(type_path, _type_field(inner, inner.kinds), conditions)
                yield from (key for key in _walk(fixed[name], inner_path, conditions) if key.path != f"{name}.type")
            elif not issubclass(inner, Choice):
                yield from _walk(inner, inner_path, conditions)
            elif inner is not Schedule:
                extra = field.json_schema_extra
                kinds = extra.get("kinds") if isinstance(extra, dict) else None
                yield Key(type_path, _type_field(inner, kinds or inner.kinds), conditions)  # type: ignore[arg-type]
                for kind in kinds or inner.kinds:  # type: ignore[union-attr]
                    kind_class = kind_of(inner, {"type": kind}, kinds=kinds or inner.kinds)  # type: ignore[arg-type]
                    chosen = (*conditions, f"{type_path}={kind}")
                    yield from (key for key in _walk(kind_class, inner_path, chosen) if key.path != type_path)


def _type_field(base: type[Choice], kinds: Mapping[str, str]) -> FieldInfo:
    """Returns the description of the key `type` of a choice. kinds: the names that it may take."""
    default = base.model_fields["type"].default
    description = f"kind of {base.title}: {', '.join(kinds)}, or package.module:Class"
    return FieldInfo(annotation=str, default=default, description=description)


def _sections_of(annotation: object) -> list[tuple[type[Section], tuple[str, ...]]]:
    """Returns the section classes in the annotation of a key, each with its path inside the value: () for the value
    itself, and one "*" for each list or mapping around the section."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [(annotation, ())] if issubclass(annotation, Section) else []
    sections = [item for argument in typing.get_args(annotation) for item in _sections_of(argument)]
    container = ("*",) if typing.get_origin(annotation) in (list, tuple, dict) else ()
    return [(section, (*container, *inner_path)) for section, inner_path in sections]


def _meaning_lines(path: str, meaning: Meaning) -> list[str]:
    """Returns the lines about one key: description, type, default, unit, bounds, and the jobs that have it."""
    field = meaning.field
    default = "must be given" if field.is_required() else f"default {yaml_default(field.default)}"
    extra: Mapping[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    parts = [type_name(field.annotation), default, *([str(extra["unit"])] if "unit" in extra else [])]
    parts += [str(bound) for bound in field.metadata]
    parts += [f"{name}={value}" for name, value in extra.get("bounds", {}).items()]
    lines = [path, f"  {field.description}", f"  {', '.join(parts)}"]
    if all(meaning.conditions):
        lines.append(f"  with {', or '.join(meaning.conditions)}")
    in_all_jobs = len(meaning.jobs) == len(MODEL_TREES) * len(ALGORITHMS)
    jobs = "all jobs" if in_all_jobs else f"jobs (model x algorithm): {', '.join(_grouped_by_model(meaning.jobs))}"
    return [*lines, f"  in {jobs}"]


def _grouped_by_model(jobs: list[str]) -> list[str]:
    """Joins "model x algorithm" entries of one model: "model" if it is paired with every algorithm, else "model x
    algorithm|algorithm"."""
    algorithms_by_model: dict[str, list[str]] = {}
    for name in jobs:
        model, _, algorithm = name.partition(" x ")
        algorithms_by_model.setdefault(model, []).append(algorithm)
    return [
        model if len(algorithms) == len(ALGORITHMS) else f"{model} x {'|'.join(algorithms)}"
        for model, algorithms in algorithms_by_model.items()
    ]


def yaml_default(value: object) -> str:
    """Returns the default of a key as YAML text in its short form; "null" for None."""
    short = plain(value, brief=True)
    return "null" if short is None else str(short)


def type_name(annotation: object) -> str:
    """Returns the type of a key in words, such as "a number, or one of linear, cosine"."""
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        if "constant" in annotation.kinds:
            return f"a number, or one of {', '.join(kind for kind in annotation.kinds if kind != 'constant')}"
        return f"one of {', '.join(annotation.kinds)}, or package.module:Class"
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
