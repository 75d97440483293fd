"""Rewards for the best of several responses, in place of the average one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, groups_of
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class BestOnly(Transform):
    """Only the best rollout of a group is learned from, by how far it is ahead of the second."""

    equation: ClassVar[str] = "A = (r_1st - r_2nd) / (std of the group + 1e-6) for the best, 0 for the others"
    source: ClassVar[str] = "arXiv 2503.19595, of which verl's grpo_passk is made"
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "best_only"
    finished: ClassVar[bool] = True
    divide: bool = option(True, "divide by the standard deviation of the group")

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        advantages = rewards.clone()
        for rows in groups_of(rewards, batch.column("group")):
            advantages[rows] = 0.0
            if len(rows) < 2:
                continue
            ranked = rewards[rows].sort(descending=True)
            ahead = ranked.values[0] - ranked.values[1]
            if ahead > 0:
                advantages[rows[ranked.indices[0]]] = ahead / (rewards[rows].std() + 1e-6 if self.divide else 1.0)
        return advantages


class PassAtK(Transform):
    """The gradient of the expected best of k responses, without bias, from all subsets of k of the group. Of right and
    wrong answers it is the gradient of pass@k: prompts that are nearly solved count little, and a right answer counts
    more where few are."""

    equation: ClassVar[str] = (
        "A_i = n / C(n, k) sum_{I: i in I, |I| = k} (max_I r - max_{I without i} r); without leave_one_out only max_I r"
    )
    source: ClassVar[str] = "PKPO, arXiv 2505.15201, times n, for the loss is a mean over rollouts"
    type: str = "pass_at_k"
    finished: ClassVar[bool] = True
    k: int = option(description="responses of which the best counts", ge=1)
    leave_one_out: bool = option(True, "subtract what the subset would have had without the rollout: less variance")

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.ranking import best_of_subsets

        advantages = rewards.clone()
        for rows in groups_of(rewards, batch.column("group")):
            if len(rows) < self.k:  # there is no subset
                advantages[rows] = 0.0
                continue
            best = best_of_subsets(rewards[rows], self.k)
            advantages[rows] = self.k * (best.holding - best.without if self.leave_one_out else best.holding)
        return advantages


class PassAtKAnalytic(Transform):
    """Every subset of k of the group is one trial, whose reward is that of its best response; a rollout gets the mean
    advantage of the trials that contain it, over their standard deviation."""

    equation: ClassVar[str] = (
        "A_i = (mean_{I: i in I} max_I r - mean_I max_I r) / std_I max_I r, over all subsets I of k; of right and "
        "wrong answers mean_I max_I r = 1 - C(wrong, k) / C(n, k)"
    )
    source: ClassVar[str] = "Pass@k Training, arXiv 2508.10751, analytical derivation; here for any reward"
    type: str = "pass_at_k_analytic"
    finished: ClassVar[bool] = True
    k: int = option(description="responses of a trial", ge=1)

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.ranking import best_of_subsets

        advantages = rewards.clone()
        for rows in groups_of(rewards, batch.column("group")):
            advantages[rows] = 0.0
            if len(rows) >= self.k:
                best = best_of_subsets(rewards[rows], self.k)
                if best.std > 0:
                    advantages[rows] = (best.holding - best.mean) / best.std
        return advantages
