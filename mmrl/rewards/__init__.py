"""Rewards by name: functions `(sample) -> float | None` and batched rewards, combined without losing their names.

None means that the sample could not be scored: the rollout gets NaN in the reward's column, and the advantage leaves it
out. The same holds for a sample on which a reward raises, ends its process or takes too long. A fault of a reward never
ends the run.
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
