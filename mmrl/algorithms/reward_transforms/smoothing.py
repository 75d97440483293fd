"""A bonus for unlikely right answers, which preserves diversity."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class Smoothing(Transform):
    """Adds a bonus to the reward of right answers, which is larger the less likely the answer was."""

    equation: ClassVar[str] = "r <- r - tau mean_t logp_t where r > threshold, logp of the policy that made the rollout"
    source: ClassVar[str] = (
        "reconstructed from the abstract of differential smoothing, which changes only the reward of right "
        "trajectories; the mean over tokens is mmrl's choice"
    )
    type: str = "smoothing"
    tau: float = option(0.05, "weight of the log-likelihood", gt=0)
    threshold: float = option(0.5, "an answer is right if its reward is above it")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), statistics=frozenset({"logp"}))

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        return rewards - self.tau * batch.column("logp").where(rewards > self.threshold, 0.0)
