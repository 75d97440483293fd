"""Rounds of rollouts: one round makes the rollouts of a rank's share of prompts, from demonstrations, by sampling, or
from a pool of partial rollouts."""

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
    """Makes the rollouts for this rank's share of prompts, in whole groups, with rewards and measurements.

    single_pending: whether at most one round may be pending when rounds are sampled ahead.
    """

    single_pending: ClassVar[bool] = False
    config: JobConfig
    draws: PromptDraws

    def draw_ahead(self) -> Draw | None:
        """Draws the prompts of a later round now, so that they do not depend on when the round is made. Returns None
        if `make` draws them, as many as its pool has room for."""
        return self.draws.draw()

    @abstractmethod
    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        """Makes the rollouts of a round. step: number of finished training steps. version: the training step of the
        generator's weights. draw: the result of `draw_ahead`; None: draws the next prompts."""

    def state(self) -> dict[str, Any]:
        """Returns this rank's unfinished rollouts as tensors and numbers, which `load` restores; later steps do not
        change them."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027  (most have no state)
        """Restores a `state`."""

    def draw_prompts(self, draw: Draw | None) -> tuple[Draw, list[Prompt]]:
        """Returns `draw` and its prompts. If it is None, draws the next prompts, and starts reading those that
        follow."""
        current = self.draws.draw() if draw is None else draw
        prompts = self.draws.prompts(current)
        if draw is None:
            self.draws.prefetch()
        return current, prompts


@dataclass(eq=False)
class DemonstratedRounds(Rounds):
    """Makes rollouts from demonstrations, the known answers to prompts. They have no rewards."""

    policy: Policy

    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        """Makes `group_size` rollouts of the demonstrations of each prompt, which form a group."""
        size, (draw, prompts) = self.config.group_size, self.draw_prompts(draw)
        seeds = rollout_seeds(self.config.seed, draw.positions, size)
        shared = [seed for seed in seeds[::size] for _ in range(size)]  # the rollouts of a prompt share a seed
        batch = self.policy.demonstrate(self.config.algorithm.prepare_demonstrations(prompts), shared)
        batch.group = torch.tensor(draw.positions).repeat_interleave(size)
        return batch


@dataclass(eq=False)
class ScoredRounds(Rounds):
    """Makes rollouts of the policy, which the task scores. sampling: the policy or the generator, see `sampled_by`."""

    policy: Policy
    sampling: RolloutSource
    task: Task
    ranks: Ranks

    @property
    def steps_ahead(self) -> int:
        return 0 if self.config.generator is None else self.config.generator.steps_ahead

    def measure(self, batch: Rollouts, step: int) -> Rollouts:
        """Adds the measurements that parts of the algorithm need to `batch.extras`. step: number of finished steps."""
        config = self.config
        context = CollectedContext(
            self.policy, self.task, config.seed, step, config.group_size, self.ranks.max, self.sampling
        )
        for measurement in config.needs.collected:
            batch.extras[measurement.name] = measurement.measure(batch, context)
        return batch


class SampledRounds(ScoredRounds):
    """Samples all rollouts at once, or in micro-batches, each of which is scored while the next one is sampled."""

    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        """Samples and scores the groups of the next prompts, or of those of `draw`, and measures them."""
        size, (draw, prompts) = self.config.group_size, self.draw_prompts(draw)
        batch = self.sampled(prompts, draw.positions, step)
        batch.prompt = torch.tensor(draw.indices).repeat_interleave(size)
        batch.accuracy = self.task.accuracy(batch.samples)
        if self.steps_ahead:
            batch.version = torch.full_like(batch.group, version)
        return self.measure(batch, step)

    def sampled(self, prompts: list[Prompt], positions: list[int], step: int) -> Rollouts:
        """Samples and scores a group of rollouts for each prompt. positions: the prompts' positions in the order of
        the run, which are the group ids and determine the seeds."""
        settings, size = self.config.rollout, self.config.group_size
        seeds = rollout_seeds(self.config.seed, positions, size)
        group = torch.tensor(positions).repeat_interleave(size)
        at_once = max(1, (settings.generated_at_once or len(group)) // size)
        parts, scores = [], []
        with one_thread("rewards") as background:
            for i in range(0, len(prompts), at_once):
                rows = slice(i * size, (i + at_once) * size)
                micro_prompts, group_size = prompts[i : i + at_once], size
                if settings.paired:  # half of a group answers the prompt, half its twin
                    micro_prompts = [member for prompt in micro_prompts for member in (prompt, twin_of(prompt))]
                    group_size = size // 2
                part = self.sampling.rollout(micro_prompts, group_size, seeds[rows], step=step)
                parts.append(part)
                scores.append(background.submit(self.task.score, part.samples, group[rows]))
                if not settings.scores_in_background:  # scored before the next ones are sampled
                    scores[-1].result()
        batch = Rollouts.concat(parts)
        batch.group, batch.rewards = group, torch.cat([score.result() for score in scores])
        return batch


@dataclass(eq=False)
class PooledRounds(ScoredRounds):
    """Takes the groups that are finished first from a pool of partial rollouts. The pool has the same size on every
    rank; towards the end of the run it holds no more groups than will be trained on."""

    single_pending: ClassVar[bool] = True
    pool: Pool

    def draw_ahead(self) -> Draw | None:
        return None

    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        """Fills the pool with new prompts and takes this rank's share of groups from it, as many as it has prompts in a
        step. `draw` is not used."""
        share = self.draws.share
        max_groups = share + self.pool.partial.oversample // self.ranks.world
        pool_size = max(share, min(max_groups, share * (self.config.steps - step)))
        added = self.draws.draw(max(0, pool_size - len(self.pool.groups)))
        self.pool.add(added.positions, added.indices)
        if not self.steps_ahead:
            self.draws.prefetch()
        batch = self.pool.take(share, step, version)
        batch.rewards = self.task.score(batch.samples, batch.group)
        batch.accuracy = self.task.accuracy(batch.samples)
        return self.measure(batch, step)

    def state(self) -> dict[str, Any]:
        return self.pool.state()

    def load(self, state: dict[str, Any]) -> None:
        self.pool.load(state)


def one_thread(name: str) -> ThreadPoolExecutor:
    """Returns an executor with one thread whose default device is this rank's GPU; a new thread would use GPU 0."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (torch.cuda.current_device(),))
