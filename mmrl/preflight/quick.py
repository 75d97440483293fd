"""The quick part of a check, with which training begins: golds of some rows through verifiers of text."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config import Config
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.vlm.settings import TokenLimits
from mmrl.preflight.alarms import Alarm
from mmrl.preflight.generation import probe_guidance
from mmrl.preflight.golds import probe_rewards
from mmrl.preflight.prompts import sampled
from mmrl.preflight.questions import ACCURACY, REWARDS
from mmrl.protocols.parts import Policy, Task
from mmrl.tasks.visual_qa.task import VisualQA

ROWS = 8


def probe_quickly(config: Config, task: Task) -> Iterator[Alarm]:
    """Tries golds before the first step; yields what is wrong with them, and remarks on the algorithm's settings."""
    yield from (Alarm("algorithm", "warned", remark) for remark in config.algorithm.remarks())
    if not isinstance(task, VisualQA) or task.environment is not None or task.train is None:
        return
    lengths = config.section("rollout")
    if not isinstance(lengths, TokenLimits):
        return  # it learns from demonstrations, which are not scored
    rows = sampled(task.train, ROWS)
    limit = int(lengths.max_response_length.extremes[1])
    for key, rewards in ((REWARDS, task.rewards), (ACCURACY, task.verifier)):
        alarms, _ = probe_rewards(rows, rewards, key, limit, custom=False)
        yield from alarms


def probe_policy(policy: Policy) -> Iterator[Alarm]:
    """Finds settings that do not fit what the loaded model is."""
    if isinstance(policy, DiffusionPolicy):
        yield from probe_guidance(policy.denoising.guidance, policy.family.remarks.held_guidance)
