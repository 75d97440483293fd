"""Combinations of several rewards (components) to one advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmrl.protocols.requirements import Needs
from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.algorithms.estimator import Estimator


class Components(Choice):
    """A combination of several rewards to one advantage.

    A class of your own overrides one of two methods: `total` combines the rewards, `combine` their advantages. Common
    arguments are rewards: [rollout, component], NaN where unknown; weights: [component]; names: their names.
    """

    title: ClassVar[str] = "components"
    changes: ClassVar[frozenset[str]] = frozenset({"advantages"})  # what the components change in a step
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
        """Returns what the combination requires of the policy and the job."""
        return Needs()

    def check_names(self, names: list[str]) -> None:
        """Raises ValueError if an option names a reward that is not among the task's rewards `names`."""

    def total(self, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Combines rewards [rollout, component] to one reward [rollout]."""
        from mmrl.core.advantages import combined_reward

        return combined_reward(rewards, weights)

    def varied(self, rewards: Tensor, group: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Returns whether the rewards differ within the rollout's group, [rollout] bool; by default, whether the
        combined reward differs."""
        from mmrl.core.filters import varied_groups

        return varied_groups(self.total(rewards, weights, names), group)

    def combine(self, estimate: Estimator, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Computes advantages, [rollout of all ranks]; by default, of the combined reward. estimate: computes the
        advantages of one reward [rollout]."""
        return estimate(self.total(rewards, weights, names))


class SumOfComponents(Components):
    """The advantage of the weighted sum of the rewards."""

    equation: ClassVar[str] = "r = sum_k w_k r_k"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    type: str = "sum"


class NormaliseEach(Components):
    """The weighted sum of the advantages of each reward, normalized over the batch (GDPO)."""

    equation: ClassVar[str] = "S = sum_k w_k A_k; A = (S - mean S) / (std S + 1e-6), over the batch"
    source: ClassVar[str] = "GDPO, arXiv 2601.05242"
    type: str = "normalise_each"

    def varied(self, rewards: Tensor, group: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        from mmrl.core.filters import varied_components

        return varied_components(rewards, group, weights)

    def combine(self, estimate: Estimator, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """Returns the weighted sum of the advantages of each component, whitened over the batch, [rollout of all
        ranks]; 0 where a reward is unknown, and where all components are equal within the group."""
        import torch

        from mmrl.core.advantages import combined_reward, whiten

        transformed = torch.stack([estimate.transform(column) for column in rewards.T], 1)
        scored = ~combined_reward(transformed, weights).isnan()
        total, no_signal = torch.zeros_like(transformed[:, 0]), torch.ones_like(scored)
        for k in weights.nonzero().flatten().tolist():
            column = transformed[:, k].where(scored, torch.nan)
            total = total + weights[k] * estimate.normalize(column)
            no_signal = no_signal & estimate.has_no_signal(column)
        # subtracting the batch mean must not give groups without a signal an advantage
        return whiten(total.where(scored, torch.nan)).where(scored & ~no_signal, 0)


class Gated(Components):
    """The weighted sum of some rewards, multiplied by the other rewards, the gates: if a gate is 0, the reward is 0.

    A gate that applies only to some prompts (its option `where`) is 1 for the others.
    """

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
                raise ValueError(f"algorithm.components.gates: {name} is not a reward; choose from {', '.join(names)}")
        if set(names) <= set(self.gates):
            raise ValueError(
                f"algorithm.components.gates names every reward ({', '.join(names)}), so that no reward is left to "
                "multiply; leave one out"
            )

    def total(self, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        from mmrl.core.advantages import gated_reward

        return gated_reward(rewards, weights, [names.index(name) for name in self.gates])
