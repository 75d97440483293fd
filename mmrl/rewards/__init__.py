"""Rewards by name, composed without losing their names: functions `(sample) -> float | None`, and batched rewards.

None means "could not be scored": the rollout gets a NaN component, which the advantage leaves out. A sample on which a
reward raises, ends its process or takes too long gets one too: faults of a reward never end the run.
"""

from typing import TYPE_CHECKING

from mmrl.rewards.settings import RewardSpec
from mmrl.runtime import lazy_attributes

if TYPE_CHECKING:
    from mmrl.rewards.compose import RewardSet
    from mmrl.rewards.parsing.responses import extract_answer
    from mmrl.rewards.registry import REWARDS, build
    from mmrl.rewards.types import BatchReward, Reward

__all__ = ["REWARDS", "BatchReward", "Reward", "RewardSet", "RewardSpec", "build", "extract_answer"]

__getattr__ = lazy_attributes.attributes(
    __name__,
    {
        "REWARDS": "mmrl.rewards.registry",
        "BatchReward": "mmrl.rewards.types",
        "Reward": "mmrl.rewards.types",
        "RewardSet": "mmrl.rewards.compose",
        "build": "mmrl.rewards.registry",
        "extract_answer": "mmrl.rewards.parsing.responses",
    },
)
