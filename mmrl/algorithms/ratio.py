"""Base class of algorithms on the likelihood ratio of the current policy and the old one, which made the rollouts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from mmrl.algorithms.algorithm import ONE_UPDATE, REMEDY, ReduceMode, Reduction, RewardedAlgorithm, has_ratios_of_one
from mmrl.algorithms.surrogates.surrogate import Clip, Surrogate
from mmrl.protocols.abilities import Segmented
from mmrl.protocols.requirements import Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Record, Replay, Rollouts


class RatioAlgorithm(RewardedAlgorithm):
    """Base class of algorithms whose loss is a surrogate objective of likelihood ratios and advantages."""

    surrogate: Surrogate = option(Clip(), "objective of ratio and advantage")
    level: Literal["decision", "segment", "sequence"] = option(
        "decision",
        "unit of the ratio, over which log-ratios are averaged. sequence: GSPO (arXiv 2507.18071), where reduce "
        "defaults to sequence_mean; segment: GCPO's chunk, where reduce defaults to segment_mean",
    )
    ratio: Literal["plain", "normalised"] = option(
        "plain", "normalised: GRPO-Guard's regulated ratio of Gaussian steps (arXiv 2510.22319)"
    )

    target_kl: float | None = option(
        None,
        "skip the remaining updates of a step once the mean estimated divergence from the old policy, r - 1 - log r, "
        "is larger than this; null: never",
        gt=0,
    )

    def remarks(self, config: JobConfig) -> Iterable[str]:
        """Yields warnings about settings, also about options without an effect if all likelihood ratios are 1."""
        yield from super().remarks(config)
        if not has_ratios_of_one(self, config):
            return
        if "surrogate" in self.model_fields_set and self.surrogate.note_at_one_update:
            note = self.surrogate.note_at_one_update
            yield f"algorithm.surrogate={self.surrogate.type} {ONE_UPDATE}: {note}; {REMEDY}"
        if self.target_kl is not None:
            yield f"algorithm.target_kl {ONE_UPDATE}: no update is left to skip; {REMEDY}"

    @property
    def early_stop_statistics(self) -> tuple[str, ...]:
        return () if self.target_kl is None else ("surrogate/old_kl",)

    def ends_epochs(self, means: dict[str, float]) -> bool:
        return self.target_kl is not None and means["surrogate/old_kl"] > self.target_kl

    @property
    def base_needs(self) -> Needs:
        """The old log-probabilities, the surrogate's needs, and what `ratio` and `level` need of the policy."""
        needs = Needs(old=True) | self.surrogate.needs
        if self.ratio == "normalised":
            needs |= Needs(offers=frozenset({"gaussian", "step_density"}))
        if self.level == "segment":
            needs |= Needs(offers=frozenset({Segmented}))
        return needs

    @property
    def reduce_mode(self) -> ReduceMode:
        """Returns the reduction to the loss. The default is sequence_mean if all decisions of a rollout have one ratio
        (GSPO, GMPO), segment_mean if all decisions of a segment have one (GCPO): token_mean would weight long rollouts
        and segments more."""
        if self.reduce is not None:
            return self.reduce
        if self.level == "sequence" or self.surrogate.one_weight:
            return "sequence_mean"
        return "segment_mean" if self.level == "segment" else super().reduce_mode

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        with self._noting_columns(rollouts=batch.rollouts):
            self.surrogate.prepare(batch)

    def loss(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, stats = self._log_ratio(micro, replay)
        advantages = self._advantages(micro, log_ratio)
        with self._noting_columns(micro=micro, replay=replay):
            values, surrogate_stats = self.surrogate.values(log_ratio, advantages, micro, replay)
        return values, stats | _add_prefix(surrogate_stats)

    def objective(self, micro: Rollouts, replay: Replay, reduction: Reduction) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, stats = self._log_ratio(micro, replay)
        advantages = self._advantages(micro, log_ratio)
        with self._noting_columns(micro=micro, replay=replay):
            loss, surrogate_stats = self.surrogate.objective(log_ratio, advantages, micro, replay, reduction)
        return loss, stats | _add_prefix(surrogate_stats)

    def _noting_columns(self, **records: Record | Replay) -> AbstractContextManager[None]:
        """Returns a context that notes the surrogate's key and the columns of `records` in its errors."""
        from mmrl.protocols.checks import noting_columns

        return noting_columns(f"algorithm.surrogate={self.surrogate.type}", **records)

    def _advantages(self, micro: Rollouts, like: Tensor) -> Tensor:
        """Returns the micro-batch's advantages on the device of `like`."""
        assert micro.advantages is not None
        return micro.advantages.to(like.device)

    def _log_ratio(self, micro: Rollouts, replay: Replay) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes log-ratios, averaged over the unit `level`, and statistics of those to the old policy, [rollout,
        decision]. The log-ratios are to the old policy, or to the surrogate's own anchor."""
        from mmrl.core.ratios import aggregate_log_ratio, regulate_log_ratio
        from mmrl.rollouts import SEGMENTS, log_ratio

        differences = log_ratio(micro, replay)
        if self.ratio == "normalised":
            assert replay.divergence is not None and replay.std is not None
            differences = regulate_log_ratio(differences, replay.divergence, replay.std)
        mask, segments = micro.mask.to(differences.device), SEGMENTS.get(replay)
        log_ratios = aggregate_log_ratio(differences, mask, level=self.level, segments=segments)
        stats = {"surrogate/ratio_gap": (log_ratios.detach().exp() - 1).abs()}
        if self.target_kl is not None:
            stats["surrogate/old_kl"] = log_ratios.detach().exp() - 1 - log_ratios.detach()
        if replay.divergence is not None:
            stats["surrogate/divergence"] = replay.divergence.detach()
        anchor = self.surrogate.log_anchor(micro, replay)
        if anchor is not None:
            stats["surrogate/anchor"] = anchor
            log_ratios = aggregate_log_ratio(differences - anchor, mask, level=self.level, segments=segments)
        return log_ratios, stats


def _add_prefix(stats: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the statistics under their names as metrics, surrogate/<name>."""
    return {f"surrogate/{name}": values for name, values in stats.items()}
