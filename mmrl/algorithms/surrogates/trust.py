"""Surrogates with other trust regions than a clip: penalties, masks and group-normalized ratios."""

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
    """A penalty on the variance of the ratio instead of a clip (R^2VPO).

    With a price of type multiplier and the metric surrogate/variance, the variance is constrained to a target.
    """

    equation: ClassVar[str] = "-r A + price (r - 1)^2"
    source: ClassVar[str] = "reconstructed from what R^2VPO, arXiv 2601.03320, says: a primal-dual bound on Var(r)"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: the variance and its gradient are 0"
    type: str = "ratio_variance"
    price: Schedule = number(1.0, "weight of the variance in the loss", ge=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes -r A + price (r - 1)^2 and statistics, [rollout, decision]."""
        ratio = log_ratio.exp()
        variance = (ratio - 1).square()
        values = -ratio * advantages + self.price.value * variance
        return values, {"ratio": ratio.detach(), "variance": variance.detach()}


class QueryTrustRegion(Surrogate):
    """A separate trust region for each prompt, by a penalty on the log-ratio (QUATRO).

    The weight of the penalty (price) is the Lagrange multiplier of maximizing the group's advantage under a bound on
    the divergence from the old policy. At a ratio of 1 the gradient is that of reinforce, so the penalty acts from the
    second update of a step on.
    """

    equation: ClassVar[str] = (
        "gradient -r (A - price_q log r) dlogp, price_q = argmin_l l bound + l log mean_i exp(A_i / l) over the group, "
        "within [least, most]"
    )
    source: ClassVar[str] = "reconstructed from what QUATRO, arXiv 2602.04620, says: an exact trust region a query"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: prices have no effect"
    type: str = "query_trust_region"
    bound: float = option(0.1, "largest divergence from the old policy, for each prompt", unit="nats", gt=0)
    least: float = option(0.01, "smallest price", gt=0)
    most: float = option(100.0, "largest price", gt=0)

    def prepare(self, batch: Batch) -> None:
        """Stores the price of each rollout, [rollout]: the Lagrange multiplier of its group, from the mean advantages
        of the group's rollouts."""
        import torch

        from mmrl.core.duals import solve_trust_region_dual
        from mmrl.rollouts import Column

        rollouts = batch.rollouts
        assert rollouts.advantages is not None
        mask = rollouts.mask
        mean = rollouts.advantages.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)
        price = torch.full((len(rollouts),), self.least)
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            group_advantages = mean[rows & mask.any(1)]
            if len(group_advantages):
                price[rows] = solve_trust_region_dual(group_advantages, self.bound, self.least, self.most)
        rollouts.extras[self.key] = Column(price)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes values whose gradient is -r (A - price log r) dlogp, and statistics; [rollout, decision]."""
        from mmrl.core.surrogates import policy_gradient_values

        price = _column(micro, self.key).to(log_ratio)[:, None]
        detached = log_ratio.detach()
        # detached: the gradient of -r (A - price log r) itself would lower every likelihood by the price
        stats = {"ratio": detached.exp(), "price": price.expand_as(detached)}
        return policy_gradient_values(detached.exp() * (advantages - price * detached), log_ratio), stats


class SequenceMask(Surrogate):
    """Masks a whole rollout if the divergence of any of its decisions is above a bound (trust region masking).

    The reason is that bounds on policy improvement depend on the largest divergence. If another engine sampled, its
    log-probabilities are used as the old ones.
    """

    equation: ClassVar[str] = "-r A, or 0 for all decisions of a rollout with max_t divergence_t > bound"
    source: ClassVar[str] = "reconstructed from trust region masking, arXiv 2512.23075"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: only rollouts that another engine sampled can be dropped"
    type: str = "sequence_mask"
    bound: float = option(description="largest divergence of a decision", gt=0)
    estimate: Literal["k3", "tv", "kl"] = option(
        "k3", "estimator of the divergence. k3: from the sampled decision; tv, kl: of 'this token or another'"
    )

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"single_sample_kl" if self.estimate == "k3" else "tokens"}))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes -r A, or 0 for a rollout in which the divergence of a decision is above `bound`, and statistics;
        [rollout, decision]."""
        from mmrl.core.regularizers import kl_estimate, token_divergence
        from mmrl.rollouts import old_logp

        logp, old = replay.logp.detach(), old_logp(micro, replay)
        if micro.behaviour_logp is not None:
            behaviour = micro.behaviour_logp.to(logp.device)
            old = behaviour.where(~behaviour.isnan(), old)
        if self.estimate == "k3":
            divergence = kl_estimate(old, logp, kind="k3")  # in this order: the old policy sampled the rollouts
        else:
            divergence = token_divergence(logp, old, kind=self.estimate)
        largest = divergence.where(micro.mask.to(logp.device), 0).amax(1, keepdim=True)
        dropped = (largest > self.bound).expand_as(log_ratio)
        ratio = log_ratio.exp()
        values = (-ratio * advantages).where(~dropped, 0)
        return values, {"ratio": ratio.detach(), "dropped": dropped.to(values.dtype)}


class GroupExpectation(Clipped):
    """A ratio whose denominator is the mean probability of the group's responses under the old policy (GEPO).

    So a response that was very unlikely does not get a huge weight. The ratio is of whole responses, is clipped as in
    PPO, and is not 1 even before the first update.
    """

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
        """Stores what is added to a rollout's log-ratio, [rollout], so that its denominator is the group's expected
        probability sum_j (q_j / sum_k q_k) q_j instead of its own q, the mean probability under the old policy."""
        import torch

        from mmrl.rollouts import Column

        rollouts = batch.rollouts
        assert rollouts.old_logp is not None
        length = rollouts.mask.sum(1)
        mean = rollouts.old_logp.where(rollouts.mask, 0).sum(1) / length.clamp(min=1)
        correction = torch.zeros(len(rollouts))  # added to the log-ratio to replace its denominator
        for group in rollouts.group.unique():  # a group lies on one rank
            rows = rollouts.group == group
            log_q = mean[rows & (length > 0)]
            if len(log_q):
                correction[rows] = mean[rows] - ((2 * log_q).logsumexp(0) - log_q.logsumexp(0))
        rollouts.extras[self.key] = Column(correction)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes PPO's clipped objective of the weights p_i / E_group[q], with a mean log-ratio for each rollout;
        [rollout, decision]."""
        from mmrl.core.ratios import BOUND, aggregate_log_ratio
        from mmrl.core.surrogates import surrogate

        sequence_ratio = aggregate_log_ratio(log_ratio, micro.mask.to(log_ratio.device), level="sequence")
        log_weight = (sequence_ratio + _column(micro, self.key).to(log_ratio)[:, None]).clamp(-BOUND, BOUND)
        values, stats = surrogate(log_weight, advantages, kind="clip", **self.bounds)
        return values, stats | {"ratio": log_ratio.detach().exp(), "weight": stats["ratio"]}


def _column(micro: Rollouts, key: str) -> Tensor:
    """Returns the values that `prepare` stored under `key`, [rollout]."""
    from mmrl.rollouts import Column

    return micro.extra(key, Column).values
