"""DMPO: a weighted log-likelihood of rollouts, which fits the policy to the reward-tilted reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import Reduction, RewardedAlgorithm
from mmrl.protocols.requirements import Capabilities, Needs, Reference
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Replay, Rollouts

KEY = "distribution_matching"  # name of a column of rollouts: 1 if it is in the loss, else 0


class DistributionMatching(RewardedAlgorithm):
    """The cross-entropy of the policy to the reference policy tilted by exp(reward / alpha).

    It is estimated from the rollouts of a group with self-normalized importance weights. In small groups one rollout
    has nearly all the weight, but all rollouts are made more likely, so `weight_baseline` is subtracted from the
    weights. For masked diffusion models the log-likelihood is unmasking.likelihood={type: elbo}.
    """

    equation: ClassVar[str] = (
        "-sum_i (w_i - b_i) l_i, l_i = sum_t logp_t, w = softmax over the group of r / alpha + ref_l - old_l; "
        "b: 1 / n, softmax(l - old_l) without gradient, softmax(-r / alpha + ref_l - old_l) or 0; a mean over groups"
    )
    source: ClassVar[str] = "DMPO, arXiv 2510.08233"
    test: ClassVar[str] = "tests/joints/test_distribution_matching.py"
    type: str = "distribution_matching"
    alpha: Schedule = number(0.2, "temperature of the rewards; a smaller one puts more weight on the best", gt=0)
    weight_baseline: Literal["mean", "present", "negative", "none"] = option(
        "present",
        "subtracted from the weights. mean: the group's mean weight; present: the weight under the current policy, "
        "with no gradient on average; negative: the weight for rewards of opposite sign; none: 0",
    )

    @property
    def base_needs(self) -> Needs:
        offers = frozenset({"reference_ratio", "single_sample_kl"})
        return Needs(offers=offers, reference=Reference(), statistics=frozenset({"logp"}), whole_groups=True)

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        if config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} is too small for algorithm.type={self.type}, which compares "
                "the rollouts of a group; set it to at least 2"
            )

    def advantages(self, batch: Batch) -> Tensor:
        """Computes the weights minus their baseline, [rollout]. The baseline `present` is subtracted in `objective`,
        since it depends on the current policy. Also stores which rollouts are in the loss."""
        import torch

        from mmrl.rollouts import Column

        rollouts = batch.rollouts
        assert rollouts.ref_logp is not None and rollouts.old_logp is not None
        log_ratio = (rollouts.ref_logp - rollouts.old_logp).cpu().where(rollouts.mask, 0).sum(1)
        log_ratio, group = batch.gather(log_ratio), batch.column("group")  # from here on: of all ranks
        rewards = batch.combined_rewards() / self.alpha.value
        in_loss = ~rewards.isnan() & (batch.column("length") > 0)
        weights = torch.zeros(len(rewards))
        effective_sizes = []
        for g in group[in_loss].unique():
            rows = ((group == g) & in_loss).nonzero().flatten()
            weight = (rewards[rows] + log_ratio[rows]).softmax(0)
            # effective sample size of the weights, as a share of the group
            effective_sizes.append(float(1 / (weight.square().sum() * len(rows))))
            if self.weight_baseline == "mean":
                weight = weight - weight.mean()
            elif self.weight_baseline == "negative":
                weight = weight - (log_ratio[rows] - rewards[rows]).softmax(0)
            weights[rows] = weight
        mean_size = sum(effective_sizes) / len(effective_sizes) if effective_sizes else 0.0
        batch.report({"weights/effective_size": mean_size})
        local_in_loss = batch.local(in_loss)
        if rollouts.filler is not None:
            local_in_loss = local_in_loss & ~rollouts.filler
        rollouts.extras[KEY] = Column(local_in_loss.float())
        return batch.local(weights)

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        import torch

        return super().denominators(micro) | {"groups": torch.tensor(len(_group_rows(micro)))}

    def objective(self, micro: Rollouts, replay: Replay, reduction: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes this micro-batch's part of the loss, 0-d: minus the weighted log-likelihoods of its rollouts,
        divided by the number of groups. The statistic is the weight minus its baseline, [rollout, decision]."""
        import torch

        assert micro.advantages is not None and micro.old_logp is not None
        device = replay.logp.device
        mask = micro.mask.to(device)
        weight = micro.advantages.to(device)
        if self.weight_baseline == "present":
            log_ratio = (replay.logp.detach() - micro.old_logp.to(device)).where(mask, 0).sum(1)
            baseline = torch.zeros_like(log_ratio)
            for rows in _group_rows(micro):
                baseline[rows] = log_ratio[rows].softmax(0)
            weight = weight - baseline[:, None]
        in_loss = mask & (_in_loss(micro) > 0).to(device)[:, None]
        values = (-weight * replay.logp).where(in_loss, 0)
        if replay.weight is not None:
            values = values * replay.weight
        loss = values.sum() / reduction.totals["groups"].to(device).clamp(min=1)
        return loss, {"weights/less_baseline": weight.detach().expand_as(values)}

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Raises NotImplementedError: the loss is computed for whole groups, see `objective`."""
        raise NotImplementedError(f"algorithm.type={self.type} computes its loss for whole groups in `objective`")


def _in_loss(micro: Rollouts) -> Tensor:
    """Returns 1 for rollouts in the loss, else 0, [rollout]."""
    from mmrl.rollouts import Column

    return micro.extra(KEY, Column).values


def _group_rows(micro: Rollouts) -> list[Tensor]:
    """Returns the rows of each group that are in the loss, [n] int64 each."""
    in_loss = (_in_loss(micro) > 0) & micro.mask.any(1)
    return [((micro.group == g) & in_loss).nonzero().flatten() for g in micro.group[in_loss].unique()]
