"""Base class of losses of groups, and preference losses of the best and the worst rollout of a group."""

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
    """A loss of whole groups, whose rollouts are good (advantage 1), bad (-1) or not in the loss (0)."""

    test: ClassVar[str] = "tests/joints/test_preference.py"
    weighs_decisions: ClassVar[bool] = False

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), whole_groups=True)

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        if config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with algorithm.type={self.type}: it compares the rollouts of "
                "a group; raise group_size"
            )

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        import torch

        return super().denominators(micro) | {"groups": torch.tensor(len(sides(micro)))}

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError(f"algorithm.type={self.type} has a loss of groups alone")

    def objective(self, micro: Rollouts, replay: Replay, over: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        values: list[Tensor] = []
        stats: dict[str, Tensor] = {}
        for good, bad in sides(micro):
            value, measured = self.of_group(good, bad, micro, replay)
            values.append(value)
            for name, statistic in measured.items():
                stats.setdefault(name, torch.full((len(micro),), torch.nan))[good[0]] = statistic.detach().cpu()
        total = torch.stack(values).sum() if values else replay.logp.where(over.mask, 0).sum() * 0
        return total / over.totals["groups"].to(total.device).clamp(min=1), stats

    def of_group(self, good: Tensor, bad: Tensor, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss of one group, 0-d, and statistics, 0-d each. good, bad: its rows in `micro`, at least one
        each."""
        raise NotImplementedError

    def counted_mask(self, name: str, micro: Rollouts) -> Tensor:
        import torch

        return torch.ones(len(micro), dtype=torch.bool) if name.startswith("preference/") else micro.mask


def sides(micro: Rollouts) -> list[tuple[Tensor, Tensor]]:
    """Returns the rows of good and of bad rollouts of every group that has both, among those with a counted
    decision."""
    assert micro.advantages is not None
    sign = (micro.advantages * micro.mask).sum(1).sign()
    pairs = []
    for group in micro.group.unique():
        rows = micro.group == group
        good, bad = ((rows & (sign == s)).nonzero().flatten() for s in (1, -1))
        if len(good) and len(bad):
            pairs.append((good, bad))
    return pairs


class Preference(GroupLoss):
    """Online direct preference optimisation: the best rollout of every group is preferred to its worst. A group whose
    rewards are equal is not in the loss."""

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
        """Computes 1 for the best of its group, -1 for the worst, of equal ones the first, and 0 for others;
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

    def of_group(self, good: Tensor, bad: Tensor, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import torch.nn.functional as F

        chosen, rejected = (self.beta.value * self._gained(row, micro, replay) for row in (good[0], bad[0]))
        margin = chosen - rejected
        return F.softplus(-margin), {"preference/margin": margin, "preference/right": (margin > 0).float()}

    def _gained(self, row: Tensor, micro: Rollouts, replay: Replay) -> Tensor:
        """Computes the log-ratio of a whole rollout to the reference, 0-d."""
        assert micro.ref_logp is not None
        apart = replay.logp[row] - micro.ref_logp[row].to(replay.logp.device)
        return apart.where(micro.mask[row].to(apart.device), 0).sum()


class MixedPreference(Preference):
    """A sum of three losses: of the pair, of either response alone against a threshold, and of the likelihood of the
    best."""

    equation: ClassVar[str] = (
        "preference x preference's + quality x (-log sigmoid(c - shift) - log sigmoid(shift - b)) + generation x "
        "(-mean_t logp of the best), c and b beta x the log-ratios of best and worst"
    )
    source: ClassVar[str] = "MPO, arXiv 2411.10442, whose quality loss is that of BCO, arXiv 2404.04656"
    type: str = "mixed_preference"
    preference: float = option(0.8, "weight of the pair's loss", ge=0)
    quality: float = option(0.2, "weight of the loss of either response alone", ge=0)
    generation: float = option(1.0, "weight of the likelihood of the best", ge=0)
    shift: Schedule = number(0.0, "log-ratio, times beta, from which on a response is good")

    def of_group(self, good: Tensor, bad: Tensor, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import torch.nn.functional as F

        pair, stats = super().of_group(good, bad, micro, replay)
        chosen, rejected = (self.beta.value * self._gained(row, micro, replay) for row in (good[0], bad[0]))
        alone = F.softplus(self.shift.value - chosen) + F.softplus(rejected - self.shift.value)
        mask = micro.mask[good[0]].to(replay.logp.device)
        nll = -replay.logp[good[0]].where(mask, 0).sum() / mask.sum()
        return self.preference * pair + self.quality * alone + self.generation * nll, stats
