"""The batch of a step as algorithms, shapers and masks read it: this rank's rollouts, and named columns of the rollouts
of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmrl.core.advantages import combined_reward
from mmrl.errors import UserError
from mmrl.protocols.auxiliary import AuxiliaryModules
from mmrl.protocols.measurement import Measurement
from mmrl.rollouts import FRESH, Record, Rollouts, Turn, pad_to_longest

R = TypeVar("R", bound=Record)


class Batch:
    """The rollouts of a step before the updates on them.

    rollouts: those of this rank. rollout_mask: [rollout] bool, False where a mask has excluded the rollout.

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
        """gather: returns the values of an object on all ranks, in rank order; by default there is one rank. rank: this
        rank's number. seed: of the random numbers of this step."""
        self.rollouts, self.reward_names = rollouts, list(reward_names)
        self.reward_weights = torch.tensor(reward_weights)
        self.rollout_mask = torch.ones(len(rollouts), dtype=torch.bool)
        self.reports: dict[str, float] = {}
        self.memory: dict[str, Any] = {} if memory is None else memory
        self.modules = AuxiliaryModules() if modules is None else modules
        self._gather, self._rank, self._seed = gather, rank, seed
        self._sizes: list[int] | None = None

    def column(self, name: str) -> Tensor:
        """Returns a column of the rollouts of all ranks, [rollout], or for "rewards" [rollout, component].

        - rewards, `reward/<name>`: NaN where a component could not be scored or a mask excluded the rollout
        - group, prompt, truncated, accuracy, origin: see `Rollouts` and `Sample`
        - length: the number of decisions under the mask
        - turns, tool_calls, tool_errors: numbers of a conversation's turns, of turns that called a tool, and of turns
          that the environment could not execute; turn_tokens: decisions under the mask for each turn, on average
        - logp, entropy: means over the decisions under the mask, where a part lists them in `Needs.statistics`
        - `group/<name>`: the mean of a column over the scored rollouts of the group
        - a key of the prompts' metadata: numbers unchanged, other values as their index among all values, sorted

        Raises UserError for any other name.
        """
        if name.startswith("group/"):
            return self._group_mean(self.column(name.removeprefix("group/")))
        if name in COLUMNS or name.startswith("reward/"):
            return self.gather(self._local_column(name))
        return self._metadata(name)

    def gather(self, column: Tensor) -> Tensor:
        """Concatenates a column [rollout, ...] of all ranks, in rank order. A collective. Bool columns [rollout, n] are
        padded with False to the largest n."""
        parts = self._gather(column)
        return torch.cat(pad_to_longest(parts, 0) if column.dim() > 1 and column.dtype == torch.bool else parts)

    def measured(self, measurement: Measurement[R]) -> R:
        """Returns this rank's record of a measurement. Raises KeyError for one that no part lists in its needs."""
        if measurement.name not in self.rollouts.extras:
            raise KeyError(f"{measurement.name} has not been measured; list it in Needs.measurements of your part")
        record: R = self.rollouts.extras[measurement.name]  # type: ignore[assignment]  # `measurement` made it
        return record

    def gather_list(self, values: list[Any]) -> list[Any]:
        """Concatenates the lists of all ranks, in rank order; lengths may differ. A collective. Items are plain values
        or dataclasses, and should be small, since every rank receives them."""
        return [value for part in self._gather(values) for value in part]

    def responses(self) -> list[str]:
        """Returns the response texts of the rollouts of all ranks. A collective."""
        return self.gather_list([sample.response for sample in self.rollouts.samples])

    def combined_rewards(self) -> Tensor:
        """Returns the weighted sum of the reward components for the rollouts of all ranks, [rollout]; NaN where a
        component with a weight other than 0 is NaN. A collective."""
        return combined_reward(self.column("rewards"), self.reward_weights)

    def scored(self) -> Tensor:
        """Returns which of this rank's rollouts have a combined reward to learn from, [rollout] bool: not those that
        could not be scored, were masked, or only fill up an incomplete batch. A collective."""
        scored = self.local(self.combined_rewards()).isfinite()
        return scored if self.rollouts.filler is None else scored & ~self.rollouts.filler

    def local(self, values: Tensor) -> Tensor:
        """Selects this rank's rows from the values of all ranks, [rollout, ...]."""
        if self._sizes is None:
            self._sizes = self._gather(len(self.rollouts))
        first = sum(self._sizes[: self._rank])
        return values[first : first + len(self.rollouts)]

    def gather_decisions(self, values: Tensor) -> Tensor:
        """Returns the values of all decisions under the mask on all ranks, flat, [n]. values: those of this rank,
        [rollout, decision]. A collective."""
        masked = values.expand(self.rollouts.mask.shape)[self.rollouts.mask]
        return torch.cat(self._gather(masked))

    def gather_steps(self, values: Tensor, mask: Tensor) -> Tensor:
        """Returns the values of all steps under `mask` on all ranks, flat, [n]. values, mask: those of this rank,
        [rollout, step]; see `mmrl.rollouts.Steps`. A collective."""
        return torch.cat(self._gather(values[mask]))

    def generator(self, name: str = "") -> torch.Generator:
        """Returns a random generator for this rank. Its seed depends only on the run's seed, the step, the rank and
        `name`, so that each part that passes its own name has its own random numbers."""
        # far apart, so that the seeds of different steps, ranks and names hardly ever coincide
        return torch.Generator().manual_seed(self._seed * 1_000_003 + self._rank + (zlib.crc32(name.encode()) << 20))

    def report(self, numbers: dict[str, float]) -> None:
        """Adds numbers to the step's metrics, by metric name; they must be equal on all ranks."""
        self.reports |= numbers

    def _group_mean(self, values: Tensor) -> Tensor:
        """Returns for each rollout of all ranks the mean of `values` [rollout] over its group, ignoring NaN."""
        group = self.column("group")
        means = torch.full_like(values, torch.nan)
        for g in group.unique():
            means[group == g] = values[group == g].nanmean()
        return means

    def _local_column(self, name: str) -> Tensor:
        """Returns a column of this rank's rollouts, [rollout, ...]. name: a key of COLUMNS, or "reward/<name>"."""
        if name.startswith("reward/"):
            return self._local_column("rewards")[:, self.reward_names.index(name.removeprefix("reward/"))]
        return COLUMNS[name](self.rollouts, self.rollout_mask)

    def _metadata(self, name: str) -> Tensor:
        """Returns a key of the prompts' metadata as a column of all ranks, [rollout]; see `column`."""
        raw = [sample.prompt.metadata.get(name) for sample in self.rollouts.samples]
        local = [value if value is None or isinstance(value, int | float) else str(value) for value in raw]
        values = self.gather_list(local)
        if any(value is None for value in values):
            ids = self.gather_list([sample.prompt.id for sample in self.rollouts.samples])
            without = next(i for i, value in zip(ids, values, strict=True) if value is None)
            raise UserError(
                f"{name} is not a column of rollouts ({', '.join(COLUMNS)}), and prompt {without!r} does not have it "
                "in its metadata; name a column, or add the key to every row"
            )
        if all(isinstance(value, int | float) for value in values):
            return torch.tensor([float(value) for value in values])
        index = {text: number for number, text in enumerate(sorted({str(value) for value in values}))}
        return torch.tensor([float(index[str(value)]) for value in values])


def _rewards(rollouts: Rollouts, rollout_mask: Tensor) -> Tensor:
    """Returns the rewards [rollout, component]; NaN for rollouts that a mask has excluded."""
    assert rollouts.rewards is not None
    return rollouts.rewards.where(rollout_mask[:, None], torch.nan)


def _mean(values: Tensor | None, rollouts: Rollouts) -> Tensor:
    """Averages values [rollout, decision] over the decisions under the mask, [rollout]; NaN where there are none."""
    assert values is not None, "no part requested this statistic before the advantages"
    return values.where(rollouts.mask, 0).sum(1) / rollouts.mask.sum(1)


def _or_default(values: Tensor | None, default: float, rollouts: Rollouts) -> Tensor:
    """Returns `values`, or [rollout] filled with `default` where they are None."""
    return torch.full((len(rollouts),), default) if values is None else values


def _count_turns(rollouts: Rollouts, condition: Callable[[Turn], bool]) -> Tensor:
    """Counts the turns of each conversation that meet a condition, [rollout] float32; NaN for a rollout that is not a
    conversation or was lost."""
    counts = []
    for sample in rollouts.samples:
        conversation = sample.conversation
        if conversation is None or conversation.end == "lost":
            counts.append(torch.nan)
        else:
            counts.append(float(sum(map(condition, conversation.turns))))
    return torch.tensor(counts, dtype=torch.float32)


COLUMNS: dict[str, Callable[[Rollouts, Tensor], Tensor]] = {
    "rewards": _rewards,
    "group": lambda rollouts, rollout_mask: rollouts.group,
    "prompt": lambda rollouts, rollout_mask: _or_default(rollouts.prompt, -1, rollouts).long(),
    "length": lambda rollouts, rollout_mask: rollouts.mask.sum(1),
    "truncated": lambda rollouts, rollout_mask: torch.tensor([float(s.truncated) for s in rollouts.samples]),
    "accuracy": lambda rollouts, rollout_mask: _or_default(rollouts.accuracy, torch.nan, rollouts),
    "origin": lambda rollouts, rollout_mask: _or_default(rollouts.origin, FRESH, rollouts).long(),
    "advantage": lambda rollouts, rollout_mask: _mean(rollouts.advantages, rollouts),
    "logp": lambda rollouts, rollout_mask: _mean(rollouts.old_logp, rollouts),
    "entropy": lambda rollouts, rollout_mask: _mean(rollouts.old_entropy, rollouts),
    "turns": lambda rollouts, rollout_mask: _count_turns(rollouts, lambda turn: True),
    "tool_calls": lambda rollouts, rollout_mask: _count_turns(rollouts, lambda turn: turn.tool is not None),
    "tool_errors": lambda rollouts, rollout_mask: _count_turns(rollouts, lambda turn: turn.error is not None),
    "turn_tokens": lambda rollouts, rollout_mask: rollouts.mask.sum(-1) / _count_turns(rollouts, lambda turn: True),
}
