"""Several rewards side by side: each keeps its name and its column, and the advantage applies the weights."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.rewards.registry import build
from mmrl.rewards.types import BatchReward, Reward, Score
from mmrl.rollouts import Sample


@dataclass(frozen=True)
class RewardSpec:
    """One component: a name of the registry, 'package.module:function' or 'package.module:Class', weight and options.

    `label` names the column where one reward is used twice. `isolated` and `deadline_s` run it in a process of its own.
    `batch_size` bounds how many samples a batched reward gets at once; None gives it all of them.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    name: str
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    label: str | None = None
    isolated: bool | None = None
    deadline_s: float | None = None
    batch_size: int | None = None

    def build(self) -> Reward | BatchReward:
        """The reward itself; ValueError as `mmrl.rewards.build`, and for a batch size where there are no batches."""
        reward = build(self.name, self.options, isolated=self.isolated, deadline_s=self.deadline_s)
        if self.batch_size is not None:
            if not isinstance(reward, BatchReward) or reward.scope != "sample":
                raise ValueError(f"reward {self.name!r} takes no batch_size: it scores samples one by one or by group")
            if self.batch_size < 1:
                raise ValueError(f"reward {self.name!r}: batch_size must be at least 1, not {self.batch_size}")
        return reward


class RewardSet:
    """The rewards of a task: `names`, `weights` (both of length K) and `score`.

    Raises ValueError for no component at all, two of the same name, a weight that is not finite, and as `build`.
    """

    def __init__(self, specs: Iterable[RewardSpec]):
        self._specs = tuple(specs)
        self.names = tuple(spec.label or spec.name for spec in self._specs)
        self.weights = tuple(float(spec.weight) for spec in self._specs)
        if not self._specs:
            raise ValueError("rewards: at least one component is needed")
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rewards: two components are named {twice!r}; give one of them a label")
        infinite = next((n for n, w in zip(self.names, self.weights, strict=True) if not math.isfinite(w)), None)
        if infinite is not None:
            raise ValueError(f"rewards: the weight of {infinite!r} is not finite")
        self.components = tuple(spec.build() for spec in self._specs)
        self._one_at_a_time = threading.Lock()  # models and worker processes serve one caller

    def score(self, samples: Sequence[Sample], group: Tensor | None = None) -> Tensor:
        """Unweighted components [rollout, component], float32; NaN where a component could not be scored.

        group: [rollout] integers, which prompt a rollout answers; only rewards that compare the rollouts of a group
        need it. A value that is None, NaN or infinite could not be scored and becomes NaN, never 0. Raises UserError
        naming the reward for a wrong number of values, a value that is no number, a group that is missing, a reward
        server that is down, and a sample of the wrong kind.
        """
        if group is not None and group.shape != (len(samples),):
            raise ValueError(f"group has the shape {tuple(group.shape)}, for {len(samples)} samples")
        scores = torch.full((len(samples), len(self.components)), math.nan)
        with self._one_at_a_time:
            for column, (name, spec, reward) in enumerate(zip(self.names, self._specs, self.components, strict=True)):
                try:
                    for index in _calls(reward, spec.batch_size, len(samples), group):
                        part = [samples[row] for row in index]
                        values = reward.score(part) if isinstance(reward, BatchReward) else [reward(s) for s in part]
                        scores[index, column] = _column(values, len(part))
                except UserError as error:
                    raise UserError(f"reward {name!r}: {error}") from error
        return scores


def _calls(reward: Reward | BatchReward, batch_size: int | None, count: int, group: Tensor | None) -> list[list[int]]:
    """Which samples go into each call of the reward."""
    rows = list(range(count))
    if not isinstance(reward, BatchReward) or reward.scope == "sample":
        size = batch_size or max(1, count)
        return [rows[first : first + size] for first in range(0, count, size)]
    if group is None:
        raise UserError("it compares the rollouts of a group, and score() was not told the groups")
    members: dict[int, list[int]] = {}
    for row, key in zip(rows, group.tolist(), strict=True):
        members.setdefault(key, []).append(row)
    return list(members.values())


def _column(values: Sequence[Score], count: int) -> Tensor:
    try:
        numbers = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UserError(f"expected one number a sample: {error}") from None
    if len(numbers) != count:
        raise UserError(f"gave {len(numbers)} values for {count} samples")
    column = torch.tensor(numbers, dtype=torch.float32)
    return column.where(column.isfinite(), math.nan)
