"""`mmrl methods`: describes every method, of mmrl or of a user.

A method here is a class that a configuration names by `type`: an algorithm, a loss term, a baseline, a sampler, ...
Classes that the same key may name inherit from one base class, such as Algorithm or Baseline.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from mmrl.algorithms.algorithm import Algorithm
from mmrl.algorithms.baselines.baseline import Baseline
from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.algorithms.scales.scale import Scale
from mmrl.algorithms.surrogates.surrogate import Surrogate
from mmrl.cli.keys import yaml_default
from mmrl.cli.not_compared import reason_of
from mmrl.cli.public_code import lines_of, note_of
from mmrl.collection.extra_sources import ExtraSource
from mmrl.config import job
from mmrl.errors import UserError
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, Section, SettingsError, kind_of, locate, make
from mmrl.sims.registry import SIMULATORS
from mmrl.terms.losses.kl import KLWeighting, OtherPolicy
from mmrl.terms.term import Mask, Shaper, Term

TREE = "text token of a tree"
# By kind of decision (the unit with one log-probability): the settings of a job whose policy makes such decisions.
DECISIONS: dict[str, dict[str, Any]] = {
    "text token": {"model": {"type": "vision_language"}},
    TREE: {"model": {"type": "vision_language"}, "rollout": {"extras": ["branches"]}},
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
    "action token": {
        "model": {"type": "vision_language_action"},
        "action": {"head": {"type": "token"}, "labels": {}},
    },
    "step of an action's flow": {"model": {"type": "vision_language_action"}, "action": {"head": {"type": "flow"}}},
    "action": {
        "model": {"type": "vision_language_action"},
        "action": {"head": {"type": "regression"}, "labels": {}},
    },
    "chunk of actions (contrast)": {
        "model": {"type": "vision_language_action"},
        "action": {"head": {"type": "flow", "likelihood": {"type": "contrast"}}},
    },
}
CLASSES_WITH_NEEDS = (Baseline, Transform, Scale, Surrogate, Term, Shaper, Mask, OtherPolicy, KLWeighting, ExtraSource)
# Recommended methods by the title of the choice and the name, each with the situation that it suits.
RECOMMENDED = {
    ("algorithm", "grpo"): "a first choice for text, images and actions",
    ("algorithm", "supervised"): "before RL, if the policy hardly ever gets a reward: learns from demonstrations",
    ("algorithm", "ppo"): "long episodes with late rewards: a critic assigns credit",
    ("algorithm", "contrast"): "diffusion models with any solver, without storing denoising steps (DiffusionNFT)",
    ("algorithm", "preference"): "rewards that rank well but have no scale",
    ("surrogate", "clip"): "several updates in a step: PPO's clip with a larger upper bound (DAPO)",
    ("baseline", "mean"): "groups of four or more rollouts for each prompt",
    ("scale of advantages", "none"): "prompts of unequal difficulty: no division by the standard deviation (Dr. GRPO)",
    ("loss term", "kl"): "long runs: the policy stays near the one that it started from",
    ("prompt sampler", "skip_flat"): "many prompts are always right or always wrong",
}
# All base classes of methods.
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
    "mmrl.terms.losses.distillation:DivergenceEstimator",
    "mmrl.measurements.teachers:Teacher",
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


def describe_methods(query: str | None) -> list[str]:
    """Returns the lines of `mmrl methods`: for None one line a method, recommended ones first, else all about `query`.

    query: the name of a shipped method, reward or simulator, or the user's own class as package.module:Class. Raises
    UserError, with the nearest name, if there is no such method, or if a simulator's package is not installed.
    """
    if query is None:
        return _overview()
    if ":" in query:
        method_class = locate(query, "methods")
        return describe_method(_base_of(method_class, query), query, method_class)
    matching = [method for method in methods() if method[1] == query]
    if matching:
        return [line for method in matching for line in describe_method(*method)]
    if query in rewards():
        return describe_reward(query)
    if query in SIMULATORS:
        return describe_simulator(query)
    names = [*(name for _, name, _ in methods()), *rewards(), *SIMULATORS]
    close = difflib.get_close_matches(query, names, n=1)
    raise UserError(f"there is no method {query}; {f'did you mean {close[0]}?' if close else 'mmrl methods lists all'}")


def _overview() -> list[str]:
    """Returns one line for each method: first the recommended ones, then a block for each base class."""
    blocks: dict[str, list[str]] = {}
    for base, name, method_class in methods():
        note = " (reconstructed)" if is_reconstructed(method_class) else note_of(base.title, name)
        blocks.setdefault(base.title, []).append(f"  {name:<18} {first_sentence(method_class)}{note}")
    blocks["reward"] = [f"  {name:<18} {first_sentence(builder)}" for name, builder in rewards().items()]
    blocks["simulator"] = [f"  {name:<18} mmrl methods {name} explains its task.options" for name in SIMULATORS]
    recommended = [f"  {name:<18} {title}: {when}" for (title, name), when in RECOMMENDED.items()]
    blocks = {"recommended, to begin with": recommended, **blocks}
    return [line for title, lines in blocks.items() for line in (f"{title}:", *lines, "")]


def is_reconstructed(method_class: type[Choice]) -> bool:
    """Returns True if a method was written from a paper's abstract or a summary, without the authors' code."""
    return class_variable(method_class, "source").startswith("reconstructed")


def _base_of(method_class: object, name: str) -> type[Choice]:
    """Returns the base class, out of CHOICES, that the user's class `name` inherits from. Raises UserError if there is
    none."""
    bases: list[type[Choice]] = [locate(path, "methods") for path in CHOICES]
    if isinstance(method_class, type):
        for base in bases:
            if issubclass(method_class, base):
                return base
    names = ", ".join(base.__name__ for base in bases)
    raise UserError(f"{name} is not a method; let it inherit from one of {names}")


def methods() -> Iterator[tuple[type[Choice], str, type[Choice]]]:
    """Yields base class, name and class of every shipped method."""
    for path in CHOICES:
        base: type[Choice] = locate(path, "methods")
        for name in base.kinds:
            yield base, name, kind_of(base, {"type": name})


def rewards() -> dict[str, Callable[..., Any]]:
    """Returns the functions that build the shipped rewards, by name of the reward."""
    from mmrl.rewards.registry import REWARDS  # imports torch: only when rewards are listed

    return REWARDS


def describe_reward(name: str) -> list[str]:
    """Returns lines about a shipped reward: its docstring and its options."""
    builder = rewards()[name]
    options = [str(parameter) for parameter in inspect.signature(builder).parameters.values()]
    return [*_head(name, "reward", builder), f"  options: {', '.join(options) or 'none'}"]


def describe_simulator(name: str) -> list[str]:
    """Returns lines about a shipped simulator: its docstring and its options. Raises UserError if its package is not
    installed."""
    try:
        simulator = locate(SIMULATORS[name], f"simulator {name}")
    except SettingsError as error:
        raise UserError(str(error)) from None
    options = list(inspect.signature(simulator).parameters.values())[1:]  # before them: the number of environments
    defaults = ", ".join(str(one.replace(annotation=inspect.Parameter.empty)) for one in options)
    return [*_head(name, "simulator", simulator), f"  task.options: {defaults}"]


def _head(name: str, title: str, builder: Callable[..., Any]) -> list[str]:
    """Returns the first lines about a class or function: where it is, and its docstring."""
    docstring = (inspect.getdoc(builder) or "").splitlines()
    origin = f"{builder.__module__}:{builder.__name__}"
    return [f"{name} ({title}, {origin})", *(f"  {line}".rstrip() for line in docstring)]


def first_sentence(function: Callable[..., Any]) -> str:
    """Returns the first sentence of the docstring of a function or class, without its full stop."""
    text = " ".join((inspect.getdoc(function) or "").split())
    return text.split(". ")[0].rstrip(".")


def describe_method(base: type[Choice], name: str, method_class: type[Choice]) -> list[str]:
    """Returns lines about a method: docstring, equation, source, test, kinds of decision, cost and options."""
    lines = [
        f"{name} ({base.title}, {method_class.__module__}:{method_class.__name__})",
        f"  {' '.join((method_class.__doc__ or '').split())}",
    ]
    if when := RECOMMENDED.get((base.title, name)):
        lines.append(f"  recommended: {when}")
    is_shipped = method_class.__module__.partition(".")[0] == "mmrl"  # a user's class inherits the name of mmrl's test
    for attribute in ("equation", "at_one_update", "source", *(["test"] if is_shipped else [])):
        if value := class_variable(method_class, attribute):
            lines.append(f"  {attribute.replace('_', ' ')}: {value}")
    compared = lines_of(base.title, name)
    lines += [f"  {line}" for line in compared]
    if is_shipped and not compared:
        reason = reason_of(base.title, name, reconstructed=is_reconstructed(method_class))
        lines.append(f"  not compared with public code: {reason}")
    if changes := class_variable(method_class, "changes"):
        lines.append(f"  changes: {', '.join(sorted(changes))}")
    if (needs := needs_of(method_class)) is not None:
        lines += [f"  decisions: {', '.join(decisions_of(needs)) or 'none'}", f"  cost: {cost_of(needs)}"]
    for key, field in method_class.model_fields.items():
        if key != "type":
            default = "" if field.is_required() else f" (default {yaml_default(field.default)})"
            lines.append(f"    {key}{default}: {field.description}")
    return lines


def needs_of(method_class: type[Choice]) -> Needs | None:
    """Returns what a method with its default options needs of the job; None for classes that declare no needs."""
    if not issubclass(method_class, (Algorithm, *CLASSES_WITH_NEEDS)):
        return None
    method: Any = _with_defaults(method_class)
    return method.base_needs if isinstance(method, Algorithm) else method.needs


def _with_defaults(method_class: type[Section]) -> Section:
    """Returns an instance of a section with default options, and an empty value for each required option."""
    required = {
        key: _empty_value(field.annotation) for key, field in method_class.model_fields.items() if field.is_required()
    }
    values: dict[str, Any] = required | ({"type": ""} if issubclass(method_class, Choice) else {})
    return method_class.model_construct(**values)


def _empty_value(annotation: Any) -> Any:
    """Returns an empty value for the annotation of an option: "", 0, [], the first of a Literal, and for a section one
    with default options."""
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        annotation = kind_of(annotation, {"type": next(iter(annotation.kinds))})
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return _with_defaults(annotation)
    value_type = typing.get_origin(annotation) or annotation
    return typing.get_args(annotation)[0] if value_type is typing.Literal else value_type()


@cache
def features_by_decision() -> dict[str, frozenset[Offer]]:
    """Returns, for each kind of decision, the features that methods may need of it, as its model declares them."""
    features = {}
    for name, tree in DECISIONS.items():
        tree = {"run_dir": "unset", "algorithm": {"type": "grpo"}, **tree}
        config = make(job(tree), tree)
        features[name] = config.offered.offers
    return features


def decisions_of(needs: Needs) -> list[str]:
    """Returns the kinds of decision that have all features in `needs`. Tokens of trees are listed only if the needs
    include "nodes"."""
    supporting = [name for name, features in features_by_decision().items() if needs.required <= features]
    return [name for name in supporting if name != TREE or "nodes" in needs.required]


def cost_of(needs: Needs) -> str:
    """Returns what a method adds to the cost of a step, such as further forward passes, as one line."""
    costs = []
    if needs.statistics:
        costs.append("a forward pass of every rollout before the advantages")
    elif needs.old:
        costs.append("a forward pass over the rollouts of later updates, if a step has several updates")
    if needs.reference:
        costs.append("a forward pass under the reference, and a copy of the trained weights")
    if needs.critic:
        costs.append("a critic, which is trained beside the policy")
    costs += dict.fromkeys(measurement.cost for measurement in needs.measurements if measurement.cost)
    if needs.whole_groups:
        costs.append("micro-batches that hold whole groups")
    return "; ".join(costs) or "no forward pass of its own"


def class_variable(method_class: type[Choice], attribute: str) -> str:
    """Returns a class variable of a method, its own or an inherited one; "" if it has none."""
    return next((vars(c)[attribute] for c in method_class.__mro__ if attribute in vars(c)), "")
