"""Surrogates that bound how far the policy moves by other means than a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Clipped, Result, Surrogate
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts

TEST = "tests/joints/test_trust.py"


class RatioVariance(Surrogate):
    """No clip: the variance of the ratio has a price. Written as a control of type multiplier that follows the metric
    surrogate/variance to a target, the price is the dual variable of a bound on it."""

    equation: ClassVar[str] = "-r A + price (r - 1)^2"
    source: ClassVar[str] = "reconstructed from what R^2VPO, arXiv 2601.03320, says: a primal-dual bound on Var(r)"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: the variance and its gradient are 0"
    type: str = "ratio_variance"
    price: Schedule = number(1.0, "weight of the variance in the loss", ge=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        ratio = log_ratio.exp()
        variance = (ratio - 1).square()
        values = -ratio * advantages + self.price.value * variance
        return values, {"ratio": ratio.detach(), "variance": variance.detach()}


class QueryTrustRegion(Surrogate):
    """Every prompt has a trust region of its own: the price of leaving it solves the dual of maximising the group's
    advantage under a bound on the divergence from the old policy. The weight of a decision is detached; at a ratio of 1
    the gradient is that of reinforce, and the price acts from the second update of a step on."""

    equation: ClassVar[str] = (
        "gradient -r (A - price_q log r) dlogp, price_q = argmin_l l bound + l log mean_i exp(A_i / l) over the group, "
        "within [least, most]"
    )
    source: ClassVar[str] = "reconstructed from what QUATRO, arXiv 2602.04620, says: an exact trust region a query"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: no price acts"
    type: str = "query_trust_region"
    bound: float = option(0.1, "on the divergence of a prompt's policy from its old one", unit="nats", gt=0)
    least: float = option(0.01, "smallest price", gt=0)
    most: float = option(100.0, "largest price", gt=0)

    def prepare(self, batch: Batch) -> None:
        import torch

        from mmrl.core.duals import trust_price
        from mmrl.rollouts import Column

        rollouts = batch.rollouts
        assert rollouts.advantages is not None
        mask = rollouts.mask
        mean = rollouts.advantages.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)
        price = torch.full((len(rollouts),), self.least)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            counted = mean[rows & mask.any(1)]
            if len(counted):
                price[rows] = trust_price(counted, self.bound, self.least, self.most)
        rollouts.extras[self.key] = Column(price)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import weighted

        price = _column(micro, self.key).to(log_ratio)[:, None]
        moved = log_ratio.detach()
        # Differentiated as it stands, -r (A - price log r) would push every decision down by the price.
        stats = {"ratio": moved.exp(), "price": price.expand_as(moved)}
        return weighted(moved.exp() * (advantages - price * moved), log_ratio), stats


class SequenceMask(Surrogate):
    """A rollout in which any decision has moved past a bound is masked as a whole, for bounds on the improvement depend
    on the largest divergence. Where another engine sampled, that engine's log-probabilities are the old ones."""

    equation: ClassVar[str] = "-r A, or 0 for all decisions of a rollout with max_t divergence_t > bound"
    source: ClassVar[str] = "reconstructed from trust region masking, arXiv 2512.23075"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: nothing is dropped but what another engine sampled"
    type: str = "sequence_mask"
    bound: float = option(description="largest divergence of a decision", gt=0)
    estimate: Literal["k3", "tv", "kl"] = option(
        "k3", "of the divergence: k3 from the sampled decision; tv, kl: of 'this token or any other'"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl" if self.estimate == "k3" else "tokens"}))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.regularizers import kl_estimate, token_divergence
        from mmrl.rollouts import old_logp

        now, old = replay.logp.detach(), old_logp(micro, replay)
        if micro.behaviour_logp is not None:
            sampled = micro.behaviour_logp.to(now.device)
            old = sampled.where(~sampled.isnan(), old)
        if self.estimate == "k3":
            divergence = kl_estimate(old, now, kind="k3")  # the rollouts are drawn from the old policy
        else:
            divergence = token_divergence(now, old, kind=self.estimate)
        largest = divergence.where(micro.mask.to(now.device), 0).amax(1, keepdim=True)
        dropped = (largest > self.bound).expand_as(log_ratio)
        ratio = log_ratio.exp()
        values = (-ratio * advantages).where(~dropped, 0)
        return values, {"ratio": ratio.detach(), "dropped": dropped.to(values.dtype)}


class GroupExpectation(Clipped):
    """The ratio of a whole response to what the group's responses were worth under the old policy on average: one
    response that was very unlikely does not get an enormous weight. It is clipped as PPO's ratio is, and is not 1
    before the first update either."""

    equation: ClassVar[str] = (
        "-min(w A, clamp(w, 1 - low, 1 + high) A), w_i = p_i / sum_j (q_j / sum_k q_k) q_j, p = exp(mean_t logp), q = "
        "exp(mean_t old logp), j and k over the group"
    )
    source: ClassVar[str] = (
        "GEPO, arXiv 2508.17850, by its released code: yelurebajrang/HeteroRL_GEPO at 97000a8, src/open-r1/online_rl.py"
    )
    test: ClassVar[str] = TEST
    one_weight: ClassVar[bool] = True
    type: str = "group_expectation"
    low: Schedule = number(0.2, "the weight gains nothing below 1 - low", ge=0, le=1)
    high: Schedule = number(0.2, "the weight gains nothing above 1 + high", ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl"}), statistics=frozenset({"logp"}))

    def prepare(self, batch: Batch) -> None:
        import torch

        from mmrl.rollouts import Column

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None
        counted = rollouts.mask.sum(1)
        mean = rollouts.old_logp.where(rollouts.mask, 0).sum(1) / counted.clamp(min=1)
        gap = torch.zeros(len(rollouts))
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            q = mean[rows & (counted > 0)]
            if len(q):
                gap[rows] = mean[rows] - ((2 * q).logsumexp(0) - q.logsumexp(0))
        rollouts.extras[self.key] = Column(gap)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.ratios import BOUND, by_unit
        from mmrl.core.surrogates import surrogate

        moved = by_unit(log_ratio, micro.mask.to(log_ratio.device), level="sequence")
        weight = (moved + _column(micro, self.key).to(log_ratio)[:, None]).clamp(-BOUND, BOUND)
        values, stats = surrogate(weight, advantages, kind="clip", **self.bounds)
        return values, stats | {"ratio": log_ratio.detach().exp(), "weight": stats["ratio"]}


def _column(micro: Rollouts, key: str) -> Tensor:
    from mmrl.rollouts import Column

    return micro.extra(key, Column).values
