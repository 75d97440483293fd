"""Matching of token distributions in every state to the reward-tilted old policy (DTM)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.algorithm import RewardedAlgorithm
from mmrl.protocols.requirements import Capabilities, Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Replay, Rollouts

KEY = "tilt_matching"  # name of a column: the factor of the control variate


class TiltMatching(RewardedAlgorithm):
    """In every masked state of a response its token is weighted by the response's tilted reward, so that the policy
    fits the old policy's posterior of tokens under that tilt; no likelihood of a response is needed, and no ratio. The
    old policy's token distribution is a control variate, which does not change the target on average. Each step tilts
    the policy a little more, in several updates (algorithm.epochs, algorithm.minibatches)."""

    equation: ClassVar[str] = (
        "-sum_v y_v log p_v in every state, y = e^(tilt r) [v = x] + c (p_old_v - [v = x]); c: 0, 1, or the mean "
        "e^(tilt r) of the group's others"
    )
    source: ClassVar[str] = "DTM, arXiv 2604.18739; the group's others as the factor are this project's"
    test: ClassVar[str] = "tests/joints/test_tilt_matching.py"
    type: str = "tilt_matching"
    tilt: Schedule = number(0.5, "tilt of the policy by a reward of 1, in one step", gt=0)
    control_variate: Literal["none", "one", "others"] = option(
        "one", "the factor c of the old policy's distribution: 0, 1, or the mean tilted reward of the group's others"
    )

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"distribution"}), old=True, statistics=frozenset({"logp"}))

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        if self.control_variate == "others" and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with algorithm.control_variate=others: a rollout has no "
                "others; raise group_size or set algorithm.control_variate=one"
            )

    def advantages(self, batch: Batch) -> Tensor:
        """Computes e^(tilt r) - c, the weight of the response's tokens, [rollout]; 0 where nothing was scored."""
        import torch

        from mmrl.rollouts import Column

        worth, group = (self.tilt.value * batch.combined_rewards()).exp(), batch.column("group")
        scored = ~worth.isnan()
        worth = worth.where(scored, 0.0)
        factor = torch.zeros_like(worth)
        if self.control_variate == "one":
            factor = scored.float()
        elif self.control_variate == "others":
            for g in group[scored].unique():
                rows = ((group == g) & scored).nonzero().flatten()
                if len(rows) > 1:
                    factor[rows] = (worth[rows].sum() - worth[rows]) / (len(rows) - 1)
        local = batch.local(factor)
        if batch.rollouts.filler is not None:
            local = local.masked_fill(batch.rollouts.filler, 0.0)
        batch.rollouts.extras[KEY] = Column(local)
        return batch.local(worth - factor)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -A logp plus the control variate's factor times the cross-entropy with the old prediction,
        [rollout, decision]."""
        from mmrl.rollouts import OLD_CROSS_ENTROPY, Column

        factor = micro.extra(KEY, Column)
        assert micro.advantages is not None
        cross_entropy = OLD_CROSS_ENTROPY.of(replay)
        where = replay.logp.device
        values = -micro.advantages.to(where) * replay.logp + factor.values.to(where)[:, None] * cross_entropy
        return values, {"tilt/old_cross_entropy": cross_entropy.detach()}
