"""Base class of algorithms whose advantages compare the rollouts of a group."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from mmrl.algorithms.algorithm import RewardedAlgorithm
from mmrl.algorithms.baselines.baseline import Baseline, Mean
from mmrl.algorithms.estimator import Estimator
from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.algorithms.scales.components import Components, SumOfComponents
from mmrl.algorithms.scales.scale import GroupStd, Scale
from mmrl.protocols.requirements import Capabilities, Needs
from mmrl.settings import kind_of, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Rollouts


class GroupedAlgorithm(RewardedAlgorithm):
    """Base class of algorithms that compare the rollouts of a group, which answer the same prompt."""

    baseline: Baseline = option(Mean(), "baseline that is subtracted from the reward")
    scale: Scale = option(
        GroupStd(),
        "divisor of reward minus baseline; the default depends on the baseline: group_std for mean, batch_std for "
        "batch_mean and running, none for leave_one_out, length_weighted, greedy and none",
    )
    components: Components = option(SumOfComponents(), "combination of several rewards to one advantage")
    transforms: list[Transform] = option([], "reward transforms before the baseline, applied in this order")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_scale(cls, values: Any) -> Any:
        """Sets the scale to the baseline's default if only the baseline is set."""
        if not isinstance(values, dict) or "scale" in values or "baseline" not in values:
            return values
        if type(cls.model_fields["scale"].default) is not GroupStd:  # a subclass with a default scale of its own
            return values
        baseline, key = values["baseline"], ("algorithm", "baseline")
        baseline_class = type(baseline) if isinstance(baseline, Baseline) else kind_of(Baseline, baseline, key)
        scale = baseline_class.default_scale
        return {**values, "scale": kind_of(Scale, scale).model_validate({"type": scale})}

    def parts(self) -> Iterable[tuple[str, Needs]]:
        yield from super().parts()
        yield f"algorithm.baseline={self.baseline.type}", self.baseline.needs
        yield f"algorithm.scale={self.scale.type}", self.scale.needs
        yield f"algorithm.components={self.components.type}", self.components.needs
        for i, transform in enumerate(self.transforms):
            yield f"algorithm.transforms.{i} ({transform.type})", transform.needs

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        """Raises ValueError if baseline, scale, components and transforms do not fit each other, groups of one rollout,
        or rollouts that form trees."""
        super().check(config, offered)
        user, instead = f"algorithm.baseline={self.baseline.type}", "=running, greedy, batch_mean or none"
        if self.transforms:
            user, instead = f"algorithm.transforms ({self.transforms[0].type})", "=none and algorithm.transforms=[]"
        if (self.baseline.uses_other_rollouts or self.transforms) and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with {user}: a group of one has no baseline and learns "
                f"nothing; raise rollout.group_size, or set algorithm.baseline{instead}"
            )
        if self.scale.needs_group and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with algorithm.scale={self.scale.type}: the std of a group of "
                "one is 0, so nothing is learned; raise rollout.group_size, or set algorithm.scale=none or batch_std"
            )
        if self.baseline.single_reward_only and (self.transforms or self.components.type not in ("sum", "gated")):
            raise ValueError(
                f"algorithm.baseline={self.baseline.type} works with one combined reward only: set "
                "algorithm.transforms=[] and algorithm.components=sum or gated"
            )
        self.baseline.check(config)
        for i, transform in enumerate(self.transforms):
            if transform.returns_advantages and (self.baseline.type, self.scale.type) != ("none", "none"):
                raise ValueError(
                    f"algorithm.transforms.{i} ({transform.type}) already returns advantages; set "
                    "algorithm.baseline=none and algorithm.scale=none"
                )
        fits_trees = (self.baseline.type, self.components.type) == ("mean", "sum") and not self.transforms
        if "nodes" in offered.offers and not (fits_trees and self.scale.type in ("group_std", "none")):
            raise ValueError(
                "rollouts form trees (denoising.likelihood.branching, or branches in rollout.extras), whose advantages "
                "compare branches; set algorithm.baseline=mean, algorithm.components=sum, algorithm.transforms=[] and "
                "algorithm.scale=group_std or none, or sample without branches"
            )

    def check_rewards(self, names: list[str]) -> None:
        self.components.check_names(names)

    def advantages(self, batch: Batch) -> Tensor:
        return self._tree_advantages(batch) if batch.rollouts.nodes is not None else self._group_advantages(batch)

    def _group_advantages(self, batch: Batch) -> Tensor:
        """Computes advantages [rollout] from the rewards of all ranks, so that they do not depend on sharding."""
        rewards, weights, names = batch.column("rewards"), batch.reward_weights, batch.reward_names

        def combine(rewards: Tensor) -> Tensor:
            return self.components.total(rewards, weights, names)

        estimate = Estimator(self.transforms, self.baseline, self.scale, batch, combine)
        varied = self.components.varied(rewards, estimate.groups[0], weights, names)
        # groups: the group of each rollout, and the number of groups
        self._report(batch, combine(rewards), varied, *estimate.groups)
        return batch.local(self.components.combine(estimate, rewards, weights, names))

    def _report(self, batch: Batch, combined: Tensor, varied: Tensor, index: Tensor, groups: int) -> None:
        """Logs statistics of the combined reward [rollout of all ranks] before transforms. Warns about groups of one.

        varied: [rollout], whether the group's rewards differ; index: [rollout], the group from 0 .. groups - 1.
        """
        from mmrl.core.advantages import has_singleton_group, reward_statistics

        if self.baseline.uses_other_rollouts and has_singleton_group(combined, index):
            warnings.warn(
                f"a group of one rollout has no baseline (algorithm.baseline={self.baseline.type}): its advantage is 0",
                stacklevel=2,
            )
        stats = reward_statistics(combined, varied, index, groups)
        batch.report({f"advantages/{name}": float(value) for name, value in stats.items()})

    def _tree_advantages(self, batch: Batch) -> Tensor:
        """Computes advantages of rollouts that form trees, [rollout, decision]; a tree lies on one rank."""
        from mmrl.core.credit import branch_advantages

        rollouts = batch.rollouts
        assert rollouts.nodes is not None
        rewards = batch.local(batch.combined_rewards())
        return branch_advantages(rewards, rollouts.group, rollouts.nodes, scale=self.scale.type)

    def informative(self, rollouts: Rollouts, weights: Tensor, names: list[str]) -> Tensor:
        """Returns whether the combined reward differs within the rollout's group, or with components=normalise_each any
        component, [rollout] bool."""
        assert rollouts.rewards is not None
        return self.components.varied(rollouts.rewards, rollouts.group, weights, names)
