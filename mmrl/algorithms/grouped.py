"""Advantages of rollouts against the others of their group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmrl.algorithms.base import RewardedAlgorithm
from mmrl.needs import Capabilities
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.config import Config
    from mmrl.facts import Batch
    from mmrl.rollouts import Rollouts


class Scale(Choice):
    """What the difference from the baseline is divided by."""

    title: ClassVar[str] = "scale of advantages"
    kinds: ClassVar[dict[str, str]] = {
        "group_std": "mmrl.algorithms.grouped:GroupStd",
        "batch_std": "mmrl.algorithms.grouped:BatchStd",
        "bucket_std": "mmrl.algorithms.grouped:BucketStd",
        "none": "mmrl.algorithms.grouped:NoScale",
    }
    test: ClassVar[str] = "tests/core/test_advantages.py"


class GroupStd(Scale):
    """The standard deviation of the group."""

    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    type: str = "group_std"


class BatchStd(Scale):
    """The standard deviation of the batch."""

    source: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"
    type: str = "batch_std"


class BucketStd(Scale):
    """The standard deviation of all rollouts that have a fact in common, such as the difficulty of their prompt."""

    source: ClassVar[str] = "Durian, arXiv 2602.21743"
    type: str = "bucket_std"
    by: str = option(description="the fact: a key of the prompts' metadata, or another of `mmrl.facts`")


class NoScale(Scale):
    """Nothing."""

    source: ClassVar[str] = "Dr.GRPO, arXiv 2503.20783"
    type: str = "none"


class Components(Choice):
    """How several rewards become one advantage."""

    title: ClassVar[str] = "components"
    kinds: ClassVar[dict[str, str]] = {
        "sum": "mmrl.algorithms.grouped:SumOfComponents",
        "normalise_each": "mmrl.algorithms.grouped:NormaliseEach",
        "gated": "mmrl.algorithms.grouped:Gated",
    }
    test: ClassVar[str] = "tests/core/test_advantages.py"


class SumOfComponents(Components):
    """Their weighted sum is normalised."""

    equation: ClassVar[str] = "r = sum_k w_k r_k"
    type: str = "sum"


class NormaliseEach(Components):
    """Each is normalised in its group; their weighted sum is normalised over the batch."""

    source: ClassVar[str] = "GDPO, arXiv 2601.05242"
    type: str = "normalise_each"


class Gated(Components):
    """Some rewards gate the others: where a gate is closed (0), the reward is 0."""

    equation: ClassVar[str] = "r = prod_{k in gates} r_k x sum_{other k} w_k r_k"
    source: ClassVar[str] = "G-RA's gated aggregation"
    type: str = "gated"
    gates: list[str] = option(description="names of the rewards that are gates", min_length=1)


class GroupedAlgorithm(RewardedAlgorithm):
    """Rollouts of one prompt are compared with one another."""

    baseline: Literal["mean", "leave_one_out", "length_weighted", "shrinkage", "none"] = option(
        "mean",
        "what a reward is compared with: mean (GRPO), leave_one_out (RLOO), length_weighted (OPO), shrinkage, none",
    )
    scale: Scale = option(GroupStd(), "what the difference is divided by")
    components: Components = option(SumOfComponents(), "how several rewards become one advantage")

    def check(self, config: Config, offered: Capabilities) -> None:
        if self.baseline != "none" and config.group_size < 2:
            raise ValueError(
                f"rollout.group_size={config.group_size} with algorithm.baseline={self.baseline}: a group of one has "
                "no baseline and learns nothing; raise group_size or set algorithm.baseline=none"
            )
        shared = (self.baseline, self.components.type) == ("mean", "sum") and self.scale.type in ("group_std", "none")
        if "nodes" in offered.offers and not shared:
            raise ValueError(
                "denoising.likelihood.branching compares nodes of a tree: set algorithm.baseline=mean, "
                "algorithm.components=sum and algorithm.scale=group_std or none"
            )

    def advantages(self, batch: Batch) -> Tensor:
        return self._of_trees(batch) if batch.rollouts.nodes is not None else self._of_groups(batch)

    def _of_groups(self, batch: Batch) -> Tensor:
        """[rollout], from the rewards of all ranks, so that sharding changes nothing."""
        from mmrl.core.advantages import group_advantages

        rewards, weights, gates = self._gates_first(batch.fact("rewards"), batch.reward_weights, batch.reward_names)
        values, stats = group_advantages(
            rewards,
            batch.fact("group"),
            baseline=self.baseline,
            scale=self.scale.type,
            components=self.components.type,
            weights=weights,
            lengths=batch.fact("length") if self.baseline == "length_weighted" else None,
            buckets=batch.fact(self.scale.by) if isinstance(self.scale, BucketStd) else None,
            gates=gates,
        )
        batch.report({f"advantages/{name}": float(value) for name, value in stats.items()})
        return batch.mine(values)

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
        return informative_groups(rewards, rollouts.group, weights, components=self.components.type, gates=gates)

    def _gates_first(self, rewards: Tensor, weights: Tensor, names: list[str]) -> tuple[Tensor, Tensor, int]:
        """Rewards and weights with the gates in the first columns, and their number."""
        if not isinstance(self.components, Gated):
            return rewards, weights, 1
        gates = [names.index(name) for name in self.components.gates]
        order = [*gates, *(k for k in range(len(names)) if k not in gates)]
        return rewards[:, order], weights[order], len(gates)
