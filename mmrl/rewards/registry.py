"""Builds rewards by name: those of mmrl, and custom ones as 'package.module:function' or 'package.module:Class'."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mmrl.children.limits import Limits
from mmrl.errors import describe_error
from mmrl.rewards import credit, guards, intervals, mathematics, turns, twins, verifiers
from mmrl.rewards.adapters.signatures import Signature, adapt, check_signature
from mmrl.rewards.judges import pairs, process, soft_tifa, text, visual, written
from mmrl.rewards.models import deqa, image_reward, vlm_reward
from mmrl.rewards.programs import charts, solids, unit_tests
from mmrl.rewards.services import http
from mmrl.rewards.services.failures import Failures
from mmrl.rewards.services.isolated import WORKERS, IsolatedReward
from mmrl.rewards.types import BatchReward, Reward, load_object, nearest
from mmrl.rewards.visual import boxes, clip, edits, findings, framewise, geneval, images, pointing, sets, viewing
from mmrl.runtime.user_code import construction_watched

REWARDS: dict[str, Callable[..., Reward | BatchReward]] = {
    "exact_match": verifiers.exact_match,
    "math": mathematics.math,
    "multiple_choice": verifiers.multiple_choice,
    "numeric": verifiers.numeric,
    "think_answer": verifiers.think_answer,
    "answer_tag": verifiers.answer_tag,
    "box_iou": boxes.box_iou,
    "box_giou": boxes.box_giou,
    "boxes_matched": boxes.boxes_matched,
    "labelled_boxes": boxes.labelled_boxes,
    "average_precision": boxes.average_precision,
    "point_inside": pointing.point_inside,
    "interface_action": pointing.interface_action,
    "region_iou": pointing.region_iou,
    "interval_iou": intervals.interval_iou,
    "several_choices": credit.several_choices,
    "abstention": credit.abstention,
    "majority": credit.Majority,
    "tool_calls": credit.tool_calls,
    "boxes_in_reasoning": credit.boxes_in_reasoning,
    "sections": credit.sections,
    "process": process.process,
    "findings_named": findings.findings_named,
    "overlong_penalty": verifiers.overlong_penalty,
    "tokens_per_forward": verifiers.tokens_per_forward,
    "random": verifiers.random,
    "environment_return": turns.environment_return,
    "tool_bonus": turns.tool_bonus,
    "jpeg_compressibility": images.jpeg_compressibility,
    "jpeg_incompressibility": images.jpeg_incompressibility,
    "classifier_logp": images.ClassifierLogp,
    "set_distance": sets.SetDistance,
    "ocr": images.ocr,
    "geneval": geneval.GenEval,
    "brisque": viewing.brisque,
    "safe_for_work": viewing.safe_for_work,
    "clip_similarity": clip.clip_similarity,
    "aesthetic": clip.Aesthetic,
    "pickscore": clip.pickscore,
    "hpsv2": clip.hpsv2,
    "vlm_judge": visual.VlmJudge,
    "vlm_preference": visual.VlmPreference,
    "vlm_reference": pairs.ReferenceJudge,
    "edit_judge": pairs.EditJudge,
    "written_score": written.WrittenScore,
    "soft_tifa": soft_tifa.SoftTifa,
    "answer_judge": text.AnswerJudge,
    "rubric_judge": text.RubricJudge,
    "consistency_judge": text.ConsistencyJudge,
    "caption_judge": text.CaptionJudge,
    "evidence_judge": text.EvidenceJudge,
    "http": http.HttpReward,
    "guard": guards.GuardReward,
    "twin_margin": twins.TwinMargin,
    "framewise": framewise.Framewise,
    "source_similarity": edits.source_similarity,
    "image_reward": image_reward.ImageReward,
    "vlm_reward": vlm_reward.VlmReward,
    "deqa": deqa.DeQA,
    "unit_tests": unit_tests.UnitTests,
    "chart_code": charts.ChartCode,
    "svg_code": charts.SvgCode,
    "solid_code": solids.SolidCode,
}
ISOLATED = frozenset({"math"})  # may hang, so they run in processes of their own
NEEDS_OWN_PYTHON = frozenset({"deqa"})  # run only under another interpreter: older packages, code from the hub
DEADLINE_S = 5.0  # seconds for one sample, default for isolated rewards
CONSTRUCTION_S = 600.0  # seconds for constructing a custom reward, which may load a model
LOWEST = {"box_giou": -1.0, "overlong_penalty": -1.0, "abstention": -1.0}  # lowest score by reward; others: 0


def build(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    isolated: bool | None = None,
    deadline_s: float | None = None,
    workers: int | None = None,
    limits: Limits | None = None,
    failures: Failures | None = None,
    signature: Signature = "mmrl",
) -> Reward | BatchReward:
    """Builds the reward `name` with `options`.

    name: a key of REWARDS, or a custom reward: 'package.module:function' for `function(sample, **options)`, or
    'package.module:Class' for a `BatchReward` made by `Class(**options)`. signature: the library whose signature a
    custom function has. isolated: run it in separate processes; None: only rewards that are known to hang. The other
    arguments are for an isolated reward. deadline_s: seconds for one sample, after which its process is killed.
    workers: the number of processes; limits: what each may use. failures: counts the samples that failed.

    Raises ValueError for an unknown name, an unknown or missing option, an option's value that the reward refuses, a
    batched reward with isolated=True, and workers or limits of a reward that is not isolated.
    """
    options = dict(options or {})
    isolated = name in ISOLATED if isolated is None else isolated
    if not isolated and (workers is not None or limits is not None):
        raise ValueError(f"reward {name!r}: workers and limits need isolated: true, which runs it in processes")
    if workers is not None and workers < 1:
        raise ValueError(f"reward {name!r}: workers must be at least 1, not {workers}")
    reward: Reward | BatchReward
    target = load_object(name) if is_custom(name) else None
    if target is not None and not callable(target):
        raise ValueError(f"reward {name!r} is neither a function nor a class, but {type(target).__name__}")
    if signature != "mmrl":
        if target is None:
            raise ValueError(
                f"reward {name!r}: signature: {signature} is for your own function, package.module:function; remove it"
            )
        if isolated:
            raise ValueError(f"reward {name!r}: signature: {signature} works only without isolated: true; remove one")
        return _build_checked(name, partial(adapt, name, target, signature, options))
    if target is not None and not inspect.isclass(target):
        check_signature(name, target)
        # [1:]: without the parameter `sample`
        _check_options(name, list(inspect.signature(target).parameters.values())[1:], options)
        reward = partial(target, **options)
    else:
        if target is None:
            _check_name(name)
        factory: Callable[..., Any] = target or REWARDS[name]
        _check_options(name, _option_parameters(factory), options)
        reward = _build_checked(name, partial(factory, **options))
    if isinstance(reward, BatchReward) and isolated:
        raise ValueError(f"reward {name!r} scores batches; remove isolated: true, which is for rewards of one sample")
    if not isolated:
        return reward
    # The reward above was built to check its options; workers build their own.
    return IsolatedReward(
        name, options, deadline_s or DEADLINE_S, workers=workers or WORKERS, limits=limits, failures=failures
    )


def _build_checked(name: str, factory: Callable[[], Any]) -> Any:
    """Calls `factory` and returns the reward. Raises ValueError, which names the reward, if a custom reward raises any
    exception."""
    try:
        if not is_custom(name):
            return factory()
        limit_name = f"the {CONSTRUCTION_S:g} s that a constructor may take"
        with construction_watched(
            f"reward {name!r} (task.rewards)", CONSTRUCTION_S, limit_name, "correct its __init__"
        ):
            return factory()
    except ValueError as error:
        text = " ".join(str(error).split())
        raise ValueError(text if text.startswith(f"reward {name!r}") else f"reward {name!r}: {text}") from error
    except Exception as error:  # any fault of a custom class
        if not is_custom(name):
            raise
        raise ValueError(f"reward {name!r} cannot be built: {describe_error(error)}") from error


def is_custom(name: str) -> bool:
    """Returns whether a reward is the user's, not one of REWARDS."""
    return ":" in name


def _check_name(name: str) -> None:
    """Raises ValueError for a name that is not in REWARDS."""
    if name not in REWARDS:
        valid = f"{', '.join(REWARDS)}, or 'package.module:function'"
        raise ValueError(f"unknown reward {name!r}{nearest(name, REWARDS)}; known: {valid}")


def _option_parameters(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a factory. For a class with **options, those of its base class are included."""
    parameters = list(inspect.signature(factory).parameters.values())
    if isinstance(factory, type) and parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        names = {parameter.name for parameter in parameters}
        inherited = _option_parameters(factory.__bases__[0])
        parameters = parameters[:-1] + [p for p in inherited if p.name not in names]
    return parameters


def _check_options(name: str, parameters: Iterable[inspect.Parameter], options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that the reward does not have, and for a required option that is missing."""
    parameters = list(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for key in options:
        if key not in names:
            valid = ", ".join(names) or "none"
            raise ValueError(f"reward {name!r} has no option {key!r}{nearest(key, names)}; known: {valid}")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"reward {name!r} needs option {', '.join(missing)}; write options: {{{missing[0]}: ...}}")
