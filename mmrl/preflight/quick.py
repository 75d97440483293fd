"""The quick probes, which every training run starts with: golds (reference answers) of a few rows as responses, and
settings of the algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.algorithms.algorithm import has_ratios_of_one
from mmrl.algorithms.ppo import PPO
from mmrl.algorithms.ratio import RatioAlgorithm
from mmrl.algorithms.surrogates.surrogate import Clipped
from mmrl.algorithms.trace_decay import LengthDecay
from mmrl.config import Config
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.settings import Denoising
from mmrl.policies.vla.settings import Actions, FlowActions
from mmrl.policies.vlm.settings import TokenLimits
from mmrl.preflight.alarms import Alarm
from mmrl.preflight.generation import probe_guidance
from mmrl.preflight.golds import probe_rewards
from mmrl.preflight.prompts import sample_prompts
from mmrl.preflight.questions import ACCURACY, REWARDS
from mmrl.protocols.parts import Policy, Task
from mmrl.samplers.settings import ChainLikelihood
from mmrl.tasks.image_generation.settings import ImageGenerationSettings
from mmrl.tasks.visual_qa.task import VisualQA

ROWS = 8  # rows whose golds are scored
WIDEST_UNSCALED = 1e-4  # clip bound that may stop steps scored by their squared error; flow_grpo has 1e-5
LARGE_SET = 1000  # images whose features estimate a mean and covariance for a distance between sets


def probe_quickly(config: Config, task: Task) -> Iterator[Alarm]:
    """Yields alarms about the algorithm's settings, and about golds of visual questions scored by the shipped
    rewards."""
    yield from (Alarm("algorithm", "warned", remark) for remark in config.algorithm.remarks(config))
    yield from probe_decay(config)
    yield from probe_unscaled_steps(config)
    yield from probe_set_distances(config)
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


def probe_unscaled_steps(config: Config) -> Iterator[Alarm]:
    """Yields an alarm if denoising steps are scored by their squared error (Flow-CPS), whose log-ratios are far smaller
    than those of a density, and the clip bounds are too wide to stop any."""
    algorithm = config.algorithm
    if not isinstance(algorithm, RatioAlgorithm) or not isinstance(clip := algorithm.surrogate, Clipped):
        return
    bounds = {"low": clip.low.extremes[0], "high": clip.high.extremes[0]}
    if has_ratios_of_one(algorithm, config) or max(bounds.values()) <= WIDEST_UNSCALED:
        return
    for key, chain in chains_of(config).items():
        if chain.transition.unscaled:
            limits = " and ".join(f"{name}={bound:g}" for name, bound in bounds.items())
            yield Alarm(
                "algorithm",
                "warned",
                f"{key}.transition.logp=squared_error gives log-ratios that are 2 std^2 times those of a density, so "
                f"that algorithm.surrogate's bounds {limits} stop hardly any step; set both to 1e-5 as flow_grpo does, "
                f"or {key}.transition.logp=density",
            )


def chains_of(config: Config) -> dict[str, ChainLikelihood]:
    """Returns the settings of chains of denoising steps whose steps are decisions, by their key."""
    likelihoods: dict[str, object] = {}
    sections = type(config).model_fields
    if "denoising" in sections and isinstance(denoising := config.section("denoising"), Denoising):
        likelihoods["denoising.likelihood"] = denoising.likelihood
    if "action" in sections and isinstance(head := config.section("action").head, FlowActions):
        likelihoods["action.head.likelihood"] = head.likelihood
    return {key: likelihood for key, likelihood in likelihoods.items() if isinstance(likelihood, ChainLikelihood)}


def probe_set_distances(config: Config) -> Iterator[Alarm]:
    """Yields an alarm if images are rewarded by the distance of one step's images to a set, and they are few."""
    if not isinstance(task := config.task, ImageGenerationSettings):
        return
    images = config.rollout.prompts * config.group_size
    if any(spec.name == "set_distance" for spec in task.rewards or []) and images < LARGE_SET:
        yield Alarm(
            "rewards",
            "warned",
            f"task.rewards: set_distance is computed from the {images} images of a step (rollout.prompts x "
            f"group_size), and is mostly noise below {LARGE_SET}; the published reward keeps a large set and replaces "
            "a part of it. Raise rollout.prompts, or give it a small weight beside another reward",
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
