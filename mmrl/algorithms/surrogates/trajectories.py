"""A surrogate that bounds how far whole chains of denoising steps move."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Result, Surrogate
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.algorithm import Reduction
    from mmrl.rollouts import Replay, Rollouts


class TrajectoryTrustRegion(Surrogate):
    """A price on the divergence of whole chains from the old policy, and a bound beyond which a chain's advantage does
    not count.

    A chain is all that a robot's policy draws at one policy step, or the steps of an image. The exact divergences of
    its steps inside the window are summed, for only those are stochastic. Where all steps are, the mean of the sums is
    an upper bound of the divergence of the final actions or images. Written as a control of type multiplier that
    follows surrogate/trajectory_kl to a target, the price is the dual variable of a bound on that mean. Divergences are
    in the units of the likelihood: nats where its `reduction` is sum, nats an element where it is mean.
    """

    equation: ClassVar[str] = (
        "-r A, or 0 at all steps of a chain with D > bound; + price D_t, D_t = |mean_t - old mean_t|^2 / (2 std_t^2), "
        "D = sum_t D_t over the chain"
    )
    source: ClassVar[str] = (
        "reconstructed from what TruDi, arXiv 2606.15260, says: a constraint on the KL divergence over the entire "
        "diffusion trajectory; that both a price and a bound enforce it is mmrl's choice"
    )
    test: ClassVar[str] = "tests/joints/test_trajectories.py"
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: divergence and price are 0"
    type: str = "trajectory_trust_region"
    price: Schedule = number(
        1.0,
        "of a chain's divergence; surrogate/trajectory_kl, which it may follow, is a mean over a step's updates, the "
        "first of which adds 0",
        ge=0,
    )
    bound: float = option(
        math.inf, "largest divergence of a chain that is learned from; .inf: there is none", gt=0, allow_inf_nan=True
    )

    @model_validator(mode="after")
    def _bounds_something(self) -> TrajectoryTrustRegion:
        if self.bound == math.inf and self.price.extremes[1] == 0:
            raise ValueError("price=0 without a bound is not a trust region; set either, or use surrogate=reinforce")
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"divergence"}))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        gain, cost, stats = self._parts(log_ratio, advantages, micro, replay)
        return gain + cost, stats

    def objective(
        self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay, over: Reduction
    ) -> Result:
        """Computes the loss, 0-d. `replay.weight` applies to the advantages' part only: a weighted sum of divergences
        would not be a chain's divergence."""
        gain, cost, stats = self._parts(log_ratio, advantages, micro, replay)
        return over((gain if replay.weight is None else gain * replay.weight) + cost), stats

    def _parts(
        self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns the policy-gradient loss, the divergence penalty, and statistics; each [rollout, decision]."""
        from mmrl.core.ratios import unit_sum
        from mmrl.rollouts import POLICY_STEPS

        # of each decision, and summed over the chain that it is part of
        each = _divergence(micro, replay).where(micro.mask.to(log_ratio.device), 0)
        whole = unit_sum(each.detach(), POLICY_STEPS.get(replay))
        beyond = whole > self.bound
        ratio = log_ratio.exp()
        stats = {"ratio": ratio.detach(), "trajectory_kl": whole, "dropped": beyond.to(ratio.dtype)}
        return (-ratio * advantages).where(~beyond, 0), self.price.value * each, stats


def _divergence(micro: Rollouts, replay: Replay) -> Tensor:
    """Returns the divergence of each step from the old policy's, [rollout, decision]. Heads that compare distributions
    return none before the first update, when the old policy is the present one: then 0."""
    if replay.divergence is not None:
        return replay.divergence
    assert micro.old_prediction is None or not micro.mask.any()
    return replay.logp.detach() * 0
