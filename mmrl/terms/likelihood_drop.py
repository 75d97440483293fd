"""A penalty on what makes good responses less likely."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.controls import Control, number
from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class LikelihoodDrop(Term):
    """Where a response as a whole has become less likely than it was, the tokens that are to blame are held. Its metric
    tells how often that is so. It acts from the second update of a step on, for at the first nothing has moved."""

    equation: ClassVar[str] = (
        "coefficient max(0, old_logp - logp) in rollouts with sum_t logp < sum_t old_logp, of those with A >= 0; else 0"
    )
    source: ClassVar[str] = "reconstructed from the regulariser against lazy likelihood displacement, arXiv 2512.04220"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "likelihood_drop"
    coefficient: Control = number(0.1, "weight of the penalty", ge=0)
    of: Literal["not_negative", "all"] = option(
        "not_negative", "rollouts: those with an advantage of at least 0, or all"
    )

    @property
    def needs(self) -> Needs:
        return Needs(old=True)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        device = replay.logp.device
        old = replay.logp.detach() if micro.old_logp is None else micro.old_logp.to(device)
        mask = micro.mask.to(device)
        moved = (replay.logp - old).where(mask, 0)
        fell = (moved.detach().sum(1, keepdim=True) < 0).expand_as(moved)
        chosen = fell
        if self.of == "not_negative":
            assert micro.advantages is not None
            chosen = fell & (micro.advantages.to(device) >= 0)
        values = self.coefficient.value * (-moved).relu().where(chosen, 0)
        return values, {"likelihood_fell": fell.to(values.dtype)}
