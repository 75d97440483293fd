"""The divergence from a reference policy as a loss term."""

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


class KL(Term):
    """It keeps the policy near the reference, which is the policy that training started from."""

    equation: ClassVar[str] = (
        "coefficient x: k1 d; k2 d^2 / 2; k3 exp(-d) - 1 + d, with d = logp - ref_logp; "
        "exact |mu - mu_ref|^2 / (2 std^2); velocity |v - v_ref|^2"
    )
    source: ClassVar[str] = "Schulman 2020, Approximating KL divergence; GRPO, arXiv 2402.03300; Flow-GRPO, 2505.05470"
    type: str = "kl"
    coefficient: Control = number(0.01, "weight of the term", ge=0)
    estimator: Literal["k1", "k2", "k3", "exact", "velocity"] = option(
        "k3", "k1, k2, k3: from single samples; exact, velocity: of denoising steps"
    )
    reset_every: int | None = option(
        None, "steps after which the present policy becomes the reference (ProRL, arXiv 2505.24864)", unit="steps", ge=1
    )

    @property
    def needs(self) -> Needs:
        resets = frozenset() if self.reset_every is None else frozenset({self.reset_every})
        offers = frozenset({OFFERS.get(self.estimator, "single_sample_kl")})
        return Needs(offers=offers, reference=True, reference_resets=resets)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        kl = self._divergence(micro, replay)
        return self.coefficient.value * kl, {"kl": kl.detach()}

    def _divergence(self, micro: Rollouts, replay: Replay) -> Tensor:
        from mmrl.core.regularizers import kl_estimate

        if self.estimator in ("k1", "k2", "k3"):
            assert micro.ref_logp is not None
            return kl_estimate(replay.logp, micro.ref_logp.to(replay.logp.device), kind=self.estimator)
        found = replay.reference_kl if self.estimator == "exact" else replay.reference_error
        assert found is not None
        return found
