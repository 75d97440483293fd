"""Rewards by name, composed without losing their names: functions `(sample) -> float | None`, and batched rewards.

None means "could not be scored": the rollout gets a NaN component, which the advantage leaves out.
"""

from mmrl.rewards.compose import RewardSet, RewardSpec
from mmrl.rewards.registry import REWARDS, build
from mmrl.rewards.types import BatchReward, Reward
from mmrl.rewards.verifiers import extract_answer

__all__ = ["REWARDS", "BatchReward", "Reward", "RewardSet", "RewardSpec", "build", "extract_answer"]
