"""Base class of algorithms on the ratio of the policy to the policy that sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from mmrl.algorithms.algorithm import ACTS, IDLE, ReduceMode, Reduction, RewardedAlgorithm, has_ratios_of_one
from mmrl.algorithms.surrogates.surrogate import Clip, Surrogate
from mmrl.protocols.abilities import Segmented
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Replay, Rollouts


class RatioAlgorithm(RewardedAlgorithm):
    """An algorithm whose loss is a surrogate of ratios and advantages."""

    surrogate: Surrogate = option(Clip(), "objective of ratio and advantage")
    level: Literal["decision", "segment", "sequence"] = option(
        "decision",
        "unit over which log-ratios are averaged; sequence is GSPO (arXiv 2507.18071), with reduce=sequence_mean by "
        "default; segment is GCPO's chunk, with reduce=segment_mean by default",
    )
    ratio: Literal["plain", "normalised"] = option(
        "plain", "normalised: GRPO-Guard's regulated ratio of Gaussian steps (arXiv 2510.22319)"
    )

    target_kl: float | None = option(
        None,
        "largest mean divergence from the policy that sampled the rollouts, estimated by r - 1 - log r; the first "
        "update that exceeds it is the last of its step; null: no limit",
        gt=0,
    )

    def remarks(self, config: JobConfig) -> Iterable[str]:
        yield from super().remarks(config)
        if not has_ratios_of_one(self, config):
            return
        if "surrogate" in self.model_fields_set and self.surrogate.at_rest:
            yield f"algorithm.surrogate={self.surrogate.type} {IDLE}: {self.surrogate.at_rest}; {ACTS}"
        if self.target_kl is not None:
            yield f"algorithm.target_kl {IDLE}: there is no update that it could leave out; {ACTS}"

    @property
    def watched(self) -> tuple[str, ...]:
        return () if self.target_kl is None else ("surrogate/old_kl",)

    def ends_epochs(self, means: dict[str, float]) -> bool:
        return self.target_kl is not None and means["surrogate/old_kl"] > self.target_kl

    @property
    def base_needs(self) -> Needs:
        needs = Needs(old=True) | self.surrogate.needs
        if self.ratio == "normalised":
            needs |= Needs(offers=frozenset({"gaussian", "step_density"}))
        if self.level == "segment":
            needs |= Needs(offers=frozenset({Segmented}))
        return needs

    @property
    def reduce_mode(self) -> ReduceMode:
        """Returns sequence_mean where a rollout has one weight, as GSPO and GMPO have it, and segment_mean where a
        segment has, as GCPO has it: token_mean would count it as often as the rollout, or segment, has decisions."""
        if self.reduce is not None:
            return self.reduce
        if self.level == "sequence" or self.surrogate.one_weight:
            return "sequence_mean"
        return "segment_mean" if self.level == "segment" else super().reduce_mode

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        self.surrogate.prepare(batch)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, stats = self._log_ratio(micro, replay)
        values, more = self.surrogate.values(ratio, self._advantages(micro, ratio), micro, replay)
        return values, stats | _named(more)

    def objective(self, micro: Rollouts, replay: Replay, over: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, stats = self._log_ratio(micro, replay)
        loss, more = self.surrogate.objective(ratio, self._advantages(micro, ratio), micro, replay, over)
        return loss, stats | _named(more)

    def _advantages(self, micro: Rollouts, like: Tensor) -> Tensor:
        assert micro.advantages is not None
        return micro.advantages.to(like.device)

    def _log_ratio(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes log-ratios to the policy that sampled, at the algorithm's level, and statistics; [rollout,
        decision]."""
        from mmrl.core.ratios import by_unit, normalised
        from mmrl.rollouts import SEGMENTS, log_ratio

        ratio = log_ratio(micro, replay)
        if self.ratio == "normalised":
            assert replay.divergence is not None and replay.std is not None
            ratio = normalised(ratio, replay.divergence, replay.std)
        mask = micro.mask.to(ratio.device)
        ratio = by_unit(ratio, mask, level=self.level, segments=SEGMENTS.get(replay))
        stats = {"surrogate/ratio_gap": (ratio.detach().exp() - 1).abs()}
        if self.target_kl is not None:
            stats["surrogate/old_kl"] = ratio.detach().exp() - 1 - ratio.detach()
        if replay.divergence is not None:
            stats["surrogate/divergence"] = replay.divergence.detach()
        return ratio, stats


def _named(stats: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"surrogate/{name}": values for name, values in stats.items()}
