"""Advantages of rollouts against the others of their group."""

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
    """An algorithm that compares the rollouts of one prompt with one another."""

    baseline: Baseline = option(Mean(), "baseline that is subtracted from a reward")
    scale: Scale = option(
        GroupStd(),
        "what the difference is divided by; by default what the baseline's source divides by: group_std "
        "of mean, batch_std of batch_mean and running, none of leave_one_out, length_weighted, greedy and none",
    )
    components: Components = option(SumOfComponents(), "how several rewards are combined into one advantage")
    transforms: list[Transform] = option([], "changes of the reward before the baseline, in this order")

    @model_validator(mode="before")
    @classmethod
    def _as_the_baseline_has_it(cls, values: Any) -> Any:
        """Fills in the usual scale of a baseline that comes without one."""
        if not isinstance(values, dict) or "scale" in values or "baseline" not in values:
            return values
        if type(cls.model_fields["scale"].default) is not GroupStd:  # a class with a scale of its own
            return values
        chosen, key = values["baseline"], ("algorithm", "baseline")
        kind = type(chosen) if isinstance(chosen, Baseline) else kind_of(Baseline, chosen, key)
        return {**values, "scale": kind_of(Scale, kind.usual_scale).model_validate({"type": kind.usual_scale})}

    def parts(self) -> Iterable[tuple[str, Needs]]:
        yield from super().parts()
        yield f"algorithm.baseline={self.baseline.type}", self.baseline.needs
        yield f"algorithm.scale={self.scale.type}", self.scale.needs
        yield f"algorithm.components={self.components.type}", self.components.needs
        for i, transform in enumerate(self.transforms):
            yield f"algorithm.transforms.{i} ({transform.type})", transform.needs

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        super().check(config, offered)
        compared = next((t.type for t in self.transforms), f"algorithm.baseline={self.baseline.type}")
        if (self.baseline.compares or self.transforms) and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with {compared}: a group of one has "
                "no baseline and learns nothing; raise group_size or set algorithm.baseline=running, greedy, "
                "batch_mean or none"
            )
        if self.scale.of_group and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with algorithm.scale={self.scale.type}: the deviation of a "
                "group of one is 0, so nothing is learned; raise group_size or set algorithm.scale=none or batch_std"
            )
        if self.baseline.single and (self.transforms or self.components.type not in ("sum", "gated")):
            raise ValueError(
                f"algorithm.baseline={self.baseline.type} is of one combined reward: set algorithm.transforms=[] and "
                "algorithm.components=sum or gated"
            )
        self.baseline.check(config)
        for i, transform in enumerate(self.transforms):
            if transform.finished and (self.baseline.type, self.scale.type) != ("none", "none"):
                raise ValueError(
                    f"algorithm.transforms.{i} ({transform.type}) gives advantages already; set "
                    "algorithm.baseline=none and algorithm.scale=none"
                )
        shared = (self.baseline.type, self.components.type) == ("mean", "sum") and not self.transforms
        if "nodes" in offered.offers and not (shared and self.scale.type in ("group_std", "none")):
            raise ValueError(
                "the nodes of a tree are compared (denoising.likelihood.branching, rollout.extras branches): set "
                "algorithm.baseline=mean, algorithm.components=sum, algorithm.transforms=[] and "
                "algorithm.scale=group_std or none"
            )

    def check_rewards(self, names: list[str]) -> None:
        self.components.check_names(names)

    def advantages(self, batch: Batch) -> Tensor:
        return self._of_trees(batch) if batch.rollouts.nodes is not None else self._of_groups(batch)

    def _of_groups(self, batch: Batch) -> Tensor:
        """Computes advantages from the rewards of all ranks, [rollout], so that sharding changes nothing."""
        rewards, weights, names = batch.column("rewards"), batch.reward_weights, batch.reward_names

        def total(rewards: Tensor) -> Tensor:
            return self.components.total(rewards, weights, names)

        estimate = Estimator(self.transforms, self.baseline, self.scale, batch, total)
        varied = self.components.varied(rewards, estimate.groups[0], weights, names)
        self._report(batch, total(rewards), varied, *estimate.groups)
        return batch.local(self.components.combine(estimate, rewards, weights, names))

    def _report(self, batch: Batch, total: Tensor, varied: Tensor, index: Tensor, groups: int) -> None:
        """Reports statistics of the combined reward [rollout of all ranks] before transforms."""
        from mmrl.core.advantages import lone_groups, reward_statistics

        if self.baseline.compares and lone_groups(total, index):
            warnings.warn("a group of one rollout has no baseline: its advantage is 0", stacklevel=2)
        stats = reward_statistics(total, varied, index, groups)
        batch.report({f"advantages/{name}": float(value) for name, value in stats.items()})

    def _of_trees(self, batch: Batch) -> Tensor:
        """Computes advantages of trees of rollouts, [rollout, decision]; a tree lies on one rank."""
        from mmrl.core.credit import branch_advantages

        rollouts = batch.rollouts
        assert rollouts.nodes is not None
        total = batch.local(batch.combined_rewards())
        return branch_advantages(total, rollouts.group, rollouts.nodes, scale=self.scale.type)

    def informative(self, rollouts: Rollouts, weights: Tensor, names: list[str]) -> Tensor:
        """Returns where the combined reward, or with normalise_each any component, differs in the group, [rollout]
        bool."""
        assert rollouts.rewards is not None
        return self.components.varied(rollouts.rewards, rollouts.group, weights, names)
