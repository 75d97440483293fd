"""The divergence from the policy that made the rollouts, as a loss term."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.controls import Control, number
from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class OldKL(Term):
    """It bounds a step's drift by a price in place of, or beside, a clip. With a coefficient of type multiplier that
    follows the metric old_kl to a target it is a constraint."""

    equation: ClassVar[str] = (
        "coefficient x, from samples of the old policy: forward, KL(old || now), -l + (r - 1); reverse, KL(now || "
        "old), r l - (r - 1); l = log r; normalised leaves out what is in brackets"
    )
    source: ClassVar[str] = "arXiv 2505.17508; the policy drift of CPGD, arXiv 2505.12504, is the forward one"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "old_kl"
    coefficient: Control = number(0.01, "weight of the term", ge=0)
    direction: Literal["forward", "reverse"] = option("forward", "forward: KL(old || now); reverse: KL(now || old)")
    normalised: bool = option(
        False, "leave out the correction of the mass, which makes every single estimate at least 0"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), old=True)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.ratios import BOUND

        old = replay.logp.detach() if micro.old_logp is None else micro.old_logp.to(replay.logp.device)
        log_ratio = (replay.logp - old).clamp(-BOUND, BOUND)
        ratio = log_ratio.exp()
        kl = -log_ratio if self.direction == "forward" else ratio * log_ratio
        if not self.normalised:
            kl = kl + (ratio - 1 if self.direction == "forward" else 1 - ratio)
        return self.coefficient.value * kl, {"old_kl": kl.detach()}
