"""DFT: supervised learning in which each token is weighted by its probability under the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.supervised import Supervised

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.rollouts import Replay, Rollouts


class ReweightedSupervised(Supervised):
    """The negative log-likelihood of demonstrations, each token weighted by its own detached probability (DFT)."""

    equation: ClassVar[str] = "-p logp, p = exp(logp) detached"
    source: ClassVar[str] = "DFT, arXiv 2508.05629"
    test: ClassVar[str] = "tests/joints/test_preference.py"
    type: str = "reweighted_supervised"

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        weight = replay.logp.detach().exp().clamp(max=1)
        return -weight * replay.logp, {"supervised/weight": weight}
