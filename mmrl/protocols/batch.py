"""The batch of a step as algorithms, shapers and masks read it: this rank's rollouts, and named columns of the rollouts
of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmrl.core.advantages import combined_reward
from mmrl.protocols.auxiliary import AuxiliaryModules
from mmrl.protocols.measurement import Measurement
from mmrl.rollouts import FRESH, Record, Rollouts, Turn, pad_to_longest

R = TypeVar("R", bound=Record)


class Batch:
    """The rollouts of a step before they are learned from.

    rollouts: this rank's. rollout_mask: [rollout] bool, False where a mask has excluded the rollout.

    `column` and the methods `gather...` are collectives: every rank must call them in the same order. They return the
    values of all ranks in rank order, so that results do not depend on how rollouts are distributed.

    memory: state that parts of the algorithm keep across steps, equal on all ranks; each part has an entry of its own,
    of mappings with string keys, lists and numbers. modules: networks that are trained beside the policy. Checkpoints
    hold both.
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
        self.rollout_mask = torch.ones(len(rollouts), dtype=torch.bool)
        self.reports: dict[str, float] = {}
        self.memory: dict[str, Any] = {} if memory is None else memory
        self.modules = AuxiliaryModules() if modules is None else modules
        self._gather, self._rank, self._seed = gather, rank, seed
        self._sizes: list[int] | None = None

    def column(self, name: str) -> Tensor:
        """Returns a column, [rollout of all ranks], or for "rewards" [rollout, component].

        - rewards, `reward/<name>`: NaN where a component could not be scored or a mask excluded the rollout
        - group, prompt, truncated, accuracy, origin
        - length: the number of counted decisions
        - turns, tool_calls, tool_errors: numbers of responses of a conversation, of those that called a tool, and of
          those that could not be carried out; turn_tokens: its counted decisions by response
        - logp, entropy: means over the counted decisions, where they are requested as statistics
        - `group/<name>`: the mean of a column over the scored rollouts of the group
        - a key of the prompts' metadata: numbers as they are, other values as their index in the sorted list of all

        Raises KeyError for any other name.
        """
        if name.startswith("group/"):
            return self._group_mean(self.column(name.removeprefix("group/")))
        return self.gather(self._column(name)) if name in COLUMNS or name.startswith("reward/") else self._meta(name)

    def gather(self, column: Tensor) -> Tensor:
        """Concatenates a column [rollout, ...] over all ranks. A collective."""
        parts = self._gather(column)
        return torch.cat(pad_to_longest(parts, 0) if column.dim() > 1 and column.dtype == torch.bool else parts)

    def measured(self, measurement: Measurement[R]) -> R:
        """Returns this rank's record of a measurement. Raises KeyError for one that no part lists in its needs."""
        if measurement.name not in self.rollouts.extras:
            raise KeyError(f"{measurement.name} was not measured; list it in Needs.measurements")
        record: R = self.rollouts.extras[measurement.name]  # type: ignore[assignment]  # `measurement` made it
        return record

    def gather_list(self, values: list[Any]) -> list[Any]:
        """Concatenates lists over all ranks, in rank order. Lengths may differ; items are plain values or
        dataclasses and should be small, for they are sent. A collective."""
        return [value for part in self._gather(values) for value in part]

    def responses(self) -> list[str]:
        """Returns the text of the responses of all ranks."""
        return self.gather_list([sample.response for sample in self.rollouts.samples])

    def combined_rewards(self) -> Tensor:
        """Returns the weighted sum of the components whose weight is not 0, [rollout of all ranks]; NaN where one of
        them is."""
        return combined_reward(self.column("rewards"), self.reward_weights)

    def local(self, values: Tensor) -> Tensor:
        """Returns this rank's rows of values [rollout of all ranks, ...]."""
        if self._sizes is None:
            self._sizes = self._gather(len(self.rollouts))
        first = sum(self._sizes[: self._rank])
        return values[first : first + len(self.rollouts)]

    def gather_decisions(self, values: Tensor) -> Tensor:
        """Selects the counted entries of `values` [rollout, decision] on all ranks, [decision]."""
        counted = values.expand(self.rollouts.mask.shape)[self.rollouts.mask]
        return torch.cat(self._gather(counted))

    def gather_steps(self, values: Tensor, mask: Tensor) -> Tensor:
        """Selects the entries of `values` [rollout, step] where `mask` holds, on all ranks, [step]."""
        return torch.cat(self._gather(values[mask]))

    def generator(self, of: str = "") -> torch.Generator:
        """Returns a generator for this rank's draws, seeded by the run's seed, the step, the rank and `of` alone."""
        return torch.Generator().manual_seed(self._seed * 1_000_003 + self._rank + (zlib.crc32(of.encode()) << 20))

    def report(self, numbers: dict[str, float]) -> None:
        self.reports |= numbers

    def _group_mean(self, values: Tensor) -> Tensor:
        group = self.column("group")
        means = torch.full_like(values, torch.nan)
        for g in group.unique():
            means[group == g] = values[group == g].nanmean()
        return means

    def _column(self, name: str) -> Tensor:
        rollouts = self.rollouts
        if name.startswith("reward/"):
            return self._column("rewards")[:, self.reward_names.index(name.removeprefix("reward/"))]
        return COLUMNS[name](rollouts, self.rollout_mask)

    def _meta(self, name: str) -> Tensor:
        own = [sample.prompt.metadata.get(name) for sample in self.rollouts.samples]
        local = [value if value is None or isinstance(value, int | float) else str(value) for value in own]
        values = [value for part in self._gather(local) for value in part]
        if any(value is None for value in values):
            raise KeyError(f"{name} is not a column of rollouts, and not all prompts have it in their metadata")
        if all(isinstance(value, int | float) for value in values):
            return torch.tensor([float(value) for value in values])
        index = {value: number for number, value in enumerate(sorted({str(value) for value in values}))}
        return torch.tensor([float(index[str(value)]) for value in values])


def _rewards(rollouts: Rollouts, rollout_mask: Tensor) -> Tensor:
    assert rollouts.rewards is not None
    return rollouts.rewards.where(rollout_mask[:, None], torch.nan)


def _mean(values: Tensor | None, rollouts: Rollouts) -> Tensor:
    """Averages over the counted decisions, [rollout]; NaN where there is none."""
    assert values is not None, "no part requested this statistic before the advantages"
    return values.where(rollouts.mask, 0).sum(1) / rollouts.mask.sum(1)


def _or(values: Tensor | None, otherwise: float, rollouts: Rollouts) -> Tensor:
    return torch.full((len(rollouts),), otherwise) if values is None else values


def _turns(rollouts: Rollouts, counts: Callable[[Turn], bool]) -> Tensor:
    """Counts turns of each conversation, [rollout] float32; NaN for what is none, or was lost."""
    talks = [sample.conversation for sample in rollouts.samples]
    numbers = [
        torch.nan if talk is None or talk.end == "lost" else float(sum(map(counts, talk.turns))) for talk in talks
    ]
    return torch.tensor(numbers, dtype=torch.float32)


COLUMNS: dict[str, Callable[[Rollouts, Tensor], Tensor]] = {
    "rewards": _rewards,
    "group": lambda rollouts, rollout_mask: rollouts.group,
    "prompt": lambda rollouts, rollout_mask: _or(rollouts.prompt, -1, rollouts).long(),
    "length": lambda rollouts, rollout_mask: rollouts.mask.sum(1),
    "truncated": lambda rollouts, rollout_mask: torch.tensor([float(s.truncated) for s in rollouts.samples]),
    "accuracy": lambda rollouts, rollout_mask: _or(rollouts.accuracy, torch.nan, rollouts),
    "origin": lambda rollouts, rollout_mask: _or(rollouts.origin, FRESH, rollouts).long(),
    "logp": lambda rollouts, rollout_mask: _mean(rollouts.old_logp, rollouts),
    "entropy": lambda rollouts, rollout_mask: _mean(rollouts.old_entropy, rollouts),
    "turns": lambda rollouts, rollout_mask: _turns(rollouts, lambda turn: True),
    "tool_calls": lambda rollouts, rollout_mask: _turns(rollouts, lambda turn: turn.tool is not None),
    "tool_errors": lambda rollouts, rollout_mask: _turns(rollouts, lambda turn: turn.error is not None),
    "turn_tokens": lambda rollouts, rollout_mask: rollouts.mask.sum(-1) / _turns(rollouts, lambda turn: True),
}
