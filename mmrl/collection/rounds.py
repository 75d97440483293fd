"""Rounds of rollouts: demonstrated, sampled, or taken from a pool of partial rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mmrl.collection.draws import Draw, PromptDraws
from mmrl.collection.partial_rollouts import Pool
from mmrl.engine import Ranks
from mmrl.protocols.job import JobConfig
from mmrl.protocols.measurement import CollectedContext
from mmrl.protocols.parts import Policy, RolloutSource, Task
from mmrl.rewards.twins import twin_of
from mmrl.rollouts import Prompt, Rollouts
from mmrl.runtime.seeds import rollout_seeds


@dataclass(eq=False)
class Rounds(ABC):
    """A maker of rollouts of this rank's share of prompts, scored and measured, in whole groups.

    one_at_once: whether at most one round may be pending.
    """

    one_at_once: ClassVar[bool] = False
    config: JobConfig
    draws: PromptDraws

    def ahead(self) -> Draw | None:
        """Draws the prompts of a later round in advance, so that they do not depend on when it is made. Returns None
        where the round draws them itself, by its unfinished groups."""
        return self.draws.draw()

    @abstractmethod
    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        """Makes a round for the next step. step: number of finished steps. version: finished steps of the generator's
        weights. draw: from `ahead`; None: the next prompts."""

    def state(self) -> dict[str, Any]:
        """Returns this rank's unfinished rollouts, as tensors and numbers that `load` restores; later steps do not
        change them."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027  (most have no state)
        """Restores a `state`."""

    def drawn(self, draw: Draw | None) -> tuple[Draw, list[Prompt]]:
        """Returns a draw and its prompts. Without `draw` the next one is drawn, and the one after it is read ahead."""
        chosen = self.draws.draw() if draw is None else draw
        prompts = self.draws.prompts(chosen)
        if draw is None:
            self.draws.foresee()
        return chosen, prompts


@dataclass(eq=False)
class DemonstratedRounds(Rounds):
    """Makes rollouts of demonstrations, which are the known answers to prompts. They have no rewards."""

    policy: Policy

    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        size, (draw, prompts) = self.config.group_size, self.drawn(draw)
        seeds = rollout_seeds(self.config.seed, draw.positions, size)
        shared = [seed for seed in seeds[::size] for _ in range(size)]  # the rollouts of a prompt share a seed
        batch = self.policy.demonstrate(self.config.algorithm.prepare_demonstrations(prompts), shared)
        batch.group = torch.tensor(draw.positions).repeat_interleave(size)
        return batch


@dataclass(eq=False)
class ScoredRounds(Rounds):
    """Rollouts of the policy, which the task scores. sampling: the source of rollouts."""

    policy: Policy
    sampling: RolloutSource
    task: Task
    ranks: Ranks

    @property
    def steps_ahead(self) -> int:
        return 0 if self.config.generator is None else self.config.generator.steps_ahead

    def measure(self, batch: Rollouts, step: int) -> Rollouts:
        """Adds the measurements that methods need."""
        config = self.config
        context = CollectedContext(
            self.policy, self.task, config.seed, step, config.group_size, self.ranks.max, self.sampling
        )
        for measurement in config.needs.collected:
            batch.extras[measurement.name] = measurement.measure(batch, context)
        return batch


class SampledRounds(ScoredRounds):
    """Rollouts that are sampled at once, or in micro-batches, each of which is scored while the next one is sampled."""

    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        size, (draw, prompts) = self.config.group_size, self.drawn(draw)
        batch = self.sampled(prompts, draw.positions, step)
        batch.prompt = torch.tensor(draw.indices).repeat_interleave(size)
        batch.accuracy = self.task.accuracy(batch.samples)
        if self.steps_ahead:
            batch.version = torch.full_like(batch.group, version)
        return self.measure(batch, step)

    def sampled(self, prompts: list[Prompt], positions: list[int], step: int) -> Rollouts:
        """Samples groups of rollouts, with rewards."""
        settings, size = self.config.rollout, self.config.group_size
        seeds = rollout_seeds(self.config.seed, positions, size)
        group = torch.tensor(positions).repeat_interleave(size)
        at_once = max(1, (settings.generated_at_once or len(group)) // size)
        parts, scores = [], []
        with one_thread("rewards") as background:
            for i in range(0, len(prompts), at_once):
                rows = slice(i * size, (i + at_once) * size)
                questions, each = prompts[i : i + at_once], size
                if settings.paired:
                    questions, each = [one for prompt in questions for one in (prompt, twin_of(prompt))], size // 2
                part = self.sampling.rollout(questions, each, seeds[rows], step=step)
                parts.append(part)
                scores.append(background.submit(self.task.score, part.samples, group[rows]))
                if not settings.scores_in_background:
                    scores[-1].result()
        batch = Rollouts.concat(parts)
        batch.group, batch.rewards = group, torch.cat([score.result() for score in scores])
        return batch


@dataclass(eq=False)
class PooledRounds(ScoredRounds):
    """The groups that finish first of a pool of partial rollouts. Every rank has as many unfinished groups; towards the
    end of the run no more than will be trained on."""

    one_at_once: ClassVar[bool] = True
    pool: Pool

    def ahead(self) -> Draw | None:
        return None

    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        share = self.draws.share
        most = share + self.pool.partial.oversample // self.ranks.world
        room = max(share, min(most, share * (self.config.steps - step)))
        added = self.draws.draw(max(0, room - len(self.pool.groups)))
        self.pool.add(added.positions, added.indices)
        if not self.steps_ahead:
            self.draws.foresee()
        batch = self.pool.take(share, step, version)
        batch.rewards = self.task.score(batch.samples, batch.group)
        batch.accuracy = self.task.accuracy(batch.samples)
        return self.measure(batch, step)

    def state(self) -> dict[str, Any]:
        return self.pool.state()

    def load(self, state: dict[str, Any]) -> None:
        self.pool.load(state)


def one_thread(name: str) -> ThreadPoolExecutor:
    """Returns a pool of one thread that computes on this rank's GPU; without it a new thread would use GPU 0."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (torch.cuda.current_device(),))
