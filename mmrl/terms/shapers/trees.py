"""Credit of responses that branch: of whole rollouts by their subtrees, and of decisions by those that share them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from mmrl.protocols.requirements import Needs
from mmrl.settings import option
from mmrl.terms.term import Shaper

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.protocols.batch import Batch


class TreeShaper(Shaper):
    """A shaper of rollouts that share decisions. The base of those below; it replaces the advantage."""

    test: ClassVar[str] = "tests/joints/test_branches.py"

    @property
    def needs(self) -> Needs:
        return Needs(offers=frozenset({"nodes"}))


class SubtreeAdvantages(TreeShaper):
    """A rollout is compared with the whole group and with every subtree that it is in; the comparisons are averaged.
    With `whitening` after it these are TreePO's advantages."""

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
        "alike", "weights of the comparisons: equal, or by the number of rollouts"
    )

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.credit import subtree_advantages
        from mmrl.rollouts import require

        rollouts = batch.rollouts
        rewards, nodes = batch.local(batch.combined_rewards()), require(rollouts.nodes, "nodes of a tree")
        own = subtree_advantages(rewards, rollouts.group, nodes, weights=self.weights)
        return own[:, None].expand(advantages.shape).to(advantages)


class PrefixMean(TreeShaper):
    """A decision that several rollouts of a tree share gets the mean of their advantages; after the last branch a
    rollout has its own."""

    equation: ClassVar[str] = (
        "A_t = mean over the rollouts j that share decision t of (R_j - mean R) / (std R + 1e-6), by group"
    )
    source: ClassVar[str] = "ARPO, arXiv 2507.19849: its hard estimate of advantages"
    type: str = "prefix_mean"
    scale: Literal["group_std", "none"] = option("group_std", "scale by which differences are divided")

    def shape(self, advantages: Tensor, batch: Batch) -> Tensor:
        from mmrl.core.advantages import group_advantages
        from mmrl.core.credit import shared_means
        from mmrl.rollouts import require

        rollouts, nodes = batch.rollouts, require(batch.rollouts.nodes, "nodes of a tree")
        combined = batch.combined_rewards()
        compared, _ = group_advantages(combined, batch.column("group"), scale=self.scale)
        known = batch.local(compared.where(~combined.isnan(), float("nan")))
        return shared_means(known, rollouts.group, nodes).to(advantages)
