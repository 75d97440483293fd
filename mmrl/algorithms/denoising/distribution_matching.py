"""A weighted likelihood of rollouts, which fits the policy to the reference tilted by the reward (DMPO)."""

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

KEY = "distribution_matching"  # name of a column: 1 for rollouts in the loss, 0 for others


class DistributionMatching(RewardedAlgorithm):
    """The cross-entropy to the reference tilted by the reward, from rollouts of a group with self-normalised importance
    weights. In small groups nearly all weight is on one rollout, and every other one is made likelier too, only less:
    so `weight_baseline` is subtracted from the weights. The log-likelihood is that of the policy, for masked diffusion
    unmasking.likelihood={type: elbo}."""

    equation: ClassVar[str] = (
        "-sum_i (w_i - b_i) l_i, l_i = sum_t logp_t, w = softmax over the group of r / alpha + ref_l - old_l; "
        "b: 1 / n, softmax(l - old_l) without gradient, softmax(-r / alpha + ref_l - old_l) or 0; a mean over groups"
    )
    source: ClassVar[str] = "DMPO, arXiv 2510.08233"
    test: ClassVar[str] = "tests/joints/test_distribution_matching.py"
    type: str = "distribution_matching"
    alpha: Schedule = number(0.2, "the smaller, the more of the weight is on the best rollouts", gt=0)
    weight_baseline: Literal["mean", "present", "negative", "none"] = option(
        "present",
        "what is taken off a weight: the group's mean; the weight under the present policy, which has no gradient on "
        "average; the weight if the reward's sign were turned; nothing",
    )

    @property
    def base_needs(self) -> Needs:
        offers = frozenset({"reference_ratio", "single_sample_kl"})
        return Needs(offers=offers, reference=Reference(), statistics=frozenset({"logp"}), whole_groups=True)

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        if config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with algorithm.type={self.type}: it weighs the rollouts of a "
                "group against one another; raise group_size"
            )

    def advantages(self, batch: Batch) -> Tensor:
        """Computes weights less their baseline, [rollout]; the baseline `present` is subtracted in the loss, for it
        changes with the policy."""
        import torch

        from mmrl.rollouts import Column

        rollouts = batch.rollouts
        assert rollouts.ref_logp is not None and rollouts.old_logp is not None
        apart = (rollouts.ref_logp - rollouts.old_logp).cpu().where(rollouts.mask, 0).sum(1)
        away, rewards, group = batch.gather(apart), batch.combined_rewards() / self.alpha.value, batch.column("group")
        part = ~rewards.isnan() & (batch.column("length") > 0)
        weights = torch.zeros(len(rewards))
        sizes = []
        for g in group[part].unique():
            rows = ((group == g) & part).nonzero().flatten()
            weight = (rewards[rows] + away[rows]).softmax(0)
            sizes.append(float(1 / (weight.square().sum() * len(rows))))
            if self.weight_baseline == "mean":
                weight = weight - weight.mean()
            elif self.weight_baseline == "negative":
                weight = weight - (away[rows] - rewards[rows]).softmax(0)
            weights[rows] = weight
        batch.report({"weights/effective_size": sum(sizes) / len(sizes) if sizes else 0.0})
        local_part = batch.local(part)
        if rollouts.filler is not None:
            local_part = local_part & ~rollouts.filler
        rollouts.extras[KEY] = Column(local_part.float())
        return batch.local(weights)

    def denominators(self, micro: Rollouts) -> dict[str, Tensor]:
        import torch

        return super().denominators(micro) | {"groups": torch.tensor(len(_members(micro)))}

    def objective(self, micro: Rollouts, replay: Replay, over: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        assert micro.advantages is not None and micro.old_logp is not None
        where = replay.logp.device
        mask = micro.mask.to(where)
        weight = micro.advantages.to(where)
        if self.weight_baseline == "present":
            moved = (replay.logp.detach() - micro.old_logp.to(where)).where(mask, 0).sum(1)
            expected = torch.zeros_like(moved)
            for rows in _members(micro):
                expected[rows] = moved[rows].softmax(0)
            weight = weight - expected[:, None]
        part = mask & (_column(micro) > 0).to(where)[:, None]
        values = (-weight * replay.logp).where(part, 0)
        if replay.weight is not None:
            values = values * replay.weight
        loss = values.sum() / over.totals["groups"].to(where).clamp(min=1)
        return loss, {"weights/less_baseline": weight.detach().expand_as(values)}

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError(f"algorithm.type={self.type} has a loss of groups alone")


def _column(micro: Rollouts) -> Tensor:
    from mmrl.rollouts import Column

    return micro.extra(KEY, Column).values


def _members(micro: Rollouts) -> list[Tensor]:
    """Returns the rows of every group that are in the loss."""
    part = (_column(micro) > 0) & micro.mask.any(1)
    return [((micro.group == g) & part).nonzero().flatten() for g in micro.group[part].unique()]
