"""The quick part of a check, with which training begins: golds of some rows through verifiers of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmrl.config import Config
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.vlm.settings import TokenLimits
from mmrl.preflight.alarms import Alarm
from mmrl.preflight.generation import probe_guidance
from mmrl.preflight.golds import probe_golds, tried
from mmrl.preflight.prompts import sampled
from mmrl.preflight.questions import ACCURACY, REWARDS, collected
from mmrl.protocols.parts import Policy, Task
from mmrl.rewards import RewardSet
from mmrl.rollouts import Prompt
from mmrl.tasks.visual_qa.task import VisualQA

ROWS = 8
# Verifiers that cost next to nothing: no judge, no server, nothing of the user's own.
CHEAP = frozenset(
    {
        *("exact_match", "math", "multiple_choice", "numeric", "several_choices", "abstention"),
        *("box_iou", "box_giou", "boxes_matched", "labelled_boxes", "average_precision", "interval_iou"),
    }
)


def probe_quickly(config: Config, task: Task) -> Iterator[Alarm]:
    """Tries golds before the first step; yields what is wrong with them."""
    if not isinstance(task, VisualQA) or task.environment is not None or task.train is None:
        return
    lengths = config.section("rollout")
    if not isinstance(lengths, TokenLimits):
        return  # it learns from demonstrations, which are not scored
    rows = sampled(task.train, ROWS)
    limit = int(lengths.max_response_length.extremes[1])
    for key, rewards in ((REWARDS, task.rewards), (ACCURACY, task.verifier)):
        names = [spec.column for spec in rewards.specs if spec.name in CHEAP and not spec.where]
        if names:
            yield from _tried(rewards, names, key, rows, limit)


def probe_policy(policy: Policy) -> Iterator[Alarm]:
    """Finds settings that do not fit what the loaded model is."""
    if isinstance(policy, DiffusionPolicy):
        yield from probe_guidance(policy.denoising.guidance, policy.family.remarks.held_guidance)


def _tried(rewards: RewardSet, names: list[str], key: str, rows: Sequence[Prompt], limit: int) -> Iterator[Alarm]:
    columns = [rewards.names.index(name) for name in names]
    with collected() as reasons:
        marks = tried(rows, lambda samples, group: rewards.score(samples, group, only=names)[:, columns], names, limit)
    yield from probe_golds(marks, key, reasons.by_name(names))
