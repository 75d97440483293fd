"""DisCO: a discriminative objective that scores right answers above wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.preference.group_loss import GroupLoss
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts


class Discriminative(GroupLoss):
    """Trains right rollouts of a group to score above its wrong ones, with larger weights for high-scoring wrong ones.

    There is no clip, and prompts have equal weights. As in the released code, groups that are all right or all wrong
    are in the divisor, unless `divisor` is contrasting. To bound the drift, add the term kl against old, with a
    coefficient of type multiplier with k_p and the metric old_kl.
    """

    equation: ClassVar[str] = (
        "-mean_right s + tau log mean_wrong exp(s / tau), s = mean_t logp (or mean_t r), summed over the groups that "
        "have both and divided by the number of all groups, or of these; tau null: mean_wrong s"
    )
    source: ClassVar[str] = "DisCO, arXiv 2505.12366, by its released code, Optimization-AI/DisCO at bd2b078"
    type: str = "discriminative"
    score: Literal["logp", "ratio"] = option("logp", "mean log-likelihood, or mean ratio to the old policy")
    tau: Schedule | None = number(1.0, "temperature; a smaller one weighs high-scoring wrong answers more", gt=0)
    threshold: float = option(0.5, "an answer is right if its reward is above it")

    divisor: Literal["prompts", "contrasting"] = option(
        "prompts",
        "divisor of the sum over groups. prompts: all groups; contrasting: groups with both right and wrong rollouts",
    )

    @property
    def base_needs(self) -> Needs:
        return super().base_needs | Needs(old=self.score == "ratio")

    def advantages(self, batch: Batch) -> Tensor:
        """Returns 1 for right rollouts, those with a reward above `threshold`, -1 for wrong ones, 0 where the reward is
        unknown; [rollout]."""
        import torch

        rewards = batch.combined_rewards()
        labels = torch.where(rewards > self.threshold, 1.0, -1.0)
        return batch.local(labels.masked_fill(rewards.isnan(), 0.0))

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        """Returns the divisors of the loss; with divisor="prompts", "groups" counts all groups that have a known
        reward, not only those with right and wrong rollouts."""
        import torch

        totals = super().denominators(micro)
        if self.divisor == "contrasting":
            return totals
        assert micro.advantages is not None
        known = (micro.advantages.where(micro.mask, 0) != 0).any(1)
        return totals | {"groups": torch.tensor(len(micro.group[known].unique()))}

    def group_loss(
        self, chosen: Tensor, rejected: Tensor, micro: Rollouts, replay: Replay
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the score of the wrong rollouts of a group minus the mean score of its right ones, 0-d. A rollout's
        score is the mean over its decisions of logp, or of the ratio to the old policy. The wrong rollouts' scores are
        averaged, or with `tau` combined to a soft maximum.

        chosen, rejected: the rows in `micro` of right and wrong rollouts.
        """
        import math

        from mmrl.rollouts import log_ratio

        mask = micro.mask.to(replay.logp.device)
        values = replay.logp
        if self.score == "ratio":
            values = log_ratio(micro, replay).exp()
        score = values.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)
        right, wrong = score[chosen], score[rejected]
        if self.tau is None:
            wrong_score = wrong.mean()
        else:
            wrong_score = self.tau.value * ((wrong / self.tau.value).logsumexp(0) - math.log(len(wrong)))
        return wrong_score - right.mean(), {"preference/margin": right.mean() - wrong.mean()}
