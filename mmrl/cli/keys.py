"""`mmrl config`: describe every key of a configuration."""

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

MODELS: list[dict[str, Any]] = [
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
    """A key of one kind of job. path: dotted, with `*` for an item of a list or mapping. when: the choices below the
    job's own kinds that bring the key, as "path.type=kind"."""

    path: str
    field: FieldInfo
    when: tuple[str, ...]


def describe_keys(wanted: str | None) -> list[str]:
    """Returns lines that describe a key; for a section, or for None, one line a key.

    Raises UserError naming the nearest key for an unknown one.
    """
    keys = all_keys()
    below = {path: meanings for path, meanings in keys.items() if wanted is None or path.startswith(f"{wanted}.")}
    if wanted in keys and not below:
        return [line for meaning in keys[wanted] for line in _in_full(wanted, meaning)]
    if not below:
        near = difflib.get_close_matches(wanted or "", keys, n=1, cutoff=0.3)
        raise UserError(f"there is no key {wanted}; {f'did you mean {near[0]}?' if near else 'mmrl config lists all'}")
    width = min(48, max(map(len, below)))
    return [f"{path:<{width}}  {meanings[0].field.description}" for path, meanings in below.items()]


@dataclass
class Meaning:
    """One meaning of a key, the jobs that have it ("model x algorithm"), and the choices that bring it."""

    field: FieldInfo
    jobs: list[str]
    kinds: list[str]


def all_keys() -> dict[str, list[Meaning]]:
    """Returns all meanings of every key by its path."""
    keys: dict[str, list[Meaning]] = {}
    for model in MODELS:
        for algorithm in ALGORITHMS:
            tree = {"model": {"type": model["type"]}, "algorithm": {"type": algorithm}}
            tree["action"] = {"head": {"type": model.get("head", "token")}}
            fixed = {"model": kind_of(ModelSettings, tree["model"]), "algorithm": kind_of(Algorithm, tree["algorithm"])}
            for key in _walk(job(tree), (), fixed=fixed):
                meanings = keys.setdefault(key.path, [])
                same = next((m for m in meanings if m.field.description == key.field.description), None)
                if same is None:
                    meanings.append(same := Meaning(key.field, [], []))
                same.jobs = list(dict.fromkeys([*same.jobs, f"{'/'.join(model.values())} x {algorithm}"]))
                same.kinds = list(dict.fromkeys([*same.kinds, " and ".join(key.when)]))
    return keys


def _walk(
    section: type[Section],
    path: tuple[str, ...],
    when: tuple[str, ...] = (),
    fixed: Mapping[str, type[Section]] = MappingProxyType({}),
) -> Iterator[Key]:
    """Yields the keys of a section and of the sections below it. fixed: kinds of choices that the job determines."""
    for name, field in section.model_fields.items():
        key_path = (*path, name)
        yield Key(".".join(key_path), field, when)
        for inner, step in _sections_of(field.annotation):
            below = (*key_path, *step)
            if name in fixed:
                assert issubclass(inner, Choice)
                yield Key(".".join((*below, "type")), _type_of(inner, inner.kinds), when)
                yield from (key for key in _walk(fixed[name], below, when) if key.path != f"{name}.type")
            elif not issubclass(inner, Choice):
                yield from _walk(inner, below, when)
            elif inner is not Schedule:
                extra = field.json_schema_extra
                kinds = extra.get("kinds") if isinstance(extra, dict) else None
                yield Key(".".join((*below, "type")), _type_of(inner, kinds or inner.kinds), when)  # type: ignore[arg-type]
                for kind in kinds or inner.kinds:  # type: ignore[union-attr]
                    kind_class = kind_of(inner, {"type": kind}, kinds=kinds or inner.kinds)  # type: ignore[arg-type]
                    named = (*when, f"{'.'.join(below)}.type={kind}")
                    itself = ".".join((*below, "type"))
                    yield from (key for key in _walk(kind_class, below, named) if key.path != itself)


def _type_of(base: type[Choice], kinds: Mapping[str, str]) -> FieldInfo:
    """Returns the `type` key of a choice."""
    default = base.model_fields["type"].default
    description = f"kind of {base.title}: {', '.join(kinds)}, or package.module:Class"
    return FieldInfo(annotation=str, default=default, description=description)


def _sections_of(annotation: object) -> list[tuple[type[Section], tuple[str, ...]]]:
    """Returns the sections that a key may hold, each with the path to it: (), or "*" for each list or mapping
    around."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [(annotation, ())] if issubclass(annotation, Section) else []
    inside = [item for argument in typing.get_args(annotation) for item in _sections_of(argument)]
    step = ("*",) if typing.get_origin(annotation) in (list, tuple, dict) else ()
    return [(section, (*step, *inner_path)) for section, inner_path in inside]


def _in_full(path: str, meaning: Meaning) -> list[str]:
    """Returns the lines on one key: description, type, default, unit, bounds, and the jobs that have it."""
    field = meaning.field
    default = "must be given" if field.is_required() else f"default {written(field.default)}"
    extra: Mapping[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    parts = [type_name(field.annotation), default, *([str(extra["unit"])] if "unit" in extra else [])]
    parts += [str(bound) for bound in field.metadata]
    parts += [f"{name}={value}" for name, value in extra.get("bounds", {}).items()]
    lines = [path, f"  {field.description}", f"  {', '.join(parts)}"]
    if all(meaning.kinds):
        lines.append(f"  with {', or '.join(meaning.kinds)}")
    everywhere = len(meaning.jobs) == len(MODELS) * len(ALGORITHMS)
    jobs = "all jobs" if everywhere else f"jobs (model x algorithm): {', '.join(_shortened(meaning.jobs))}"
    return [*lines, f"  in {jobs}"]


def _shortened(jobs: list[str]) -> list[str]:
    """Returns the jobs, with one entry for a model that has the key with every algorithm."""
    by_model: dict[str, list[str]] = {}
    for name in jobs:
        model, _, algorithm = name.partition(" x ")
        by_model.setdefault(model, []).append(algorithm)
    return [
        m if len(algorithms) == len(ALGORITHMS) else f"{m} x {'|'.join(algorithms)}"
        for m, algorithms in by_model.items()
    ]


def written(value: object) -> str:
    """Returns a default as it is written in YAML, in the short form."""
    short = plain(value, brief=True)
    return "null" if short is None else str(short)


def type_name(annotation: object) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        if "constant" in annotation.kinds:
            return f"a number, or one of {', '.join(kind for kind in annotation.kinds if kind != 'constant')}"
        return f"one of {', '.join(annotation.kinds)}, or package.module:Class"
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
