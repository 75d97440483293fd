"""Facts: named columns of a step's rollouts that parts of a method read by a key of the configuration, and the check
that somebody fills them in. `protocols.batch.Batch.fact` returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STATISTICS = frozenset({"logp", "entropy"})  # cost a pass before the advantages
OF_TURNS = frozenset({"turns", "tool_calls", "tool_errors", "turn_tokens"})
OF_ROLLOUTS = STATISTICS | OF_TURNS | {"length", "truncated", "accuracy", "origin"}
OF_PROMPTS = frozenset({"group", "prompt"})
GROUP, REWARD = "group/", "reward/"  # prefixes: the mean over the group; the reward of that name


@dataclass(frozen=True)
class Fact:
    """A column that a part reads. varies: whether it is of use only where it differs between rollouts of a group."""

    name: str
    varies: bool = False

    @property
    def column(self) -> str:
        """Returns the name without the prefix of a mean over the group."""
        return self.name.removeprefix(GROUP)


def check_fact(key: str, fact: Fact, rewards: Sequence[str], metadata: Mapping[str, Any], *, paired: bool) -> None:
    """Raises ValueError in one line for a fact that no rollout of the job has, or that is the same in a whole group
    where it has to differ.

    key: of the part; rewards: names of the task's; metadata: of a prompt; paired: whether a group has two prompts.
    """
    column = fact.column
    if column.startswith(REWARD):
        if column.removeprefix(REWARD) not in rewards:
            raise ValueError(f"{key} reads {column}, and the rewards are {', '.join(rewards)}")
    elif column not in OF_ROLLOUTS | OF_PROMPTS | metadata.keys():
        raise ValueError(
            f"{key} reads {column}, which is not a fact of rollouts ({', '.join(sorted(OF_ROLLOUTS))}, reward/NAME), "
            f"and the task's prompts have no such metadata (they have {', '.join(sorted(metadata)) or 'none'})"
        )
    elif fact.varies and (fact.name != column or (column not in OF_ROLLOUTS and not paired)):
        raise ValueError(
            f"{key} compares rollouts of a group by {fact.name}, which is the same for all of them; name a fact of "
            f"rollouts: {', '.join(sorted(OF_ROLLOUTS))} or reward/NAME"
        )
