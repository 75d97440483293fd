"""A discriminative objective: right answers score above wrong ones (DisCO)."""

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
    """Right rollouts of a group are trained to score above its wrong ones, of which those that score highest count
    most. There is no clip and prompts count alike, however hard: those that are all right or all wrong count in the
    divisor, as in the released code, unless `divisor` is contrasting. Bound the drift by the term kl against old, whose
    coefficient is a multiplier with k_p that follows the metric old_kl."""

    equation: ClassVar[str] = (
        "-mean_right s + tau log mean_wrong exp(s / tau), s = mean_t logp (or mean_t r), summed over the groups that "
        "have both and divided by the number of all, or of those; tau null: mean_wrong s"
    )
    source: ClassVar[str] = "DisCO, arXiv 2505.12366, by its released code, Optimization-AI/DisCO at bd2b078"
    type: str = "discriminative"
    score: Literal["logp", "ratio"] = option("logp", "mean log-likelihood, or mean ratio to the old policy")
    tau: Schedule | None = number(1.0, "the smaller, the more the worst mistakes count", gt=0)
    threshold: float = option(0.5, "rewards above it are of right answers")

    divisor: Literal["prompts", "contrasting"] = option(
        "prompts", "the sum over groups is divided by: all prompts with a scored rollout, or those with both sides"
    )

    @property
    def base_needs(self) -> Needs:
        return super().base_needs | Needs(old=self.score == "ratio")

    def advantages(self, batch: Batch) -> Tensor:
        import torch

        rewards = batch.combined_rewards()
        sides = torch.where(rewards > self.threshold, 1.0, -1.0)
        return batch.local(sides.masked_fill(rewards.isnan(), 0.0))

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        import torch

        totals = super().denominators(micro)
        if self.divisor == "contrasting":
            return totals
        assert micro.advantages is not None
        known = (micro.advantages.where(micro.mask, 0) != 0).any(1)
        return totals | {"groups": torch.tensor(len(micro.group[known].unique()))}

    def of_group(self, good: Tensor, bad: Tensor, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import math

        from mmrl.rollouts import log_ratio

        mask = micro.mask.to(replay.logp.device)
        values = replay.logp
        if self.score == "ratio":
            values = log_ratio(micro, replay).exp()
        score = values.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)
        right, wrong = score[good], score[bad]
        if self.tau is None:
            above = wrong.mean()
        else:
            above = self.tau.value * ((wrong / self.tau.value).logsumexp(0) - math.log(len(wrong)))
        return above - right.mean(), {"preference/margin": right.mean() - wrong.mean()}
