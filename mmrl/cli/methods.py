"""`mmrl methods`: describe every method, of mmrl or of a user."""

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
from mmrl.cli.keys import written
from mmrl.collection.extra_sources import ExtraSource
from mmrl.config import job
from mmrl.errors import UserError
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, Section, kind_of, locate, make
from mmrl.terms.losses.kl import KLWeighting, OtherPolicy
from mmrl.terms.term import Mask, Shaper, Term

TREE = "text token of a tree"
# One kind of job for each kind of decision.
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
NEEDY = (Baseline, Transform, Scale, Surrogate, Term, Shaper, Mask, OtherPolicy, KLWeighting, ExtraSource)
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


def describe_methods(wanted: str | None) -> list[str]:
    """Returns one line a method, those to begin with first, or the full description of the method `wanted`.

    wanted: a name, or a class of one's own as package.module:Class. Raises UserError naming the nearest name for an
    unknown one.
    """
    if wanted is None:
        return _listed()
    if ":" in wanted:
        kind = locate(wanted, "methods")
        return describe_method(_base_of(kind, wanted), wanted, kind)
    chosen = [(base, name, kind) for base, name, kind in methods() if name == wanted]
    if chosen:
        return [line for method in chosen for line in describe_method(*method)]
    if wanted in rewards():
        return describe_reward(wanted)
    near = difflib.get_close_matches(wanted, [*(name for _, name, _ in methods()), *rewards()], n=1)
    raise UserError(f"there is no method {wanted}; {f'did you mean {near[0]}?' if near else 'mmrl methods lists all'}")


def _listed() -> list[str]:
    """Returns the lines of all methods: those to begin with, then a block for each choice."""
    blocks: dict[str, list[str]] = {}
    for base, name, kind in methods():
        where = compared_with(kind).partition("@")[0].rpartition("/")[2]
        note = " (reconstructed)" if is_reconstructed(kind) else f" (variant: as {where})" if where else ""
        blocks.setdefault(base.title, []).append(f"  {name:<18} {first_sentence(kind)}{note}")
    blocks["reward"] = [f"  {name:<18} {first_sentence(builder)}" for name, builder in rewards().items()]
    begin = [f"  {name:<18} {title}: {when}" for (title, name), when in RECOMMENDED.items()]
    described = {"recommended, to begin with": begin, **blocks}
    return [line for title, lines in described.items() for line in (f"{title}:", *lines, "")]


def is_reconstructed(kind: type[Choice]) -> bool:
    """Returns True where a method was built from an abstract or a summary, without the authors' code."""
    return vars_of(kind, "source").startswith("reconstructed")


def compared_with(kind: type[Choice]) -> str:
    """Returns the public code whose numbers a method gives, as REPOSITORY@COMMIT; empty where it was not compared, as
    for one that inherits from a method that was."""
    return str(vars(kind)["compared"]) if "compared" in vars(kind) else ""


def _base_of(kind: object, name: str) -> type[Choice]:
    """Returns the kind of choice that a class of one's own is. Raises UserError where it is none."""
    bases: list[type[Choice]] = [locate(where, "methods") for where in CHOICES]
    if isinstance(kind, type):
        for base in bases:
            if issubclass(kind, base):
                return base
    raise UserError(f"{name} is not a method: it inherits from none of {', '.join(base.__name__ for base in bases)}")


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


def describe_reward(name: str) -> list[str]:
    """Returns the description of a shipped reward: its docstring and its options."""
    builder = rewards()[name]
    options = [str(p) for p in inspect.signature(builder).parameters.values()]
    text = (inspect.getdoc(builder) or "").splitlines()
    return [f"{name} (reward, {builder.__module__}:{builder.__name__})", *(f"  {line}".rstrip() for line in text),
            f"  options: {', '.join(options) or 'none'}"]  # fmt: skip


def first_sentence(kind: Callable[..., Any]) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split())
    return text.split(". ")[0].rstrip(".")


def describe_method(base: type[Choice], name: str, kind: type[Choice]) -> list[str]:
    """Returns the description of a method: docstring, equation, source, test, decisions, cost and options."""
    lines = [f"{name} ({base.title}, {kind.__module__}:{kind.__name__})", f"  {' '.join((kind.__doc__ or '').split())}"]
    if when := RECOMMENDED.get((base.title, name)):
        lines.append(f"  recommended: {when}")
    for attribute in ("equation", "at_one_update", "source", "test"):
        if value := vars_of(kind, attribute):
            lines.append(f"  {attribute.replace('_', ' ')}: {value}")
    if where := compared_with(kind):
        lines.append(f"  variant: equal by value to {where} (tests/joints/test_public_numbers.py)")
    if changes := vars_of(kind, "changes"):
        lines.append(f"  changes: {', '.join(sorted(changes))}")
    if (needs := needs_of(kind)) is not None:
        lines += [f"  decisions: {', '.join(decisions_of(needs)) or 'none'}", f"  cost: {cost_of(needs)}"]
    for key, field in kind.model_fields.items():
        if key != "type":
            default = "" if field.is_required() else f" (default {written(field.default)})"
            lines.append(f"    {key}{default}: {field.description}")
    return lines


def needs_of(kind: type[Choice]) -> Needs | None:
    """Returns what a method needs with its default options; None for choices that are not part of an algorithm."""
    if not issubclass(kind, (Algorithm, *NEEDY)):
        return None
    method: Any = _sketch(kind)
    return method.base_needs if isinstance(method, Algorithm) else method.needs


def _sketch(kind: type[Section]) -> Section:
    """Returns settings with their defaults, and something empty for each option that must be given."""
    required = {key: _empty(field.annotation) for key, field in kind.model_fields.items() if field.is_required()}
    values: dict[str, Any] = required | ({"type": ""} if issubclass(kind, Choice) else {})
    return kind.model_construct(**values)


def _empty(annotation: Any) -> Any:
    """Returns an empty value of an option's type; of a choice its first kind."""
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        annotation = kind_of(annotation, {"type": next(iter(annotation.kinds))})
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return _sketch(annotation)
    kind = typing.get_origin(annotation) or annotation
    return typing.get_args(annotation)[0] if kind is typing.Literal else kind()


@cache
def offers() -> dict[str, frozenset[Offer]]:
    """Returns what each kind of decision supports, as its model declares it."""
    offered = {}
    for name, tree in DECISIONS.items():
        tree = {"run_dir": "unset", "algorithm": {"type": "grpo"}, **tree}
        config = make(job(tree), tree)
        offered[name] = config.offered.offers
    return offered


def decisions_of(needs: Needs) -> list[str]:
    """Returns the kinds of decision that support a method; trees only where it needs them."""
    supported = [name for name, offered in offers().items() if needs.required <= offered]
    return [name for name in supported if name != TREE or "nodes" in needs.required]


def cost_of(needs: Needs) -> str:
    """Returns the model passes that a method adds to a step."""
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
    return "; ".join(costs) or "no pass of its own"


def vars_of(kind: type[Choice], attribute: str) -> str:
    """Returns a class variable of a choice, which may be inherited; "" where it has none."""
    return next((vars(c)[attribute] for c in kind.__mro__ if attribute in vars(c)), "")
