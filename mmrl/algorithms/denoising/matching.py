"""GRPO on likelihoods of final samples that are estimated by flow-matching errors (AWM, FPO)."""

from __future__ import annotations

from typing import ClassVar

from mmrl.algorithms.grpo import GRPO
from mmrl.algorithms.surrogates.surrogate import Clip, Surrogate
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import constant
from mmrl.settings import option


class Matching(GRPO):
    """GRPO whose log-likelihood of a sample is its negative flow-matching error.

    The old and the current policy use the same noise levels and noises. No denoising chain is stored, and any solver
    may sample.
    """

    equation: ClassVar[str] = "log r = w(s) (|v_old - (noise - data)|^2 - |v - (noise - data)|^2); surrogate(r, A)"
    source: ClassVar[str] = "AWM, arXiv 2509.25050; FPO, arXiv 2507.21053"
    type: str = "matching"
    surrogate: Surrogate = option(Clip(low=constant(5e-3), high=constant(5e-3)), "objective of ratio and advantage")

    @property
    def base_needs(self) -> Needs:
        return super().base_needs | Needs(offers=frozenset({"matching"}))
