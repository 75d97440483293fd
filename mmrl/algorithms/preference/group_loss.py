"""Base class of losses of whole groups, and preference losses of the best and the worst rollout of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.algorithm import Algorithm, Reduction
from mmrl.protocols.requirements import Capabilities, Needs, Reference
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Replay, Rollouts


class GroupLoss(Algorithm):
    """Base class of losses of whole groups, whose rollouts are chosen (advantage 1), rejected (-1) or unused (0).

    A class of your own overrides `advantages` and `group_loss`.
    """

    test: ClassVar[str] = "tests/joints/test_preference.py"
    weighs_decisions: ClassVar[bool] = False

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), whole_groups=True)

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        if config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} is too small for algorithm.type={self.type}, which compares "
                "the rollouts of a group; set it to at least 2"
            )

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        import torch

        return super().denominators(micro) | {"groups": torch.tensor(len(chosen_and_rejected(micro)))}

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Raises NotImplementedError: the loss is computed for whole groups, see `objective`."""
        raise NotImplementedError(
            f"algorithm.type={self.type} compares whole groups and has no loss of single rollouts; call `objective`"
        )

    def objective(self, micro: Rollouts, replay: Replay, reduction: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the mean of the groups' losses, 0-d, and statistics [rollout]: the value of a group is in the row of
        its first chosen rollout, all other rows are NaN."""
        import torch

        losses: list[Tensor] = []
        stats: dict[str, Tensor] = {}
        for chosen, rejected in chosen_and_rejected(micro):
            loss, group_stats = self.group_loss(chosen, rejected, micro, replay)
            losses.append(loss)
            for name, statistic in group_stats.items():
                stats.setdefault(name, torch.full((len(micro),), torch.nan))[chosen[0]] = statistic.detach().cpu()
        # without a group the loss is 0, and still attached to the graph
        total = torch.stack(losses).sum() if losses else replay.logp.where(reduction.mask, 0).sum() * 0
        return total / reduction.totals["groups"].to(total.device).clamp(min=1), stats

    def group_loss(
        self, chosen: Tensor, rejected: Tensor, micro: Rollouts, replay: Replay
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss of one group, 0-d, and statistics, 0-d each.

        chosen, rejected: the rows in `micro` of its chosen and rejected rollouts, at least one each.
        """
        raise NotImplementedError

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        import torch

        return torch.ones(len(micro), dtype=torch.bool) if name.startswith("preference/") else micro.mask


def chosen_and_rejected(micro: Rollouts) -> list[tuple[Tensor, Tensor]]:
    """Returns the rows of the chosen and the rejected rollouts, [n] int64 each, of every group that has at least one
    chosen (advantage above 0) and one rejected rollout (below 0). Rollouts without a masked-in decision are left
    out."""
    assert micro.advantages is not None
    sign = (micro.advantages * micro.mask).sum(1).sign()
    pairs = []
    for group in micro.group.unique():
        rows = micro.group == group
        chosen, rejected = ((rows & (sign == s)).nonzero().flatten() for s in (1, -1))
        if len(chosen) and len(rejected):
            pairs.append((chosen, rejected))
    return pairs


class Preference(GroupLoss):
    """Online DPO: the best rollout of each group is chosen, the worst one rejected. A group of equal rewards is not in
    the loss."""

    equation: ClassVar[str] = (
        "-log sigmoid(m), m = beta (sum_t (logp - ref_logp) of the best - the same of the worst), a mean over groups"
    )
    source: ClassVar[str] = "DPO, arXiv 2305.18290, with pairs of the policy's own rollouts"
    type: str = "preference"
    beta: Schedule = number(0.1, "factor of the log-ratios to the reference", gt=0)

    @property
    def base_needs(self) -> Needs:
        return super().base_needs | Needs(reference=Reference())

    def advantages(self, batch: Batch) -> Tensor:
        """Returns 1 for the best rollout of each group, -1 for the worst (the first of equal ones), else 0;
        [rollout]."""
        import torch

        rewards, group = batch.combined_rewards(), batch.column("group")
        signs = torch.zeros(len(rewards))
        for g in group.unique():
            rows = ((group == g) & ~rewards.isnan()).nonzero().flatten()
            if len(rows) > 1 and rewards[rows].max() > rewards[rows].min():
                signs[rows[rewards[rows].argmax()]] = 1.0
                signs[rows[rewards[rows].argmin()]] = -1.0
        return batch.local(signs)

    def group_loss(
        self, chosen: Tensor, rejected: Tensor, micro: Rollouts, replay: Replay
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes DPO's loss of the best and the worst rollout, -log sigmoid(margin), 0-d, and statistics. chosen,
        rejected: [1], their rows in `micro`."""
        import torch.nn.functional as F

        margin = self._implicit_reward(chosen[0], micro, replay) - self._implicit_reward(rejected[0], micro, replay)
        return F.softplus(-margin), {"preference/margin": margin, "preference/right": (margin > 0).float()}

    def _implicit_reward(self, row: Tensor, micro: Rollouts, replay: Replay) -> Tensor:
        """Computes DPO's implicit reward of a rollout, beta x its log-ratio to the reference, 0-d."""
        return self.beta.value * self._log_ratio(row, micro, replay)

    def _log_ratio(self, row: Tensor, micro: Rollouts, replay: Replay) -> Tensor:
        """Computes the log-ratio of a whole rollout to the reference, 0-d."""
        assert micro.ref_logp is not None
        log_ratio = replay.logp[row] - micro.ref_logp[row].to(replay.logp.device)
        return log_ratio.where(micro.mask[row].to(log_ratio.device), 0).sum()


class MixedPreference(Preference):
    """MPO: the sum of a preference loss of the pair (DPO), a quality loss of each response alone (BCO), and a
    generation loss, the negative log-likelihood of the chosen response."""

    equation: ClassVar[str] = (
        "preference x preference's + quality x (-log sigmoid(c - shift) - log sigmoid(shift - b)) + generation x "
        "(-mean_t logp of the best), c and b beta x the log-ratios of best and worst"
    )
    source: ClassVar[str] = "MPO, arXiv 2411.10442, whose quality loss is that of BCO, arXiv 2404.04656"
    type: str = "mixed_preference"
    preference: float = option(0.8, "weight of the pair's loss", ge=0)
    quality: float = option(0.2, "weight of the loss of each response alone", ge=0)
    generation: float = option(1.0, "weight of the chosen response's negative log-likelihood", ge=0)
    shift: Schedule = number(0.0, "implicit reward above which a response is good, in the quality loss")

    def group_loss(
        self, chosen: Tensor, rejected: Tensor, micro: Rollouts, replay: Replay
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the weighted sum of the pair's DPO loss, the BCO losses of each response alone, and the negative
        log-likelihood per decision of the chosen response; 0-d. softplus(-x) is -log sigmoid(x)."""
        import torch.nn.functional as F

        pair_loss, stats = super().group_loss(chosen, rejected, micro, replay)
        chosen_reward = self._implicit_reward(chosen[0], micro, replay)
        rejected_reward = self._implicit_reward(rejected[0], micro, replay)
        quality_loss = F.softplus(self.shift.value - chosen_reward) + F.softplus(rejected_reward - self.shift.value)
        mask = micro.mask[chosen[0]].to(replay.logp.device)
        nll = -replay.logp[chosen[0]].where(mask, 0).sum() / mask.sum()
        return self.preference * pair_loss + self.quality * quality_loss + self.generation * nll, stats
