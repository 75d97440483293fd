"""Advantages that optimize the best of several responses (pass@k, max@k), instead of the average one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.reward_transforms.transform import Transform, group_rows
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class BestOnly(Transform):
    """Only the best rollout of a group gets an advantage: its lead over the second best."""

    equation: ClassVar[str] = "A = (r_1st - r_2nd) / (std of the group + 1e-6) for the best, 0 for the others"
    source: ClassVar[str] = "arXiv 2503.19595, which verl's grpo_passk implements"
    type: str = "best_only"
    returns_advantages: ClassVar[bool] = True
    divide: bool = option(True, "divide by the standard deviation of the group")

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns the lead of the best reward over the second best for the best rollout of each group, 0 for its other
        rollouts, NaN where the reward is unknown; [rollout of all ranks]."""
        advantages = rewards.clone()
        for rows in group_rows(rewards, batch.column("group")):
            advantages[rows] = 0.0
            if len(rows) < 2:
                continue
            descending = rewards[rows].sort(descending=True)
            lead = descending.values[0] - descending.values[1]
            if lead > 0:
                divisor = rewards[rows].std() + 1e-6 if self.divide else 1.0
                advantages[rows[descending.indices[0]]] = lead / divisor
        return advantages


class PassAtK(Transform):
    """Advantages with the unbiased gradient of the expected best of k responses, from all subsets of k of the group.

    For rewards of 0 and 1 it is the gradient of pass@k: a right answer has a larger weight the fewer right answers the
    group has.
    """

    equation: ClassVar[str] = (
        "A_i = n / C(n, k) sum_{I: i in I, |I| = k} (max_I r - max_{I without i} r); without leave_one_out only max_I r"
    )
    source: ClassVar[str] = "PKPO, arXiv 2505.15201, times n, since the loss is a mean over rollouts"
    type: str = "pass_at_k"
    returns_advantages: ClassVar[bool] = True
    k: int = option(description="number of responses of which the best one counts", ge=1)
    leave_one_out: bool = option(True, "subtract the best reward of the subset without the rollout, for less variance")

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns advantages with the gradient of the expected best of k rewards, 0 in groups of fewer than k, NaN
        where the reward is unknown; [rollout of all ranks]."""
        from mmrl.core.ranking import best_of_subsets

        advantages = rewards.clone()
        for rows in group_rows(rewards, batch.column("group")):
            if len(rows) < self.k:  # no subset of size k exists
                advantages[rows] = 0.0
                continue
            best = best_of_subsets(rewards[rows], self.k)
            # k: n / C(n, k) times the number of subsets with a rollout, C(n - 1, k - 1); `best` has means over these
            advantages[rows] = self.k * (best.holding - best.without if self.leave_one_out else best.holding)
        return advantages


class PassAtKAnalytic(Transform):
    """The normalized mean reward of the subsets of k rollouts that contain the rollout.

    The reward of a subset is that of its best response; mean and std are over all subsets of k of the group.
    """

    equation: ClassVar[str] = (
        "A_i = (mean_{I: i in I} max_I r - mean_I max_I r) / std_I max_I r, over all subsets I of k; of right and "
        "wrong answers mean_I max_I r = 1 - C(wrong, k) / C(n, k)"
    )
    source: ClassVar[str] = "Pass@k Training, arXiv 2508.10751, analytical derivation; here for any reward"
    type: str = "pass_at_k_analytic"
    returns_advantages: ClassVar[bool] = True
    k: int = option(description="size of the subsets", ge=1)

    def change(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Returns for each rollout the mean best reward of the subsets of k that contain it, normalized over all
        subsets of its group; 0 in groups of fewer than k; [rollout of all ranks]."""
        from mmrl.core.ranking import best_of_subsets

        advantages = rewards.clone()
        for rows in group_rows(rewards, batch.column("group")):
            advantages[rows] = 0.0
            if len(rows) >= self.k:
                best = best_of_subsets(rewards[rows], self.k)
                if best.std > 0:
                    advantages[rows] = (best.holding - best.mean) / best.std
        return advantages
