"""A penalty on the decisions that make entropy collapse."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.controls import Control, number
from mmrl.needs import Needs
from mmrl.settings import option
from mmrl.terms.base import Term

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.facts import Batch
    from mmrl.rollouts import Replay, Rollouts


class CovarianceKL(Term):
    """The share of the decisions whose likelihood and advantage are together furthest above the mean may not leave the
    old policy; the others may. It acts from the second update of a step on, for at the first the ratio is 1."""

    equation: ClassVar[str] = (
        "coefficient |logp - old_logp| (or k2, k3 of it) for the share with the largest (logp - mean logp)(A - mean A) "
        "over the decisions of all ranks; 0 for the others"
    )
    source: ClassVar[str] = "KL-Cov, arXiv 2505.22617"
    test: ClassVar[str] = "tests/joints/test_more_terms.py"
    type: str = "covariance_kl"
    coefficient: Control = number(1.0, "weight of the penalty", ge=0)
    share: float = option(2e-4, "of the decisions that are held", gt=0, le=1)
    estimator: Literal["absolute", "k2", "k3"] = option("absolute", "of the divergence from the old policy")

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), old=True, statistics=frozenset({"logp"}))

    def prepare(self, batch: Batch) -> None:
        from mmrl.rollouts import DecisionColumn

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.advantages is not None
        logp, advantages = batch.decisions(rollouts.old_logp), batch.decisions(rollouts.advantages)
        covariance = (rollouts.old_logp - logp.mean()) * (rollouts.advantages - advantages.mean())
        everyone = batch.decisions(covariance).sort(descending=True).values
        held = rollouts.mask & False
        if len(everyone):
            held = rollouts.mask & (covariance >= everyone[max(1, int(self.share * len(everyone))) - 1])
        rollouts.extras[self.key] = DecisionColumn(held)

    def values(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from mmrl.core.regularizers import kl_estimate
        from mmrl.rollouts import DecisionColumn

        held = micro.extras[self.key]
        assert micro.old_logp is not None and isinstance(held, DecisionColumn)
        old, chosen = micro.old_logp.to(replay.logp.device), held.values.to(replay.logp.device)
        if self.estimator == "absolute":
            apart = (replay.logp - old).abs()
        else:
            apart = kl_estimate(replay.logp, old, kind=self.estimator)
        values = apart.where(chosen, 0)
        return self.coefficient.value * values, {"covariance_kl": values.detach().where(chosen, torch.nan)}
