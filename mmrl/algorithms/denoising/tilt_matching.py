"""DTM for masked diffusion: the token distributions in each state are fitted to the reward-tilted old policy."""

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

KEY = "tilt_matching"  # name of a column of rollouts: the factor c of the control variate


class TiltMatching(RewardedAlgorithm):
    """A weighted cross-entropy on the tokens of a response in each of its masked states (DTM).

    The weight is exp(tilt x reward), so the policy fits the old policy's token posterior under that tilt. No likelihood
    of the response and no ratio is needed. The old policy's token distribution is a control variate, which does not
    change the expected target. Each step tilts the policy further, in several updates (algorithm.epochs,
    algorithm.minibatches).
    """

    equation: ClassVar[str] = (
        "-sum_v y_v log p_v in every state, y = e^(tilt r) [v = x] + c (p_old_v - [v = x]); c: 0, 1, or the mean "
        "e^(tilt r) of the group's other rollouts"
    )
    source: ClassVar[str] = "DTM, arXiv 2604.18739; c from the group's other rollouts is mmrl's own"
    test: ClassVar[str] = "tests/joints/test_tilt_matching.py"
    type: str = "tilt_matching"
    tilt: Schedule = number(0.5, "factor of the reward in the exponent, per step", gt=0)
    control_variate: Literal["none", "one", "others"] = option(
        "one", "factor c of the old policy's distribution: 0, 1, or the mean e^(tilt r) of the group's other rollouts"
    )

    @property
    def base_needs(self) -> Needs:
        return Needs(offers=frozenset({"distribution"}), old=True, statistics=frozenset({"logp"}))

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        if self.control_variate == "others" and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with algorithm.control_variate=others: a group has no other "
                "rollouts; raise rollout.group_size, or set algorithm.control_variate=one"
            )

    def advantages(self, batch: Batch) -> Tensor:
        """Computes the weight of the response's tokens, e^(tilt r) - c, [rollout], 0 if the reward is unknown; and
        stores c, the factor of the control variate."""
        import torch

        from mmrl.rollouts import Column

        tilted, group = (self.tilt.value * batch.combined_rewards()).exp(), batch.column("group")
        scored = ~tilted.isnan()
        tilted = tilted.where(scored, 0.0)
        factor = torch.zeros_like(tilted)
        if self.control_variate == "one":
            factor = scored.float()
        elif self.control_variate == "others":
            for g in group[scored].unique():
                rows = ((group == g) & scored).nonzero().flatten()
                if len(rows) > 1:
                    factor[rows] = (tilted[rows].sum() - tilted[rows]) / (len(rows) - 1)
        local_factor = batch.local(factor)
        if batch.rollouts.filler is not None:
            local_factor = local_factor.masked_fill(batch.rollouts.filler, 0.0)
        batch.rollouts.extras[KEY] = Column(local_factor)
        return batch.local(tilted - factor)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes -A logp plus c times the cross-entropy with the old policy's prediction, [rollout, decision]."""
        from mmrl.rollouts import OLD_CROSS_ENTROPY, Column

        factor = micro.extra(KEY, Column)
        assert micro.advantages is not None
        cross_entropy = OLD_CROSS_ENTROPY.of(replay)
        device = replay.logp.device
        values = -micro.advantages.to(device) * replay.logp + factor.values.to(device)[:, None] * cross_entropy
        return values, {"tilt/old_cross_entropy": cross_entropy.detach()}
