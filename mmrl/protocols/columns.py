"""The named columns of a step's rollouts that an algorithm, a mask or a shaper may read, and the check that a job has
them. `protocols.batch.Batch.column` returns their values. The configuration names some of them, for example
`algorithm.masks=[{type: band, fact: length}]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STATISTICS = frozenset({"logp", "entropy"})  # computed by an extra forward pass before the advantages
DECISION_STATISTICS = STATISTICS | {"square_sum"}  # those of `Needs.statistics`
TURN_COLUMNS = frozenset({"turns", "tool_calls", "tool_errors", "turn_tokens"})
ROLLOUT_COLUMNS = STATISTICS | TURN_COLUMNS | {"length", "truncated", "accuracy", "origin"}
PROMPT_COLUMNS = frozenset({"group", "prompt"})
GROUP, REWARD = "group/", "reward/"  # prefixes: group/NAME is the mean of column NAME over the group


@dataclass(frozen=True)
class NeededColumn:
    """A column that an algorithm, a mask or a shaper reads. varies: whether it must differ between the rollouts of a
    group."""

    name: str
    varies: bool = False

    @property
    def column(self) -> str:
        """Returns the name without the prefix "group/"."""
        return self.name.removeprefix(GROUP)


def check_column(
    key: str, needed: NeededColumn, rewards: Sequence[str], metadata: Mapping[str, Any], *, paired: bool
) -> None:
    """Raises ValueError if the job's rollouts do not have a column, or if it is the same for all rollouts of a group
    although it must differ.

    key: the configuration key of the part that reads the column. rewards: names of the task's rewards. metadata: the
    metadata of one of the task's prompts. paired: whether a group has two prompts.
    """
    column, known = needed.column, ", ".join(sorted(ROLLOUT_COLUMNS))
    if column.startswith(REWARD):
        if column.removeprefix(REWARD) not in rewards:
            raise ValueError(f"{key} reads {column}, but the task's rewards are {', '.join(rewards)}; name one of them")
    elif column not in ROLLOUT_COLUMNS | PROMPT_COLUMNS | metadata.keys():
        raise ValueError(
            f"{key} reads {column}, which is not a column of rollouts ({known}, reward/NAME) and not in the metadata "
            f"of the task's prompts (they have {', '.join(sorted(metadata)) or 'none'}); name one of these"
        )
    # equal in a group: means over the group, and what belongs to the prompt, unless the group has two prompts
    elif needed.varies and (needed.name != column or (column not in ROLLOUT_COLUMNS and not paired)):
        raise ValueError(
            f"{key} compares rollouts of a group by {needed.name}, which is the same for all of them; name a column "
            f"that differs between them: {known} or reward/NAME"
        )
