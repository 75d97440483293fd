"""Fitting what is said of every token in every state to the reward-tilted policy that made the rollouts."""

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

KEY = "tilt_matching"  # of its column: the factor of the control variate


class TiltMatching(RewardedAlgorithm):
    """In every state that a response is shown in, its token counts as much as the response's tilted reward, so that
    what the policy says becomes the old policy's posterior of tokens under that tilt; no likelihood of a response is
    needed, and no ratio. What the old policy said of all tokens is a control variate: it changes the target by nothing
    on average. Each step tilts the policy that it began with a little more, and learns from its rollouts in several
    updates (algorithm.epochs, algorithm.minibatches)."""

    equation: ClassVar[str] = (
        "-sum_v y_v log p_v in every state, y = e^(tilt r) [v = x] + c (p_old_v - [v = x]); c: 0, 1, or the mean "
        "e^(tilt r) of the group's others"
    )
    source: ClassVar[str] = "DTM, arXiv 2604.18739; the group's others as the factor are this project's"
    test: ClassVar[str] = "tests/joints/test_tilt_matching.py"
    type: str = "tilt_matching"
    tilt: Schedule = number(0.5, "of the policy by a reward of 1, in one step", gt=0)
    control_variate: Literal["none", "one", "others"] = option(
        "one", "the factor c of what the old policy said: 0, 1, or what the group's other rollouts are worth"
    )

    @property
    def own_needs(self) -> Needs:
        return Needs(offers=frozenset({"distribution"}), old=True, statistics=frozenset({"logp"}))

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        if self.control_variate == "others" and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with algorithm.control_variate=others: a rollout has no "
                "others; raise group_size or set algorithm.control_variate=one"
            )

    def advantages(self, batch: Batch) -> Tensor:
        """[rollout] e^(tilt r) - c: how much likelier the response's own tokens are made; 0 where nothing was
        scored."""
        import torch

        from mmrl.rollouts import Column

        worth, group = (self.tilt.value * batch.combined()).exp(), batch.fact("group")
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
        mine = batch.mine(factor)
        if batch.rollouts.filler is not None:
            mine = mine.masked_fill(batch.rollouts.filler, 0.0)
        batch.rollouts.extras[KEY] = Column(mine)
        return batch.mine(worth - factor)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.rollouts import OLD_CROSS_ENTROPY, Column

        factor = micro.extra(KEY, Column)
        assert micro.advantages is not None
        cross_entropy = OLD_CROSS_ENTROPY.of(replay)
        where = replay.logp.device
        values = -micro.advantages.to(where) * replay.logp + factor.values.to(where)[:, None] * cross_entropy
        return values, {"tilt/old_cross_entropy": cross_entropy.detach()}
