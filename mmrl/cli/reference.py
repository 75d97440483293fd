"""`mmrl config` and `mmrl methods`: describe every key of a configuration and every method."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo

from mmrl.algorithms.algorithm import Algorithm
from mmrl.algorithms.baselines.baseline import Baseline
from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.algorithms.scales.scale import Scale
from mmrl.algorithms.surrogates.surrogate import Surrogate
from mmrl.collection.extra_sources import ExtraSource
from mmrl.config import job
from mmrl.errors import UserError
from mmrl.policies.settings import ModelSettings
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule
from mmrl.settings import Choice, Section, kind_of, locate, make, plain
from mmrl.terms.losses.kl import KLWeighting, OtherPolicy
from mmrl.terms.term import Mask, Shaper, Term

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
# One kind of job for each kind of decision.
DECISIONS: dict[str, dict[str, Any]] = {
    "text token": {"model": {"type": "vision_language"}},
    "masked token": {"model": {"type": "discrete_diffusion"}},
    "noised token": {"model": {"type": "uniform_diffusion"}},
    "image with its gradient": {"model": {"type": "diffusion"}, "denoising": {"likelihood": {"type": "last_steps"}}},
    "code of an image": {"model": {"type": "autoregressive_image"}},
    "word or code": {"model": {"type": "autoregressive_image"}, "rollout": {"reasoning_length": 8}},
    "word or denoising step": {"model": {"type": "prompt_rewriting"}},
    "image of a few steps": {
        "model": {"type": "few_step_diffusion"},
        "denoising": {"likelihood": {"type": "contrast"}},
    },
    "denoising step": {"model": {"type": "diffusion"}},
    "denoising step from a shared state": {
        "model": {"type": "diffusion"},
        "denoising": {"likelihood": {"type": "chain", "shared_states": True}},
    },
    "image": {"model": {"type": "diffusion"}, "denoising": {"likelihood": {"type": "matching"}}},
    "image (contrast)": {"model": {"type": "diffusion"}, "denoising": {"likelihood": {"type": "contrast"}}},
    "action token": {"model": {"type": "vision_language_action"}, "action": {"head": {"type": "token"}}},
    "step of an action's flow": {"model": {"type": "vision_language_action"}, "action": {"head": {"type": "flow"}}},
    "action": {"model": {"type": "vision_language_action"}, "action": {"head": {"type": "regression"}}},
    "chunk of actions (contrast)": {
        "model": {"type": "vision_language_action"},
        "action": {"head": {"type": "flow", "likelihood": {"type": "contrast"}}},
    },
}
NEEDY = (Baseline, Transform, Scale, Surrogate, Term, Shaper, Mask, OtherPolicy, KLWeighting, ExtraSource)
ALGORITHMS = (
    *("grpo", "ppo", "supervised", "contrast", "matching", "offline_preference", "reward_gradient"),
    *("distribution_matching", "tilt_matching"),
)
# All base classes of choices.
CHOICES = (
    "mmrl.algorithms.algorithm:Algorithm",
    "mmrl.algorithms.surrogates.surrogate:Surrogate",
    "mmrl.algorithms.baselines.baseline:Baseline",
    "mmrl.algorithms.reward_transforms.transform:Transform",
    "mmrl.algorithms.reward_transforms.ranking:RankScore",
    "mmrl.algorithms.scales.scale:Scale",
    "mmrl.algorithms.scales.components:Components",
    "mmrl.terms.term:Term",
    "mmrl.terms.term:Shaper",
    "mmrl.terms.term:Mask",
    "mmrl.terms.losses.kl:OtherPolicy",
    "mmrl.terms.losses.kl:KLWeighting",
    "mmrl.terms.shapers.entropy:AdvantageBonus",
    "mmrl.algorithms.trace_decay:TraceDecay",
    "mmrl.prompts.views:View",
    "mmrl.samplers.settings:DenoisingTransition",
    "mmrl.samplers.settings:Window",
    "mmrl.samplers.settings:Tail",
    "mmrl.policies.diffusion.settings:ImageLikelihood",
    "mmrl.policies.discrete_diffusion.settings:MaskedLikelihood",
    "mmrl.policies.discrete_diffusion.settings:Order",
    "mmrl.policies.vla.settings:ActionLikelihood",
    "mmrl.policies.vla.settings:ActionHead",
    "mmrl.policies.settings:ModelSettings",
    "mmrl.evaluation.search:Search",
    "mmrl.generation.settings:GeneratorSettings",
    "mmrl.prompts.sampler:PromptSampler",
    "mmrl.collection.extra_sources:ExtraSource",
    "mmrl.schedules.schedule:Schedule",
    "mmrl.engine.settings:Optim",
    "mmrl.tasks.settings:TaskSettings",
    "mmrl.tasks.visual_qa.settings:Questions",
    "mmrl.tasks.image_generation.settings:Prompts",
    "mmrl.tasks.video_generation.settings:VideoPrompts",
    "mmrl.tasks.manipulation.settings:DemonstratedEpisodes",
)


@dataclass(frozen=True)
class Key:
    """A key of one kind of job. path: dotted, with `*` for an item of a list or mapping. when: the choices below the
    job's own kinds that bring the key, as "path.type=kind"."""

    path: str
    field: FieldInfo
    when: tuple[str, ...]


# --- keys ---


def describe_keys(wanted: str | None) -> list[str]:
    """Returns lines that describe a key; for a section, or for None, one line a key.

    Raises UserError naming the nearest key for an unknown one.
    """
    keys = _collected()
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


def _collected() -> dict[str, list[Meaning]]:
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


# --- methods ---


def describe_methods(wanted: str | None) -> list[str]:
    """Returns one line a method, or the full description of the method `wanted`.

    Raises UserError naming the nearest name for an unknown one.
    """
    shipped = list(methods())
    if wanted is not None:
        chosen = [(base, name, kind) for base, name, kind in shipped if name == wanted]
        if wanted in rewards():
            return _reward_in_full(wanted)
        if not chosen:
            near = difflib.get_close_matches(wanted, [*(name for _, name, _ in shipped), *rewards()], n=1)
            raise UserError(
                f"there is no method {wanted}; {f'did you mean {near[0]}?' if near else 'mmrl methods lists all'}"
            )
        return [line for method in chosen for line in _method_in_full(*method)]
    by_title: dict[str, list[str]] = {}
    for base, name, kind in shipped:
        by_title.setdefault(base.title, []).append(f"  {name:<18} {first_sentence(kind)}")
    by_title["reward"] = [f"  {name:<18} {first_sentence(builder)}" for name, builder in rewards().items()]
    return [line for title, lines in by_title.items() for line in (f"{title}:", *lines, "")]


def methods() -> Iterator[tuple[type[Choice], str, type[Choice]]]:
    """Yields base class, name and class of every shipped kind of every choice."""
    for where in CHOICES:
        base: type[Choice] = locate(where, "methods")
        for name in base.kinds:
            yield base, name, kind_of(base, {"type": name})


def rewards() -> dict[str, Callable[..., Any]]:
    """Returns the builders of the shipped rewards by name. Importing them imports torch, hence the late import."""
    from mmrl.rewards.registry import REWARDS

    return REWARDS


def _reward_in_full(name: str) -> list[str]:
    builder = rewards()[name]
    options = [str(p) for p in inspect.signature(builder).parameters.values()]
    text = (inspect.getdoc(builder) or "").splitlines()
    return [f"{name} (reward, {builder.__module__}:{builder.__name__})", *(f"  {line}".rstrip() for line in text),
            f"  options: {', '.join(options) or 'none'}"]  # fmt: skip


def first_sentence(kind: Callable[..., Any]) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split())
    return text.split(". ")[0].rstrip(".")


def _method_in_full(base: type[Choice], name: str, kind: type[Choice]) -> list[str]:
    lines = [f"{name} ({base.title}, {kind.__module__}:{kind.__name__})", f"  {' '.join((kind.__doc__ or '').split())}"]
    for attribute in ("equation", "source", "test"):
        if value := vars_of(kind, attribute):
            lines.append(f"  {attribute}: {value}")
    if (needs := needs_of(kind)) is not None:
        lines += [f"  decisions: {', '.join(decisions_of(needs)) or 'none'}", f"  cost: {cost_of(needs)}"]
    for key, field in kind.model_fields.items():
        if key != "type":
            default = "" if field.is_required() else f" (default {written(field.default)})"
            lines.append(f"    {key}{default}: {field.description}")
    return lines


def needs_of(kind: type[Choice]) -> Needs | None:
    """Returns what a method needs with its default options; None for choices that are no part of an algorithm."""
    if not issubclass(kind, (Algorithm, *NEEDY)):
        return None
    method: Any = kind.model_construct(type="")
    return method.base_needs if isinstance(method, Algorithm) else method.needs


@cache
def offers() -> dict[str, frozenset[Offer]]:
    """Returns what each kind of decision supports, as its model declares it."""
    offered = {}
    for name, tree in DECISIONS.items():
        tree = {"run_dir": "unset", "algorithm": {"type": "grpo"}, **tree}
        config = make(job(tree), tree)
        offered[name] = config.model.capabilities(config).offers
    return offered


def decisions_of(needs: Needs) -> list[str]:
    """Returns the kinds of decision that support a method."""
    return [name for name, offered in offers().items() if needs.required <= offered]


def cost_of(needs: Needs) -> str:
    """Returns the model passes that a method adds to a step."""
    costs = []
    if needs.statistics:
        costs.append("a forward pass of every rollout before the advantages")
    elif needs.old:
        costs.append("a forward pass of the rollouts that are not learned from first, where a step has several updates")
    if needs.reference:
        costs.append("a forward pass under the reference, and a copy of the trained weights")
    if needs.critic:
        costs.append("a critic, which is trained beside the policy")
    costs += dict.fromkeys(measurement.cost for measurement in needs.measurements if measurement.cost)
    if needs.whole_groups:
        costs.append("micro-batches that hold whole groups")
    return "; ".join(costs) or "no pass of its own"


def vars_of(kind: type[Choice], attribute: str) -> str:
    """Returns a class variable of a choice, which may be inherited; "" where it has none."""
    return next((vars(c)[attribute] for c in kind.__mro__ if attribute in vars(c)), "")
