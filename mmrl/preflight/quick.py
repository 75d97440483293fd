"""The quick probes, which every training run starts with: golds (reference answers) of a few rows as responses, and
settings of the algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.algorithms.ppo import PPO
from mmrl.algorithms.trace_decay import LengthDecay
from mmrl.config import Config
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vlm.settings import TokenLimits
from mmrl.preflight.alarms import Alarm
from mmrl.preflight.generation import probe_guidance
from mmrl.preflight.golds import probe_rewards
from mmrl.preflight.prompts import sample_prompts
from mmrl.preflight.questions import ACCURACY, REWARDS
from mmrl.protocols.parts import Policy, Task
from mmrl.tasks.visual_qa.task import VisualQA

ROWS = 8  # rows whose golds are scored


def probe_quickly(config: Config, task: Task) -> Iterator[Alarm]:
    """Yields alarms about the algorithm's settings, and about golds of visual questions scored by the shipped
    rewards."""
    yield from (Alarm("algorithm", "warned", remark) for remark in config.algorithm.remarks(config))
    yield from probe_decay(config)
    if not isinstance(task, VisualQA) or task.environment is not None or task.train is None:
        return
    limits = config.section("rollout")
    if not isinstance(limits, TokenLimits):
        return  # it learns from demonstrations, which are not scored
    rows = sample_prompts(task.train, ROWS)
    limit = int(limits.max_response_length.extremes[1])
    for key, rewards in ((REWARDS, task.rewards), (ACCURACY, task.verifier)):
        alarms, _ = probe_rewards(rows, rewards, key, limit, custom=False)
        yield from alarms


def probe_decay(config: Config) -> Iterator[Alarm]:
    """Yields an alarm if PPO's lambda by length is 0 even for the longest rollout, and so for all."""
    if not isinstance(config.algorithm, PPO) or not isinstance(decay := config.algorithm.lam, LengthDecay):
        return
    limit = longest_rollout(config)  # (key, steps)
    if limit is not None and limit[1] * decay.scale <= 1:
        key, steps = limit
        yield Alarm(
            "algorithm",
            "warned",
            f"algorithm.lam=by_length is 0 for all rollouts, the longest of which has {steps} steps ({key}), so that "
            "a reward reaches only the step before it; set algorithm.lam.scale above "
            f"{1 / steps:.3g}, or algorithm.lam to a number",
        )


def longest_rollout(config: Config) -> tuple[str, int] | None:
    """Returns the key that limits the length of a rollout, and the limit in steps of the critic (tokens or chunks);
    None if nothing limits it."""
    limits = config.rollout
    if isinstance(limits, TokenLimits):
        return "rollout.max_response_length", int(limits.max_response_length.extremes[1])
    if "action" in type(config).model_fields and isinstance(action := config.section("action"), Actions):
        return "action.horizon", -(-action.horizon // action.chunk)
    return None


def probe_policy(policy: Policy) -> Iterator[Alarm]:
    """Yields alarms about settings that do not fit the loaded model."""
    if isinstance(policy, DiffusionPolicy):
        yield from probe_guidance(policy.denoising.guidance, policy.family.notes.distilled_guidance)
