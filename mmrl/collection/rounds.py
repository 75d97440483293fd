"""One round of rollouts, however it is made: demonstrated, sampled, or taken from what is in the making."""

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
    """Makes the rollouts of this rank's share of prompts, scored and measured, in whole groups.

    one_at_once: whether one at most is in the making."""

    one_at_once: ClassVar[bool] = False
    config: JobConfig
    draws: PromptDraws

    def ahead(self) -> Draw | None:
        """A draw for a round that is made later, so that it does not depend on when that is; None: the round draws
        itself, by what it has in the making then."""
        return self.draws.draw()

    @abstractmethod
    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        """A round for the step after `step` finished ones. version: finished steps behind the weights of the generator.
        draw: of `ahead`; None: the next prompts."""

    def state(self) -> dict[str, Any]:
        """What this rank has in the making: tensors and numbers that `load` needs; later steps do not change them."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027  (most have nothing in the making)
        """Goes on from a `state`."""

    def drawn(self, draw: Draw | None) -> tuple[Draw, list[Prompt]]:
        """The given draw; or the next one, after whose prompts those of the one behind it are read ahead."""
        chosen = self.draws.draw() if draw is None else draw
        prompts = self.draws.prompts(chosen)
        if draw is None:
            self.draws.foresee()
        return chosen, prompts


@dataclass(eq=False)
class DemonstratedRounds(Rounds):
    """Known answers to prompts, without rewards."""

    policy: Policy

    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        size, (draw, prompts) = self.config.group_size, self.drawn(draw)
        seeds = rollout_seeds(self.config.seed, draw.positions, size)
        shared = [seed for seed in seeds[::size] for _ in range(size)]  # what is compared is drawn alike
        batch = self.policy.demonstrate(self.config.algorithm.shown(prompts), shared)
        batch.group = torch.tensor(draw.positions).repeat_interleave(size)
        return batch


@dataclass(eq=False)
class ScoredRounds(Rounds):
    """Rollouts of the policy, which the task scores. sampling: who is asked for rollouts."""

    policy: Policy
    sampling: RolloutSource
    task: Task
    ranks: Ranks

    @property
    def steps_ahead(self) -> int:
        return 0 if self.config.generator is None else self.config.generator.steps_ahead

    def measure(self, batch: Rollouts, step: int) -> Rollouts:
        """The round with all that methods want to know of it beside its rewards."""
        config = self.config
        context = CollectedContext(
            self.policy, self.task, config.seed, step, config.group_size, self.ranks.max, self.sampling
        )
        for measurement in config.needs.collected:
            batch.extras[measurement.name] = measurement.measure(batch, context)
        return batch


class SampledRounds(ScoredRounds):
    """Rollouts that are sampled at once, or some at a time, each lot scored while the next one is made."""

    def make(self, step: int, version: int, draw: Draw | None = None) -> Rollouts:
        size, (draw, prompts) = self.config.group_size, self.drawn(draw)
        batch = self.sampled(prompts, draw.positions, step)
        batch.prompt = torch.tensor(draw.indices).repeat_interleave(size)
        batch.accuracy = self.task.accuracy(batch.samples)
        if self.steps_ahead:
            batch.version = torch.full_like(batch.group, version)
        return self.measure(batch, step)

    def sampled(self, prompts: list[Prompt], positions: list[int], step: int) -> Rollouts:
        """Groups of rollouts, with rewards."""
        settings, size = self.config.rollout, self.config.group_size
        seeds = rollout_seeds(self.config.seed, positions, size)
        group = torch.tensor(positions).repeat_interleave(size)
        at_once = max(1, (settings.generated_at_once or len(group)) // size)
        parts, scores = [], []
        with one_thread("rewards") as background:
            for i in range(0, len(prompts), at_once):
                rows = slice(i * size, (i + at_once) * size)
                asked, each = prompts[i : i + at_once], size
                if settings.paired:
                    asked, each = [one for prompt in asked for one in (prompt, twin_of(prompt))], size // 2
                part = self.sampling.rollout(asked, each, seeds[rows], step=step)
                parts.append(part)
                scores.append(background.submit(self.task.score, part.samples, group[rows]))
                if not settings.scores_in_background:
                    scores[-1].result()
        batch = Rollouts.concat(parts)
        batch.group, batch.rewards = group, torch.cat([score.result() for score in scores])
        return batch


@dataclass(eq=False)
class PooledRounds(ScoredRounds):
    """What is finished first of more groups in the making than a step needs. Every rank has as many of them; towards
    the end of the run no more than will be trained on."""

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
    """A pool of one thread that computes on this rank's GPU: a new thread would begin with the machine's first one."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (torch.cuda.current_device(),))
