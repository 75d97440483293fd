"""The divergence from an average of the policy's own weights, as a loss term."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.controls import Control, number
from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts

OFFERS = {"exact": "gaussian", "velocity": "velocity"}


class EmaKL(Term):
    """It slows the policy down without holding it near where it began: the reference follows it step by step."""

    equation: ClassVar[str] = "kl's, with reference <- decay reference + (1 - decay) policy after every step"
    source: ClassVar[str] = "the EMA penalty of AWM, arXiv 2509.25050"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "ema_kl"
    coefficient: Control = number(0.1, "weight of the term", ge=0)
    decay: float = option(0.9, "of the reference's weights a step", ge=0, lt=1)
    estimator: Literal["k1", "k2", "k3", "exact", "velocity"] = option(
        "k3", "k1, k2, k3: from single samples; exact, velocity: of denoising steps"
    )

    @property
    def needs(self) -> Needs:
        offers = frozenset({OFFERS.get(self.estimator, "single_sample_kl")})
        return Needs(offers=offers, reference=True, reference_decays=frozenset({self.decay}))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.regularizers import kl_estimate

        if self.estimator in ("k1", "k2", "k3"):
            assert micro.ref_logp is not None
            kl = kl_estimate(replay.logp, micro.ref_logp.to(replay.logp.device), kind=self.estimator)
        else:
            found = replay.reference_kl if self.estimator == "exact" else replay.reference_error
            assert found is not None
            kl = found
        return self.coefficient.value * kl, {"ema_kl": kl.detach()}
