"""A surrogate with a trust region for whole chains of denoising steps (TruDi)."""

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
    """A penalty on the divergence of whole denoising chains from the old policy, and a bound beyond which a chain's
    advantage is not used.

    A chain is the denoising of an image, or of the actions at one policy step of a robot. Its divergence is the sum of
    the exact divergences of its stochastic steps, those inside the window. If all steps are stochastic, the mean over
    chains is an upper bound of the divergence of the final images or actions. With a price of type multiplier and the
    metric surrogate/trajectory_kl, that mean is constrained to a target. Divergences are in nats if the likelihood's
    `reduction` is sum, and in nats per element if it is mean.
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
        "weight of a chain's divergence; the metric surrogate/trajectory_kl, which it may follow, is a mean over the "
        "updates of a step, of which the first has 0",
        ge=0,
    )
    bound: float = option(
        math.inf, "largest divergence of a chain whose advantage is used; .inf: no bound", gt=0, allow_inf_nan=True
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> TrajectoryTrustRegion:
        if self.bound == math.inf and self.price.extremes[1] == 0:
            raise ValueError(
                "price=0 and bound=.inf leave the divergence unlimited; set price above 0 or a finite bound, or use "
                "algorithm.surrogate=reinforce"
            )
        return self

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"divergence"}))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        policy_loss, penalty, stats = self._parts(log_ratio, advantages, micro, replay)
        return policy_loss + penalty, stats

    def objective(
        self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay, reduction: Reduction
    ) -> Result:
        """Computes the loss, 0-d. `replay.weight` applies to the policy loss only: a weighted sum of divergences would
        not be a chain's divergence."""
        policy_loss, penalty, stats = self._parts(log_ratio, advantages, micro, replay)
        return reduction((policy_loss if replay.weight is None else policy_loss * replay.weight) + penalty), stats

    def _parts(
        self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns the policy-gradient loss, the divergence penalty, and statistics; each [rollout, decision]."""
        from mmrl.core.ratios import sum_per_unit
        from mmrl.rollouts import POLICY_STEPS

        step_kl = _divergence(micro, replay).where(micro.mask.to(log_ratio.device), 0)
        chain_kl = sum_per_unit(step_kl.detach(), POLICY_STEPS.get(replay))  # repeated for each step of the chain
        dropped = chain_kl > self.bound
        ratio = log_ratio.exp()
        stats = {"ratio": ratio.detach(), "trajectory_kl": chain_kl, "dropped": dropped.to(ratio.dtype)}
        return (-ratio * advantages).where(~dropped, 0), self.price.value * step_kl, stats


def _divergence(micro: Rollouts, replay: Replay) -> Tensor:
    """Returns the divergence of each step from the old policy, [rollout, decision].

    It is 0 if the replay has none: heads that compare distributions omit it before the first update, when the old
    policy is the current one.
    """
    if replay.divergence is not None:
        return replay.divergence
    assert micro.old_prediction is None or not micro.mask.any()
    return replay.logp.detach() * 0
