"""What algorithms, shapers and masks may know of a step: this rank's rollouts, and named facts of all ranks'."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmrl.core.advantages import combined_reward
from mmrl.protocols.auxiliary import AuxiliaryModules
from mmrl.protocols.measurement import Measurement
from mmrl.rollouts import FRESH, Record, Rollouts, widened

R = TypeVar("R", bound=Record)


class Batch:
    """The rollouts of a step before they are learned from.

    rollouts: this rank's. kept: [rollout] bool, False where a mask has left one of them out. What `fact` and
    `decisions` give is of all ranks, in their order, so that results do not depend on how rollouts are shared out; all
    ranks must ask for the same, in the same order. `report` takes numbers for the step's metrics, equal on all ranks.
    memory: what parts of the algorithm keep from step to step, each under a name of its own: mappings, lists and
    numbers, with strings as keys, equal on all ranks; modules: networks that learn beside the policy; checkpoints hold
    both.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        reward_names: Sequence[str],
        reward_weights: Sequence[float],
        *,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        rank: int = 0,
        seed: int = 0,
        memory: dict[str, Any] | None = None,
        modules: AuxiliaryModules | None = None,
    ) -> None:
        self.rollouts, self.reward_names = rollouts, list(reward_names)
        self.reward_weights = torch.tensor(reward_weights)
        self.kept = torch.ones(len(rollouts), dtype=torch.bool)
        self.reports: dict[str, float] = {}
        self.memory: dict[str, Any] = {} if memory is None else memory
        self.modules = AuxiliaryModules() if modules is None else modules
        self._gather, self._rank, self._seed = gather, rank, seed
        self._sizes: list[int] | None = None

    def fact(self, name: str) -> Tensor:
        """[rollout of all ranks] of a column, or [rollout, component] of "rewards".

        rewards (NaN where a component could not be scored or a mask left the rollout out), group, prompt, length (of
        counted decisions), truncated, accuracy, origin, `reward/<name>`; logp and entropy, means over the counted
        decisions, where they are asked for as statistics; `group/<fact>`, its mean over the group, where it is known;
        any other name is a key of the prompts' metadata: numbers as they are, other values as their place among all
        that occur.

        Raises KeyError for a name that is neither.
        """
        if name.startswith("group/"):
            return self._group_mean(self.fact(name.removeprefix("group/")))
        return self.everyone(self._column(name)) if name in COLUMNS or name.startswith("reward/") else self._meta(name)

    def everyone(self, column: Tensor) -> Tensor:
        """[rollout of all ranks, ...] of [rollout, ...] of this rank."""
        parts = self._gather(column)
        return torch.cat(widened(parts, 0) if column.dim() > 1 and column.dtype == torch.bool else parts)

    def measured(self, measurement: Measurement[R]) -> R:
        """This rank's record of a measurement. Raises KeyError for one that no part lists in its needs."""
        if measurement.name not in self.rollouts.extras:
            raise KeyError(f"{measurement.name} was not measured; list it in Needs.measurements")
        record: R = self.rollouts.extras[measurement.name]  # type: ignore[assignment]  # which it has made
        return record

    def each(self, values: list[Any]) -> list[Any]:
        """Those of all ranks, in their order, of as many things as this rank likes; small ones, for they are sent."""
        return [value for part in self._gather(values) for value in part]

    def responses(self) -> list[str]:
        """The text of the responses of all ranks."""
        return self.each([sample.response for sample in self.rollouts.samples])

    def combined(self) -> Tensor:
        """[rollout of all ranks] the weighted sum of the components that weigh anything; NaN where one of those is."""
        return combined_reward(self.fact("rewards"), self.reward_weights)

    def mine(self, values: Tensor) -> Tensor:
        """This rank's part of something [rollout of all ranks, ...]."""
        if self._sizes is None:
            self._sizes = self._gather(len(self.rollouts))
        first = sum(self._sizes[: self._rank])
        return values[first : first + len(self.rollouts)]

    def decisions(self, values: Tensor) -> Tensor:
        """[decision] the counted ones of `values` [rollout, decision], of all ranks."""
        counted = values.expand(self.rollouts.mask.shape)[self.rollouts.mask]
        return torch.cat(self._gather(counted))

    def steps(self, values: Tensor, mask: Tensor) -> Tensor:
        """[step] the counted ones of `values` [rollout, step], of all ranks."""
        return torch.cat(self._gather(values[mask]))

    def generator(self, of: str = "") -> torch.Generator:
        """For draws of this rank that depend on the run's seed, the step, the rank and what they are of alone."""
        return torch.Generator().manual_seed(self._seed * 1_000_003 + self._rank + (zlib.crc32(of.encode()) << 20))

    def report(self, numbers: dict[str, float]) -> None:
        self.reports |= numbers

    def _group_mean(self, values: Tensor) -> Tensor:
        group = self.fact("group")
        found = torch.full_like(values, torch.nan)
        for g in group.unique():
            found[group == g] = values[group == g].nanmean()
        return found

    def _column(self, name: str) -> Tensor:
        rollouts = self.rollouts
        if name.startswith("reward/"):
            return self._column("rewards")[:, self.reward_names.index(name.removeprefix("reward/"))]
        return COLUMNS[name](rollouts, self.kept)

    def _meta(self, name: str) -> Tensor:
        own = [sample.prompt.metadata.get(name) for sample in self.rollouts.samples]
        everyone = [value for part in self._gather(own) for value in part]
        if any(value is None for value in everyone):
            raise KeyError(f"{name} is no fact of rollouts, and not all prompts have it in their metadata")
        if all(isinstance(value, int | float) for value in everyone):
            return torch.tensor([float(value) for value in everyone])
        places = {value: place for place, value in enumerate(sorted({str(value) for value in everyone}))}
        return torch.tensor([float(places[str(value)]) for value in everyone])


def _rewards(rollouts: Rollouts, kept: Tensor) -> Tensor:
    assert rollouts.rewards is not None
    return rollouts.rewards.where(kept[:, None], torch.nan)


def _mean(values: Tensor | None, rollouts: Rollouts) -> Tensor:
    """[rollout] over the counted decisions; NaN where there is none."""
    assert values is not None, "no part asked for this statistic before the advantages"
    return values.where(rollouts.mask, 0).sum(1) / rollouts.mask.sum(1)


def _or(values: Tensor | None, otherwise: float, rollouts: Rollouts) -> Tensor:
    return torch.full((len(rollouts),), otherwise) if values is None else values


COLUMNS: dict[str, Callable[[Rollouts, Tensor], Tensor]] = {
    "rewards": _rewards,
    "group": lambda rollouts, kept: rollouts.group,
    "prompt": lambda rollouts, kept: _or(rollouts.prompt, -1, rollouts).long(),
    "length": lambda rollouts, kept: rollouts.mask.sum(1),
    "truncated": lambda rollouts, kept: torch.tensor([float(s.truncated) for s in rollouts.samples]),
    "accuracy": lambda rollouts, kept: _or(rollouts.accuracy, torch.nan, rollouts),
    "origin": lambda rollouts, kept: _or(rollouts.origin, FRESH, rollouts).long(),
    "logp": lambda rollouts, kept: _mean(rollouts.old_logp, rollouts),
    "entropy": lambda rollouts, kept: _mean(rollouts.old_entropy, rollouts),
}
