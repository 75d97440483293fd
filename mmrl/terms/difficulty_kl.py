"""The divergence from the reference, held against what is easy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.controls import Control, number
from mmrl.needs import Needs
from mmrl.terms.base import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch
    from mmrl.rollouts import Replay, Rollouts


class DifficultyKL(Term):
    """A right answer to a hard prompt may leave the reference; that to an easy one, and a wrong answer, may not."""

    equation: ClassVar[str] = (
        "coefficient w (exp(-d) - 1 + d), d = logp - ref_logp; w = 1 - exp(-e p) where A > 0 and 0 < p < 1, p the mean "
        "accuracy of the group; else w = 1"
    )
    source: ClassVar[str] = "DADS of View-R1, from its released code"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "difficulty_kl"
    coefficient: Control = number(0.001, "weight of the term", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), reference=True)

    def prepare(self, batch: Batch) -> None:
        import math

        import torch

        from mmrl.rollouts import DecisionColumn

        rollouts = batch.rollouts
        assert rollouts.advantages is not None
        solved = batch.mine(batch.fact("group/accuracy"))
        weight = 1 - torch.exp(-math.e * solved)
        free = (rollouts.advantages > 0) & ((solved > 0) & (solved < 1))[:, None]
        rollouts.extras[self.key] = DecisionColumn(weight[:, None].expand(free.shape).where(free, 1.0))

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        from mmrl.core.regularizers import kl_estimate
        from mmrl.rollouts import DecisionColumn

        weight = micro.extras[self.key]
        assert micro.ref_logp is not None and isinstance(weight, DecisionColumn)
        kl = kl_estimate(replay.logp, micro.ref_logp.to(replay.logp.device), kind="k3")
        return self.coefficient.value * weight.values.to(kl) * kl, {"difficulty_kl": kl.detach()}
