"""Process rewards that the policy gives itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch


class SelfProcess(Shaper):
    """What a rollout has gained so far in likelihood over the reference, against the group's rollouts that are still on
    at that place, is added to the advantage of each decision."""

    equation: ClassVar[str] = (
        "A_t <- A + R_t - mean of R_t over the group's rollouts that reach t, "
        "R_t = beta sum_{s <= t} (logp - ref_logp)_s"
    )
    source: ClassVar[str] = "SPRO's masked step advantage, arXiv 2507.01551"
    test: ClassVar[str] = "tests/joints/test_shapers.py"
    type: str = "self_process"
    beta: float = option(0.05, "weight of the log-ratio to the reference", gt=0)

    @property
    def needs(self) -> Needs:
        offers = frozenset({"single_sample_kl"})
        return Needs(offers=offers, reference=True, statistics=frozenset({"logp"}))

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        rollouts, shaped = batch.rollouts, advantages.clone()
        assert rollouts.old_logp is not None and rollouts.ref_logp is not None
        gained = self.beta * (rollouts.old_logp - rollouts.ref_logp).where(rollouts.mask, 0).cumsum(1)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            alive = rollouts.mask[rows]
            mean = gained[rows].where(alive, 0).sum(0) / alive.sum(0).clamp(min=1)
            shaped[rows] = advantages[rows] + (gained[rows] - mean).where(alive, 0)
        return shaped
