"""Surrogates whose bounds lie elsewhere than those of PPO's clip."""

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
    """The geometric mean of a rollout's ratios, each bounded in logarithms on the side of its advantage's sign: one
    extreme token hardly moves it. Rollouts count alike, as in the paper, unless algorithm.reduce is set. The authors'
    own script bounds both signs by `high`, which is the same for the paper's equal bounds."""

    equation: ClassVar[str] = (
        "-A exp(mean_t s min(s l_t, s clamp(l_t, -low, high))), l = log r, s the sign of A; every decision has its "
        "rollout's"
    )
    source: ClassVar[str] = "GMPO, arXiv 2507.20673"
    test: ClassVar[str] = TEST
    one_weight: ClassVar[bool] = True
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: low and high bind nothing"
    compared: ClassVar[str] = "volcengine/verl@b178a3cd"
    type: str = "geometric"
    low: Schedule = number(0.4, "smallest log-ratio is -low", ge=0)
    high: Schedule = number(0.4, "largest log-ratio is high", ge=0)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        import torch

        from mmrl.core.ratios import by_unit

        sign = advantages.sign()
        clamped = log_ratio.clamp(-self.low.value, self.high.value)
        bounded = sign * torch.minimum(sign * log_ratio, sign * clamped)
        ratio = by_unit(bounded, micro.mask.to(log_ratio.device), level="sequence").exp()
        return -advantages * ratio, {"ratio": ratio.detach(), "clipped": (bounded != log_ratio).to(ratio.dtype)}


class LogClip(Clipped):
    """The policy gradient with PPO's clip, but of the logarithm of the ratio, so that a decision is not weighted by its
    ratio. Add the term kl against old, the policy drift, for the whole method."""

    equation: ClassVar[str] = "-min(l A, clamp(l, log(1 - low), log(1 + high)) A), l = log r"
    source: ClassVar[str] = "CPGD, arXiv 2505.12504, whose drift is the term kl against old"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: low and high bind nothing"
    type: str = "log_clip"
    low: Schedule = number(0.2, "l gains nothing below log(1 - low)", ge=0, lt=1)

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        import torch

        bounded = log_ratio.clamp(math.log(1 - self.low.value), math.log1p(self.high.value))
        values = -torch.minimum(log_ratio * advantages, bounded * advantages)
        return values, {"ratio": log_ratio.detach().exp()}


class SqrtClip(Surrogate):
    """A clip whose bounds lie further from 1 the rarer a token was under the old policy, as is isometric in the Fisher
    metric: the ratio of a rare token may move far, and that of a common one little."""

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
        import torch

        from mmrl.rollouts import old_logp

        width = (-old_logp(micro, replay) / 2).clamp(max=20).exp()  # 1 / sqrt(p_old)
        low = (1 - math.sqrt(self.low.value) * width).clamp(min=self.least)
        high = (1 + math.sqrt(self.high.value) * width).clamp(max=self.most)
        ratio = log_ratio.exp()
        values = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if self.cap is not None:
            values = values.where(advantages >= 0, values.minimum(-self.cap * advantages))
        stats = {"ratio": ratio, "clip_low": (advantages < 0) & (ratio < low)}
        stats["clip_high"] = (advantages > 0) & (ratio > high)
        return values, {name: value.detach().to(values.dtype) for name, value in stats.items()}


class BoundaryChance(Clipped):
    """A decision just past the bound of the clip keeps its gradient with a certain chance, one further away never does.
    The draw is made once a step."""

    equation: ClassVar[str] = (
        "clip's, but -r A with probability `keep` where 1 + high < r <= 1 + high + band and A > 0, or where "
        "1 - low - band <= r < 1 - low and A < 0"
    )
    source: ClassVar[str] = "reconstructed from what NSR, arXiv 2605.22703, says of its stochastic boundary"
    test: ClassVar[str] = TEST
    at_one_update: ClassVar[str] = f"{AS_REINFORCE}: nothing is past a bound"
    type: str = "boundary_chance"
    band: float = option(0.1, "width of what is just past the bound", gt=0)
    keep: float = option(0.5, "probability that such a decision keeps its gradient", ge=0, le=1)

    def prepare(self, batch: Batch) -> None:
        """Draws a uniform number in 0 to 1 for each decision of the batch, which `values` compares with `keep`."""
        import torch

        from mmrl.rollouts import DecisionColumn

        mask = batch.rollouts.mask
        batch.rollouts.extras[self.key] = DecisionColumn(torch.rand(mask.shape, generator=batch.generator(self.type)))

    def values(self, log_ratio: Tensor, advantages: Tensor, micro: Rollouts, replay: Replay) -> Result:
        from mmrl.core.surrogates import surrogate
        from mmrl.rollouts import DecisionColumn

        drawn = micro.extra(self.key, DecisionColumn)
        values, stats = surrogate(log_ratio, advantages, kind="clip", **self.bounds)
        ratio, low, high = log_ratio.exp(), 1 - self.low.value, 1 + self.high.value
        near = ((advantages > 0) & (ratio > high) & (ratio <= high + self.band)) | (
            (advantages < 0) & (ratio < low) & (ratio >= low - self.band)
        )
        retained = near & (drawn.values.to(ratio.device) < self.keep)
        stats["kept"] = retained.to(values.dtype)
        return (-ratio * advantages).where(retained, values), stats
