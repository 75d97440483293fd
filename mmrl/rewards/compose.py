"""Several rewards side by side: each keeps its name and its column, and the advantage applies the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from mmrl.rewards.registry import Reward, build
from mmrl.rollouts import Sample


@dataclass(frozen=True)
class RewardSpec:
    """One component: a name of the registry or 'package.module:function', its weight and its options.

    `label` names the column where one reward is used twice. `isolated` and `deadline_s` run it in a process of its own.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    name: str
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    label: str | None = None
    isolated: bool | None = None
    deadline_s: float | None = None

    def build(self) -> Reward:
        """The reward itself; ValueError as `mmrl.rewards.build`."""
        return build(self.name, self.options, isolated=self.isolated, deadline_s=self.deadline_s)


class RewardSet:
    """The rewards of a task: `names`, `weights` (both of length K) and `score`.

    Raises ValueError for no component at all, two of the same name, a weight that is not finite, and as `build`.
    """

    def __init__(self, specs: Iterable[RewardSpec]):
        specs = list(specs)
        self.names = tuple(spec.label or spec.name for spec in specs)
        self.weights = tuple(float(spec.weight) for spec in specs)
        if not specs:
            raise ValueError("rewards: at least one component is needed")
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rewards: two components are named {twice!r}; give one of them a label")
        infinite = next((n for n, w in zip(self.names, self.weights, strict=True) if not math.isfinite(w)), None)
        if infinite is not None:
            raise ValueError(f"rewards: the weight of {infinite!r} is not finite")
        self.components = tuple(spec.build() for spec in specs)

    def score(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Unweighted components [rollout, component], float32; NaN where a component could not be scored."""
        rows = [[math.nan if (v := reward(sample)) is None else v for reward in self.components] for sample in samples]
        return torch.tensor(rows, dtype=torch.float32).reshape(len(samples), len(self.components))
