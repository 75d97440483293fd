"""Rollouts that are generated over several steps (partial rollouts)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.generation.settings import Partial
from mmrl.protocols.parts import Drafting, Source
from mmrl.rollouts import Rollouts
from mmrl.runtime.seeds import rollout_seeds


@dataclass(eq=False)
class PendingGroup:
    """The unfinished rollouts of one prompt. position: the prompt's position in the order of the run. prompt: its index
    in the data set. drafts: unfinished responses. version: the training step of the weights that sampled the first
    tokens; None before any token."""

    position: int
    prompt: int
    drafts: list[Any]
    version: int | None = None


class Pool:
    """A pool of more unfinished groups than a step needs (partial rollouts, arXiv 2501.12599). A step takes the groups
    that are finished first; longer responses are continued in the next step, with its weights.

    Responses grow by segments of a fixed number of tokens, and a step ends after the segment that finishes enough
    groups. So results do not depend on timing.
    """

    def __init__(self, policy: Any, source: Source, seed: int, group_size: int, partial: Partial) -> None:
        """policy: implements `Drafting`."""
        self.policy: Drafting = policy
        self.source, self.seed, self.group_size, self.partial = source, seed, group_size, partial
        self.groups: list[PendingGroup] = []  # oldest first

    def add(self, positions: Sequence[int], prompts: Sequence[int]) -> None:
        """Adds groups without tokens. positions: the prompts' positions in the order of the run. prompts: their
        indices in the data set."""
        size = self.group_size
        if positions:
            seeds = rollout_seeds(self.seed, positions, size)
            drafts = self.policy.draft([self.source[p] for p in prompts], size, seeds)
            for i, (position, prompt) in enumerate(zip(positions, prompts, strict=True)):
                self.groups.append(PendingGroup(position, prompt, drafts[i * size : (i + 1) * size]))

    def take(self, count: int, step: int, version: int) -> Rollouts:
        """Generates until `count` groups are finished, and returns the oldest of them as rollouts without rewards. Also
        finishes groups that would exceed `max_staleness` in the next step.

        step: number of finished training steps. version: the training step of the generator's weights."""
        while not self._may_end(count, step):
            for group in self.groups:
                group.version = version if group.version is None else group.version
            unfinished = [draft for group in self.groups for draft in group.drafts]
            self.policy.extend(self.policy.engine, unfinished, self.partial.segment)
        taken = [group for group in self.groups if self._finished(group)][:count]
        self.groups = [group for group in self.groups if group not in taken]
        size = self.group_size
        batch = self.policy.complete([draft for group in taken for draft in group.drafts], size)
        batch.group = torch.tensor([group.position for group in taken]).repeat_interleave(size)
        batch.prompt = torch.tensor([group.prompt for group in taken]).repeat_interleave(size)
        batch.version = torch.tensor([group.version for group in taken]).repeat_interleave(size)
        return batch

    def _may_end(self, count: int, step: int) -> bool:
        """Returns whether a step may end: `count` groups are finished, and so is every group whose first tokens would
        be too old in the next step."""
        oldest_version = step + 1 - self.partial.max_staleness
        stale = [group for group in self.groups if group.version is not None and group.version < oldest_version]
        return sum(map(self._finished, self.groups)) >= count and all(map(self._finished, stale))

    def _finished(self, group: PendingGroup) -> bool:
        return all(draft.finished(self.policy.eos) for draft in group.drafts)

    def state(self) -> dict[str, Any]:
        """Returns the unfinished groups as tensors and numbers, which `load` restores; later steps do not change
        them."""
        return {
            "positions": [group.position for group in self.groups],
            "prompts": [group.prompt for group in self.groups],
            "versions": [group.version for group in self.groups],
            "drafts": [draft.state() for group in self.groups for draft in group.drafts],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores the unfinished groups that `state` returned."""
        self.groups = []
        self.add(state["positions"], state["prompts"])
        self.policy.restore([draft for group in self.groups for draft in group.drafts], state["drafts"])
        for group, version in zip(self.groups, state["versions"], strict=True):
            group.version = version
