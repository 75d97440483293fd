"""A baseline for every token, weighted by how much each rollout's gradient would move."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class TokenBaseline(Shaper):
    """The baseline of token t is the mean reward of the group's rollouts that reach it, each weighted by the squared
    gradient of its tokens up to t, as far as its own logits tell it. It takes the place of the group's baseline: use it
    with algorithm.baseline=none and algorithm.scale=none."""

    equation: ClassVar[str] = (
        "A_t = A - sum_j W_jt A_j / sum_j W_jt,  W_jt = sum_{s <= t} (1 - 2 p_js + sum_k p_k^2), over the group"
    )
    source: ClassVar[str] = "the optimal token baseline of arXiv 2602.07078, with |d log p / d logits|^2 as the weight"
    type: str = "token_baseline"

    @property
    def needs(self) -> Needs:
        statistics = frozenset({"logp", "square_sum"})
        return Needs(offers=frozenset({"square_sum"}), statistics=statistics)

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        import torch

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.old_square_sum is not None
        moved = (1 - 2 * rollouts.old_logp.exp() + rollouts.old_square_sum).where(rollouts.mask, 0)
        weight = moved.cumsum(1).where(rollouts.mask, 0)
        shaped = torch.zeros_like(advantages)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            w, a = weight[rows], advantages[rows]
            baseline = (w * a).sum(0) / w.sum(0).clamp(min=1e-12)
            shaped[rows] = (a - baseline).where(rollouts.mask[rows] & (w.sum(0) > 0), 0)
        return shaped
