"""Credit of rollouts that form a tree, in which several rollouts share their first decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class TreeShaper(Shaper):
    """Base class of shapers that replace the advantages of rollouts which share decisions."""

    test: ClassVar[str] = "tests/joints/test_branches.py"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"nodes"}))


class SubtreeAdvantages(TreeShaper):
    """The mean difference of a rollout's reward from the mean rewards of its group and of all subtrees that it is in.

    With `whitening` after it, these are TreePO's advantages.
    """

    equation: ClassVar[str] = (
        "A_i = sum_S w_S (R_i - mean_{j in S} R_j) / sum_S w_S over the sets S of two or more: the group of i, and "
        "those that share a decision with i; w_S = 1 or |S|"
    )
    source: ClassVar[str] = (
        "TreePO, arXiv 2508.17445, and multimodal-art-projection/TreePO at f055523 (adv_weight_strategy), where a set "
        "that does not branch counts once more for each segment"
    )
    type: str = "subtree_advantages"
    weights: Literal["alike", "size"] = option(
        "alike", "weights of group and subtrees. alike: equal; size: by their number of rollouts"
    )

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns for each rollout the mean difference of its reward from the mean rewards of its group and of its
        subtrees, repeated for its decisions; [rollout, decision]."""
        from mmrl.core.credit import subtree_advantages
        from mmrl.rollouts import require

        rollouts = batch.rollouts
        rewards, nodes = batch.local(batch.combined_rewards()), require(rollouts.nodes, "nodes of a tree")
        rollout_advantages = subtree_advantages(rewards, rollouts.group, nodes, weights=self.weights)
        return rollout_advantages[:, None].expand(advantages.shape).to(advantages)


class PrefixMean(TreeShaper):
    """Gives a decision that several rollouts share the mean of their advantages; after the last branch, a rollout has
    its own advantage."""

    equation: ClassVar[str] = (
        "A_t = mean over the rollouts j that share decision t of (R_j - mean R) / (std R + 1e-6), by group"
    )
    source: ClassVar[str] = "ARPO, arXiv 2507.19849: its hard estimate of advantages"
    type: str = "prefix_mean"
    scale: Literal["group_std", "none"] = option("group_std", "divide differences by the std of the group, or not")

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns for each decision the mean advantage of the rollouts that share it, [rollout, decision]."""
        from mmrl.core.advantages import group_advantages
        from mmrl.core.credit import shared_means
        from mmrl.rollouts import require

        rollouts, nodes = batch.rollouts, require(batch.rollouts.nodes, "nodes of a tree")
        combined = batch.combined_rewards()
        rollout_advantages, _ = group_advantages(combined, batch.column("group"), scale=self.scale)
        local_advantages = batch.local(rollout_advantages.where(~combined.isnan(), float("nan")))
        return shared_means(local_advantages, rollouts.group, nodes).to(advantages)


class NodeGains(TreeShaper):
    """Gives a decision the gain in expected reward from the node before its own to its own, so that what branches is
    compared with its siblings only.

    With branches after </think> (rollout.extras=[{type: branches, at: text_ends}]) the thoughts of a group are compared
    with each other, and the answers to a thought with each other. With `whole: 1` and `by_leaves: true` the gain over
    the whole group is added, as in TreeRL.
    """

    equation: ClassVar[str] = (
        "A_t = (V(n) - V(parent of n) + whole (V(n) - V(group))) / sqrt(leaves of n) or 1, n the node of decision t, "
        "V the mean reward of the rollouts through a node"
    )
    source: ClassVar[str] = (
        "TreeRL, arXiv 2506.11902 (local and global advantage); TreeRPO, arXiv 2506.05183, without a std of siblings; "
        "K thoughts x M answers: reconstructed from an abstract on thought-level branching"
    )
    type: str = "node_gains"
    whole: float = option(0.0, "weight of the gain over the whole group", ge=0)
    by_leaves: bool = option(False, "divide by the root of the number of rollouts through the node, as TreeRL does")

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Returns the gain of each decision's node, [rollout, decision]."""
        from mmrl.core.credit import node_gains
        from mmrl.rollouts import require

        rollouts = batch.rollouts
        rewards, nodes = batch.local(batch.combined_rewards()), require(rollouts.nodes, "nodes of a tree")
        gains = node_gains(rewards, rollouts.group, nodes, whole=self.whole, by_leaves=self.by_leaves)
        return gains.to(advantages)
