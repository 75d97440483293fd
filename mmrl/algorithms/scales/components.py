"""Ways in which several rewards become one advantage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from mmrl.settings import Choice, option

if TYPE_CHECKING:
    from torch import Tensor

Estimate = Callable[["Tensor"], "Tensor"]  # [rollout] of rewards -> [rollout] of advantages


class Components(Choice):
    """How several rewards become one advantage. known: the name that `core.advantages` has for it; a kind that it does
    not know gives `combine`."""

    title: ClassVar[str] = "components"
    kinds: ClassVar[dict[str, str]] = {
        "sum": "mmrl.algorithms.scales.components:SumOfComponents",
        "normalise_each": "mmrl.algorithms.scales.components:NormaliseEach",
        "gated": "mmrl.algorithms.scales.components:Gated",
        "constrained": "mmrl.algorithms.scales.constrained:Constrained",
        "projected": "mmrl.algorithms.scales.projected:Projected",
    }
    test: ClassVar[str] = "tests/core/test_advantages.py"
    known: ClassVar[str] = "sum"

    def check_names(self, names: list[str]) -> None:
        """Raises ValueError for a name that is no reward of the task."""

    def total(self, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        """[rollout, component] -> [rollout]: the one reward that they make."""
        from mmrl.core.advantages import combined_reward

        return combined_reward(rewards, weights)

    def combine(self, estimate: Estimate, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor | None:
        """[rollout] advantages of all ranks, from those that `estimate` makes of one reward; None: of `total`."""
        return None


class SumOfComponents(Components):
    """Their weighted sum is normalised."""

    equation: ClassVar[str] = "r = sum_k w_k r_k"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300"
    type: str = "sum"


class NormaliseEach(Components):
    """Each is normalised in its group; their weighted sum is normalised over the batch."""

    equation: ClassVar[str] = "S = sum_k w_k A_k; A = (S - mean S) / (std S + 1e-6), over the batch"
    source: ClassVar[str] = "GDPO, arXiv 2601.05242"
    known: ClassVar[str] = "normalise_each"
    type: str = "normalise_each"


class Gated(Components):
    """Some rewards gate the others: where a gate is closed (0), the reward is 0."""

    equation: ClassVar[str] = "r = prod_{k in gates} r_k x sum_{other k} w_k r_k"
    source: ClassVar[str] = "G-RA's gated aggregation"
    known: ClassVar[str] = "gated"
    type: str = "gated"
    gates: list[str] = option(description="names of the rewards that are gates", min_length=1)

    def check_names(self, names: list[str]) -> None:
        for name in self.gates:
            if name not in names:
                raise ValueError(f"algorithm.components.gates: {name} is none of the rewards, {', '.join(names)}")

    def total(self, rewards: Tensor, weights: Tensor, names: list[str]) -> Tensor:
        from mmrl.core.advantages import gated_reward

        gates = [names.index(name) for name in self.gates]
        order = [*gates, *(k for k in range(len(names)) if k not in gates)]
        return gated_reward(rewards[:, order], weights[order].to(rewards), len(gates))
