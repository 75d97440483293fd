"""The KL penalty in the reward: the divergence of the sampling policy from the reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mmrl.protocols.requirements import Needs, Reference
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Section, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class RewardKL(Section):
    """A penalty on the divergence from the reference policy, which is subtracted from the reward. It is a constant for
    the gradient."""

    coefficient: Schedule = number(0.01, "penalty per nat of divergence", ge=0)
    estimator: Literal["k1", "k2", "k3", "absolute"] = option(
        "k1", "estimator of a decision's divergence; in the reward, k1 (logp - ref_logp) gives the KL's gradient"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), statistics=frozenset({"logp"}), reference=Reference())

    def costs(self, batch: Batch) -> Tensor:
        """Computes the penalty of each decision of this rank, [rollout, decision]; 0 outside the mask.

        Logs the mean divergence per decision as reward_kl.
        """
        from mmrl.core.regularizers import kl_estimate

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.ref_logp is not None
        kl = kl_estimate(rollouts.old_logp, rollouts.ref_logp.to(rollouts.old_logp), kind=self.estimator)
        kl = kl.where(rollouts.mask.to(kl.device), 0)
        known = batch.gather_decisions(kl)
        batch.report({"reward_kl": float(known.mean()) if len(known) else 0.0})
        return self.coefficient.value * kl
