"""Gradient ascent on a differentiable reward, through the last steps of the chain."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import Algorithm
from mmrl.collection.settings import CollectionSettings, Independent
from mmrl.protocols.requirements import Needs
from mmrl.rewards.settings import RewardSpec
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rewards.types import DifferentiableReward
    from mmrl.rollouts import Replay, Rollouts


class RewardGradient(Algorithm):
    """Gradient ascent on a differentiable reward of the image, without a penalty on the distance from the base model.

    It is fast, but prone to reward hacking: set `guards`.
    """

    equation: ClassVar[str] = "-r(x_0), with the gradient through the last steps of the chain (and the decoder)"
    source: ClassVar[str] = "ReFL, arXiv 2304.05977; DRaFT-K, arXiv 2309.17400"
    test: ClassVar[str] = "tests/joints/test_reward_gradient.py"
    collects: ClassVar[Literal["groups", "rollouts", "demonstrations"]] = "rollouts"
    collection: ClassVar[CollectionSettings] = Independent
    type: str = "reward_gradient"
    reward: RewardSpec = option(
        description="differentiable reward: classifier_logp, clip_similarity, pickscore, hpsv2, aesthetic, or your own"
    )

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"image_gradient"}))

    def check_rewards(self, names: list[str]) -> None:
        differentiable(self.reward.model_dump_json())

    def advantages(self, batch: Batch) -> Tensor:
        import torch

        return torch.ones(len(batch.rollouts))

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes minus the weighted reward of each image, with a gradient through the image, and the reward itself;
        [rollout, 1]."""
        from mmrl.rollouts import IMAGES

        reward = differentiable(self.reward.model_dump_json())
        rewards = reward.differentiable(IMAGES.of(replay), [sample.prompt for sample in micro.samples])
        values = rewards[:, None].to(replay.logp.device)
        return -self.reward.weight * values, {"reward_gradient/reward": values.detach()}


@cache
def differentiable(spec: str) -> DifferentiableReward:
    """Builds a reward from a `RewardSpec` in JSON. Raises ValueError if it has no gradient."""
    from mmrl.rewards.registry import build
    from mmrl.rewards.types import DifferentiableReward

    settings = RewardSpec.model_validate_json(spec)
    built = build(settings.name, settings.options)
    if not isinstance(built, DifferentiableReward):
        raise ValueError(
            f"algorithm.reward.name={settings.name} has no gradient; use classifier_logp, clip_similarity, pickscore, "
            "hpsv2, aesthetic, or a class of your own with differentiable(images, prompts)"
        )
    return built
