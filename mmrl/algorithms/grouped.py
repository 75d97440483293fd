"""Advantages of rollouts against the others of their group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mmrl.algorithms.algorithm import RewardedAlgorithm
from mmrl.algorithms.baselines.baseline import Baseline, Mean
from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.algorithms.scales.components import Components, Gated, SumOfComponents
from mmrl.algorithms.scales.scale import GroupStd, Scale
from mmrl.protocols.requirements import Capabilities, Needs
from mmrl.settings import option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch
    from mmrl.protocols.job import JobConfig
    from mmrl.rollouts import Rollouts


class GroupedAlgorithm(RewardedAlgorithm):
    """Rollouts of one prompt are compared with one another."""

    baseline: Baseline = option(Mean(), "what a reward is compared with")
    scale: Scale = option(GroupStd(), "what the difference is divided by")
    components: Components = option(SumOfComponents(), "how several rewards become one advantage")
    transforms: list[Transform] = option([], "changes of the reward before the baseline, in this order")

    def parts(self) -> Iterable[tuple[str, Needs]]:
        yield from super().parts()
        yield f"algorithm.baseline={self.baseline.type}", self.baseline.needs
        yield f"algorithm.scale={self.scale.type}", self.scale.needs
        for i, transform in enumerate(self.transforms):
            yield f"algorithm.transforms.{i} ({transform.type})", transform.needs

    def check(self, config: JobConfig, offered: Capabilities) -> None:
        compared = next((t.type for t in self.transforms), f"algorithm.baseline={self.baseline.type}")
        if (self.baseline.compares or self.transforms) and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with {compared}: a group of one has "
                "no baseline and learns nothing; raise group_size or set algorithm.baseline=none"
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
                "denoising.likelihood.branching compares nodes of a tree: set algorithm.baseline=mean, "
                "algorithm.components=sum, algorithm.transforms=[] and algorithm.scale=group_std or none"
            )

    def check_rewards(self, names: list[str]) -> None:
        self.components.check_names(names)

    def advantages(self, batch: Batch) -> Tensor:
        return self._of_trees(batch) if batch.rollouts.nodes is not None else self._of_groups(batch)

    def _of_groups(self, batch: Batch) -> Tensor:
        """[rollout], from the rewards of all ranks, so that sharding changes nothing."""
        from mmrl.core.advantages import group_advantages

        rewards, weights, gates = self._gates_first(batch.fact("rewards"), batch.reward_weights, batch.reward_names)
        shared: dict[str, Any] = {
            "scale": self.scale.known,
            "lengths": batch.fact("length") if self.baseline.type == "length_weighted" else None,
            "buckets": self.scale.buckets(batch),
        }
        plain, stats = group_advantages(
            rewards,
            batch.fact("group"),
            baseline=self.baseline.type if self.baseline.known else "none",
            components=self.components.known,
            weights=weights,
            gates=gates,
            **shared,
        )
        batch.report({f"advantages/{name}": float(value) for name, value in stats.items()})
        return batch.mine(self._changed(batch, shared) if self._changes else plain)

    @property
    def _changes(self) -> bool:
        """Whether something comes between the rewards and what `core.advantages` makes of them."""
        own = type(self.components).combine is not Components.combine
        return bool(self.transforms) or not self.baseline.known or own

    def _changed(self, batch: Batch, shared: dict[str, Any]) -> Tensor:
        """[rollout of all ranks] with transforms, with a baseline or components that `core` does not know."""
        from mmrl.core.advantages import group_advantages

        rewards, weights, names = batch.fact("rewards"), batch.reward_weights, batch.reward_names
        group = batch.fact("group")

        def total(table: Tensor) -> Tensor:
            return self.components.total(table, weights, names)

        def compared(reward: Tensor) -> Tensor:
            """Less the baseline, where that is not one of core's."""
            for transform in self.transforms:
                reward = transform.change(reward, batch)
            return reward if self.baseline.known else reward - self.baseline.of(reward, batch, total)

        def estimate(reward: Tensor) -> Tensor:
            return group_advantages(compared(reward), group, baseline=known, **shared)[0]

        known = self.baseline.type if self.baseline.known else "none"
        own = self.components.combine(estimate, rewards, weights, names)
        if own is not None:
            return own
        if self.components.known != "normalise_each":
            return estimate(total(rewards))
        columns = [compared(column).where(~total(rewards).isnan(), float("nan")) for column in rewards.T]
        columns = [column if w else reward for column, reward, w in zip(columns, rewards.T, weights, strict=True)]
        return group_advantages(
            _stacked(columns), group, baseline=known, components="normalise_each", weights=weights, **shared
        )[0]

    def _of_trees(self, batch: Batch) -> Tensor:
        """[rollout, decision]; a tree lies on one rank."""
        from mmrl.core.credit import branch_advantages

        rollouts = batch.rollouts
        assert rollouts.nodes is not None
        total = batch.mine(batch.combined())
        return branch_advantages(total, rollouts.group, rollouts.nodes, scale=self.scale.type)

    def informative(self, rollouts: Rollouts, weights: Any, names: list[str]) -> Tensor:
        """[rollout] bool: whether the combined reward, or with normalise_each any component, differs in its group."""
        from mmrl.core.filters import informative_groups

        assert rollouts.rewards is not None
        rewards, weights, gates = self._gates_first(rollouts.rewards, weights, names)
        return informative_groups(rewards, rollouts.group, weights, components=self.components.known, gates=gates)

    def _gates_first(self, rewards: Tensor, weights: Tensor, names: list[str]) -> tuple[Tensor, Tensor, int]:
        """Rewards and weights with the gates in the first columns, and their number."""
        if not isinstance(self.components, Gated):
            return rewards, weights, 1
        gates = [names.index(name) for name in self.components.gates]
        order = [*gates, *(k for k in range(len(names)) if k not in gates)]
        return rewards[:, order], weights[order], len(gates)


def _stacked(columns: list[Tensor]) -> Tensor:
    import torch

    return torch.stack(columns, 1)
