"""What every key of a configuration means, and what every method is: `mmrl config` and `mmrl methods`."""

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
# Everything that comes in kinds, by where it is.
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
    """A key as one kind of job has it. path: with `*` for an item of a list or a name of one's own. when: the kinds
    that it belongs to, below the job's own."""

    path: str
    field: FieldInfo
    when: tuple[str, ...]


# --- keys ---


def describe_keys(asked: str | None) -> list[str]:
    """Lines that say what a key means; of a section, or of everything, one line a key.

    Raises UserError naming the nearest key if there is no such one.
    """
    found = _collected()
    below = {path: meanings for path, meanings in found.items() if asked is None or path.startswith(f"{asked}.")}
    if asked in found and not below:
        return [line for meaning in found[asked] for line in _in_full(asked, meaning)]
    if not below:
        near = difflib.get_close_matches(asked or "", found, n=1, cutoff=0.3)
        raise UserError(f"there is no key {asked}; {f'did you mean {near[0]}?' if near else 'mmrl config lists all'}")
    width = min(48, max(map(len, below)))
    return [f"{path:<{width}}  {meanings[0].field.description}" for path, meanings in below.items()]


@dataclass
class Meaning:
    """What a key means, in which jobs, and with which kinds below those."""

    field: FieldInfo
    jobs: list[str]
    kinds: list[str]


def _collected() -> dict[str, list[Meaning]]:
    """By path, every meaning of a key."""
    found: dict[str, list[Meaning]] = {}
    for model in MODELS:
        for algorithm in ALGORITHMS:
            tree = {"model": {"type": model["type"]}, "algorithm": {"type": algorithm}}
            tree["action"] = {"head": {"type": model.get("head", "token")}}
            fixed = {"model": kind_of(ModelSettings, tree["model"]), "algorithm": kind_of(Algorithm, tree["algorithm"])}
            for key in _walk(job(tree), (), fixed=fixed):
                meanings = found.setdefault(key.path, [])
                same = next((m for m in meanings if m.field.description == key.field.description), None)
                if same is None:
                    meanings.append(same := Meaning(key.field, [], []))
                same.jobs = list(dict.fromkeys([*same.jobs, f"{'/'.join(model.values())} x {algorithm}"]))
                same.kinds = list(dict.fromkeys([*same.kinds, " and ".join(key.when)]))
    return found


def _walk(
    section: type[Section],
    path: tuple[str, ...],
    when: tuple[str, ...] = (),
    fixed: Mapping[str, type[Section]] = MappingProxyType({}),
) -> Iterator[Key]:
    """fixed: keys whose kind is given by the job."""
    for name, field in section.model_fields.items():
        here = (*path, name)
        yield Key(".".join(here), field, when)
        for inner, step in _sections_of(field.annotation):
            below = (*here, *step)
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
                    own = kind_of(inner, {"type": kind}, kinds=kinds or inner.kinds)  # type: ignore[arg-type]
                    named = (*when, f"{'.'.join(below)}.type={kind}")
                    itself = ".".join((*below, "type"))
                    yield from (key for key in _walk(own, below, named) if key.path != itself)


def _type_of(base: type[Choice], kinds: Mapping[str, str]) -> FieldInfo:
    """The key that says which kind a choice is."""
    default = base.model_fields["type"].default
    description = f"kind of {base.title}: {', '.join(kinds)}, or package.module:Class"
    return FieldInfo(annotation=str, default=default, description=description)


def _sections_of(annotation: Any) -> list[tuple[type[Section], tuple[str, ...]]]:
    """The sections that a key may hold, and what stands for the step to one of them: nothing, or `*`."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [(annotation, ())] if issubclass(annotation, Section) else []
    inside = [found for argument in typing.get_args(annotation) for found in _sections_of(argument)]
    step = ("*",) if typing.get_origin(annotation) in (list, tuple, dict) else ()
    return [(section, (*step, *rest)) for section, rest in inside]


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
    """A model that has a key with every algorithm is named once."""
    by_model: dict[str, list[str]] = {}
    for name in jobs:
        model, _, algorithm = name.partition(" x ")
        by_model.setdefault(model, []).append(algorithm)
    return [m if len(found) == len(ALGORITHMS) else f"{m} x {'|'.join(found)}" for m, found in by_model.items()]


def written(value: Any) -> str:
    """A default as one would write it."""
    short = plain(value, brief=True)
    return "null" if short is None else str(short)


def type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        if "constant" in annotation.kinds:
            return f"a number, or one of {', '.join(kind for kind in annotation.kinds if kind != 'constant')}"
        return f"one of {', '.join(annotation.kinds)}, or package.module:Class"
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


# --- methods ---


def describe_methods(asked: str | None) -> list[str]:
    """One line a method; of one that is asked for by name, all that is known of it.

    Raises UserError naming the nearest name if there is no such one.
    """
    found = list(methods())
    if asked is not None:
        chosen = [(base, name, kind) for base, name, kind in found if name == asked]
        if asked in rewards():
            return _reward_in_full(asked)
        if not chosen:
            near = difflib.get_close_matches(asked, [*(name for _, name, _ in found), *rewards()], n=1)
            raise UserError(
                f"there is no method {asked}; {f'did you mean {near[0]}?' if near else 'mmrl methods lists all'}"
            )
        return [line for method in chosen for line in _method_in_full(*method)]
    by_title: dict[str, list[str]] = {}
    for base, name, kind in found:
        by_title.setdefault(base.title, []).append(f"  {name:<18} {first_sentence(kind)}")
    by_title["reward"] = [f"  {name:<18} {first_sentence(made)}" for name, made in rewards().items()]
    return [line for title, lines in by_title.items() for line in (f"{title}:", *lines, "")]


def methods() -> Iterator[tuple[type[Choice], str, type[Choice]]]:
    """Every shipped kind of everything that comes in kinds: its base, its name and its class."""
    for where in CHOICES:
        base: type[Choice] = locate(where, "methods")
        for name in base.kinds:
            yield base, name, kind_of(base, {"type": name})


def rewards() -> dict[str, Callable[..., Any]]:
    """What makes each shipped reward, by its name. They bring torch along, which the rest of this does without."""
    from mmrl.rewards.registry import REWARDS

    return REWARDS


def _reward_in_full(name: str) -> list[str]:
    made = rewards()[name]
    options = [str(p) for p in inspect.signature(made).parameters.values()]
    text = (inspect.getdoc(made) or "").splitlines()
    return [f"{name} (reward, {made.__module__}:{made.__name__})", *(f"  {line}".rstrip() for line in text),
            f"  options: {', '.join(options) or 'none'}"]  # fmt: skip


def first_sentence(kind: Callable[..., Any]) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split())
    return text.split(". ")[0].rstrip(".")


def _method_in_full(base: type[Choice], name: str, kind: type[Choice]) -> list[str]:
    lines = [f"{name} ({base.title}, {kind.__module__}:{kind.__name__})", f"  {' '.join((kind.__doc__ or '').split())}"]
    for word in ("equation", "source", "test"):
        if value := vars_of(kind, word):
            lines.append(f"  {word}: {value}")
    if (needs := needs_of(kind)) is not None:
        lines += [f"  decisions: {', '.join(decisions_of(needs)) or 'none'}", f"  cost: {cost_of(needs)}"]
    for key, field in kind.model_fields.items():
        if key != "type":
            default = "" if field.is_required() else f" (default {written(field.default)})"
            lines.append(f"    {key}{default}: {field.description}")
    return lines


def needs_of(kind: type[Choice]) -> Needs | None:
    """What a method needs by its defaults; None for what is no part of an algorithm."""
    if not issubclass(kind, (Algorithm, *NEEDY)):
        return None
    made: Any = kind.model_construct(type="")
    return made.own_needs if isinstance(made, Algorithm) else made.needs


@cache
def offers() -> dict[str, frozenset[Offer]]:
    """What each kind of decision supports, as the models of the house declare it."""
    found = {}
    for name, tree in DECISIONS.items():
        tree = {"run_dir": "unset", "algorithm": {"type": "grpo"}, **tree}
        config = make(job(tree), tree)
        found[name] = config.model.capabilities(config).offers
    return found


def decisions_of(needs: Needs) -> list[str]:
    """The kinds of decision that support a method."""
    return [name for name, offered in offers().items() if needs.required <= offered]


def cost_of(needs: Needs) -> str:
    """What a method adds to a step, in passes of the model."""
    found = []
    if needs.statistics:
        found.append("a forward pass of every rollout before the advantages")
    elif needs.old:
        found.append("a forward pass of the rollouts that are not learned from first, where a step has several updates")
    if needs.reference:
        found.append("a forward pass under the reference, and a copy of the trained weights")
    if needs.critic:
        found.append("a critic, which is trained beside the policy")
    found += dict.fromkeys(measurement.cost for measurement in needs.measurements if measurement.cost)
    if needs.whole_groups:
        found.append("micro-batches that hold whole groups")
    return "; ".join(found) or "no pass of its own"


def vars_of(kind: type[Choice], word: str) -> str:
    """A class variable of a choice, which a base may have set."""
    return next((vars(c)[word] for c in kind.__mro__ if word in vars(c)), "")
