"""The divergence from the reference as a part of the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mmrl.protocols.requirements import Needs, Reference
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Section, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class RewardKL(Section):
    """A price on the divergence of the policy that sampled from the reference, which the reward pays. It has no
    gradient of its own."""

    coefficient: Schedule = number(0.01, "reward that a nat of divergence costs", ge=0)
    estimator: Literal["k1", "k2", "k3", "absolute"] = option(
        "k1", "of one decision's divergence; k1, logp - ref_logp, has the KL's gradient in the reward"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), statistics=frozenset({"logp"}), reference=Reference())

    def costs(self, batch: Batch) -> Tensor:
        """Returns what each decision of this rank costs, [rollout, decision], 0 where none counts; reports the mean
        divergence of a decision as reward_kl."""
        from mmrl.core.regularizers import kl_estimate

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None and rollouts.ref_logp is not None
        kl = kl_estimate(rollouts.old_logp, rollouts.ref_logp.to(rollouts.old_logp), kind=self.estimator)
        kl = kl.where(rollouts.mask.to(kl.device), 0)
        known = batch.gather_decisions(kl)
        batch.report({"reward_kl": float(known.mean()) if len(known) else 0.0})
        return self.coefficient.value * kl
