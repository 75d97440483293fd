"""Surrogates whose clip bounds differ from PPO's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from mmrl.algorithms.surrogates.surrogate import AS_REINFORCE, Clipped, Result, Surrogate
from mmrl.protocols.requirements import Needs
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.rollouts import Replay, Rollouts

TEST = "tests/joints/test_clips.py"


class Geometric(Surrogate):
    """GMPO: the geometric mean of a rollout's ratios, each clipped in log space on the side of its advantage's sign.

    So one extreme token has little influence. Rollouts have equal weights, as in the paper, unless algorithm.reduce is
    set. The authors' script clips both sides by `high`, which is the same for the paper's equal bounds.
    """

    equation: ClassVar[str] = (
        "-A exp(mean_t s min(s l_t, s clamp(l_t, -low, high))), l = log r, s the sign of A; repeated for each decision "
        "of the rollout"
    )
    source: ClassVar[str] = "GMPO, arXiv 2507.20673"
    test: ClassVar[str] = TEST
    one_weight: ClassVar[bool] = True
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: low and high have no effect"
    type: str = "geometric"
    low: Schedule = number(0.4, "smallest log-ratio is -low", ge=0)
    high: Schedule = number(0.4, "largest log-ratio is high", ge=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes -A times the geometric mean of a rollout's ratios, each clipped in log space, and statistics;
        [rollout, decision]."""
        import torch

        from mmrl.core.ratios import aggregate_log_ratio

        sign = advantages.sign()
        clamped = log_ratio.clamp(-self.low.value, self.high.value)
        bounded = sign * torch.minimum(sign * log_ratio, sign * clamped)
        ratio = aggregate_log_ratio(bounded, micro.mask.to(log_ratio.device), level="sequence").exp()
        return -advantages * ratio, {"ratio": ratio.detach(), "clipped": (bounded != log_ratio).to(ratio.dtype)}


class LogClip(Clipped):
    """PPO's clip on the logarithm of the ratio, so that the gradient of a decision is not weighted by its ratio (CPGD).

    For the full method, add the term kl against old, the policy drift.
    """

    equation: ClassVar[str] = "-min(l A, clamp(l, log(1 - low), log(1 + high)) A), l = log r"
    source: ClassVar[str] = "CPGD, arXiv 2505.12504, whose drift is the term kl against old"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: low and high have no effect"
    type: str = "log_clip"
    low: Schedule = number(0.2, "l gains nothing below log(1 - low)", ge=0, lt=1)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes PPO's objective with log-ratios and their bounds in place of ratios; [rollout, decision]."""
        import torch

        bounded = log_ratio.clamp(math.log(1 - self.low.value), math.log1p(self.high.value))
        values = -torch.minimum(log_ratio * advantages, bounded * advantages)
        return values, {"ratio": log_ratio.detach().exp()}


class Tapered(Surrogate):
    """The policy gradient without an importance weight where the advantage is positive, and with the ratio, at most 1,
    where it is negative (TOPR). So a response that has become unlikely is not pushed further down.

    The paper's ratio is the product over a response, and its reward has no group baseline: algorithm.baseline=none.
    """

    equation: ClassVar[str] = "gradient -A dlogp where A >= 0, else -min(r, 1) A dlogp"
    source: ClassVar[str] = "TOPR, arXiv 2503.14286, with the ratio of algorithm.level"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = AS_REINFORCE
    type: str = "tapered"

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes values with the gradient -w A dlogp, w without gradient, and statistics; [rollout, decision]."""
        from mmrl.core.surrogates import policy_gradient_values

        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(max=1).where(advantages < 0, 1.0)
        return policy_gradient_values(weight * advantages, log_ratio), {"ratio": ratio, "weight": weight}


class SqrtClip(Surrogate):
    """A clip with bounds that are further from 1 the smaller the token's probability was under the old policy (RIPO).

    The ratio of a rare token may change much, that of a common one little; the bounds are isometric in the Fisher
    metric.
    """

    equation: ClassVar[str] = (
        "-min(r A, clamp(r, max(least, 1 - sqrt(low / p_old)), min(most, 1 + sqrt(high / p_old))) A), at most cap |A| "
        "where A < 0"
    )
    source: ClassVar[str] = "RIPO: ripo_clip and its loss in Aiolus-X/RIPO at 6482fd6, verl/trainer/ppo/core_algos.py"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: no bound binds"
    type: str = "sqrt_clip"
    low: Schedule = number(0.05, "the ratio gains nothing below 1 - sqrt(low / p_old)", ge=0)
    high: Schedule = number(0.05, "the ratio gains nothing above 1 + sqrt(high / p_old)", ge=0)
    least: float = option(0.5, "smallest lower bound, however rare the token", ge=0, le=1)
    most: float = option(10.0, "largest upper bound, however rare the token", ge=1)
    cap: float | None = option(3.0, "largest loss of a negative advantage, in |A|; null: none", gt=1)

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"tokens"}))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes PPO's objective with bounds 1 - sqrt(low / p_old) and 1 + sqrt(high / p_old), which `least` and
        `most` limit, and with a loss of at most cap |A| for negative advantages; [rollout, decision]."""
        import torch

        from mmrl.rollouts import old_logp

        # 1 / sqrt(p_old), at most e^20, so that it stays finite
        inverse_sqrt = (-old_logp(micro, replay) / 2).clamp(max=20).exp()
        low = (1 - math.sqrt(self.low.value) * inverse_sqrt).clamp(min=self.least)
        high = (1 + math.sqrt(self.high.value) * inverse_sqrt).clamp(max=self.most)
        ratio = log_ratio.exp()
        values = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if self.cap is not None:
            values = values.where(advantages >= 0, values.minimum(-self.cap * advantages))
        stats = {"ratio": ratio, "clip_low": (advantages < 0) & (ratio < low)}
        stats["clip_high"] = (advantages > 0) & (ratio > high)
        return values, {name: value.detach().to(values.dtype) for name, value in stats.items()}


class BoundaryChance(Clipped):
    """PPO's clip, but a decision slightly beyond the bound keeps its gradient with a certain probability (NSR).

    Whether it keeps the gradient is drawn once per step, for each decision.
    """

    equation: ClassVar[str] = (
        "clip's, but -r A with probability `keep` where 1 + high < r <= 1 + high + band and A > 0, or where "
        "1 - low - band <= r < 1 - low and A < 0"
    )
    source: ClassVar[str] = "reconstructed from what NSR, arXiv 2605.22703, says of its stochastic boundary"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: no ratio is past a bound"
    type: str = "boundary_chance"
    band: float = option(0.1, "width of the range beyond the bound", gt=0)
    keep: float = option(0.5, "probability that a decision in that range keeps its gradient", ge=0, le=1)

    def prepare(self, batch: Batch) -> None:
        """Draws a uniform random number in [0, 1) for each decision, which `values` compares with `keep`."""
        import torch

        from mmrl.rollouts import DecisionColumn

        mask = batch.rollouts.mask
        batch.rollouts.extras[self.key] = DecisionColumn(torch.rand(mask.shape, generator=batch.generator(self.type)))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        """Computes PPO's clipped objective, but -r A for the randomly drawn decisions within `band` beyond the bound
        that the clip would deprive of their gradient; [rollout, decision]."""
        from mmrl.core.surrogates import surrogate
        from mmrl.rollouts import DecisionColumn

        uniform = micro.extra(self.key, DecisionColumn)
        values, stats = surrogate(log_ratio, advantages, kind="clip", **self.bounds)
        ratio, low, high = log_ratio.exp(), 1 - self.low.value, 1 + self.high.value
        above = (advantages > 0) & (ratio > high) & (ratio <= high + self.band)
        below = (advantages < 0) & (ratio < low) & (ratio >= low - self.band)
        retained = (above | below) & (uniform.values.to(ratio.device) < self.keep)
        stats["kept"] = retained.to(values.dtype)
        return (-ratio * advantages).where(retained, values), stats
