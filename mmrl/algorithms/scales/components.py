"""Combinations of several rewards to one advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.estimator import Estimator


class Components(Choice):
    """A combination of several rewards to one advantage: as one reward (`total`), or from advantages of each
    (`combine`). Users' classes override one of the two. rewards: [rollout, component], NaN where one is unknown;
    weights: [component], in the order of `names`."""

    title: ClassVar[str] = "components"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # in a step, by itself
    kinds: ClassVar[dict[str, str]] = {
        "sum": "mmrl.algorithms.scales.components:SumOfComponents",
        "normalise_each": "mmrl.algorithms.scales.components:NormaliseEach",
        "gated": "mmrl.algorithms.scales.components:Gated",
        "constrained": "mmrl.algorithms.scales.constrained:Constrained",
        "projected": "mmrl.algorithms.scales.projected:Projected",
    }
    test: ClassVar[str] = "tests/joints/test_advantages.py"

    @property
    def needs(self) -> Needs:
        return Needs()

    def check_names(self, names: list[str]) -> None:
        """Raises ValueError for a name that is not a reward of the task."""

    def total(self, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Combines rewards [rollout, component] to one reward [rollout]."""
        from mmrl.core.advantages import combined_reward

        return combined_reward(rewards, weights)

    def varied(self, rewards: Tensor, group: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Returns whether the combined reward differs within the rollout's group, [rollout] bool."""
        from mmrl.core.filters import varied_groups

        return varied_groups(self.total(rewards, weights, names), group)

    def combine(self, estimate: Estimator, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Computes advantages, [rollout of all ranks]. estimate: computes those of one reward; by default of
        `total`."""
        return estimate(self.total(rewards, weights, names))


class SumOfComponents(Components):
    """The weighted sum of the rewards is normalised."""

    equation: ClassVar[str] = "r = sum_k w_k r_k"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    type: str = "sum"


class NormaliseEach(Components):
    """Each reward is normalised in its group; their weighted sum is normalised over the batch."""

    equation: ClassVar[str] = "S = sum_k w_k A_k; A = (S - mean S) / (std S + 1e-6), over the batch"
    source: ClassVar[str] = "GDPO, arXiv 2601.05242"
    type: str = "normalise_each"

    def varied(self, rewards: Tensor, group: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        from mmrl.core.filters import varied_components

        return varied_components(rewards, group, weights)

    def combine(self, estimate: Estimator, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        import torch

        from mmrl.core.advantages import combined_reward, whitened

        changed = torch.stack([estimate.transform(column) for column in rewards.T], 1)
        scored = ~combined_reward(changed, weights).isnan()
        together, silent = torch.zeros_like(changed[:, 0]), torch.ones_like(scored)
        for k in weights.nonzero().flatten().tolist():
            column = changed[:, k].where(scored, torch.nan)
            together = together + weights[k] * estimate.compare(column)
            silent = silent & estimate.silent(column)
        # Subtracting the batch mean must not move the groups without signal.
        return whitened(together.where(scored, torch.nan)).where(scored & ~silent, 0)


class Gated(Components):
    """Some rewards gate the others: where a gate is closed (0), the reward is 0. A gate with `where` is open for the
    prompts that it is not for."""

    equation: ClassVar[str] = "r = prod_{k in gates} r_k x sum_{other k} w_k r_k"
    source: ClassVar[str] = "G-RA's gated aggregation"
    type: str = "gated"
    gates: list[str] = option(description="names of the rewards that are gates", min_length=1)

    @property
    def needs(self) -> Needs:
        return Needs(gates=frozenset(self.gates))

    def check_names(self, names: list[str]) -> None:
        for name in self.gates:
            if name not in names:
                raise ValueError(f"algorithm.components.gates: {name} is not one of the rewards, {', '.join(names)}")

    def total(self, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        from mmrl.core.advantages import gated_reward

        return gated_reward(rewards, weights, [names.index(name) for name in self.gates])
