"""Rewards: small functions `(sample) -> float | None`, looked up by name, composed without losing their names.

None means "could not be scored": the rollout gets a NaN component, which the advantage leaves out.
"""

from mmrl.rewards.compose import RewardSet, RewardSpec
from mmrl.rewards.registry import REWARDS, Reward, build
from mmrl.rewards.verifiers import extract_answer

__all__ = ["REWARDS", "Reward", "RewardSet", "RewardSpec", "build", "extract_answer"]
