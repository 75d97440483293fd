"""The KL penalty of a whole response in its reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.reward_kl import RewardKL

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class KLPenalty(Transform):
    """Subtracts the rollout's KL penalties from its reward, before baseline and scale. The shaper kl_returns assigns
    them to single decisions instead."""

    equation: ClassVar[str] = "r <- r - coefficient sum_t k(logp_t - ref_logp_t), k the estimator"
    source: ClassVar[str] = "RLOO of TRL, arXiv 2402.14740; use_kl_in_reward of verl with outcome advantages"
    test: ClassVar[str] = "tests/joints/test_returns.py"
    type: str = "kl_penalty"
    kl: RewardKL = option(RewardKL(), "KL penalty of a decision")

    @property
    def needs(self) -> Needs:
        return self.kl.needs

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        return rewards - batch.gather(self.kl.costs(batch).sum(1).to(rewards))
