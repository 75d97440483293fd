"""The rollouts of each step: prompts from the stream, responses, rewards; made in time, or ahead of it by engines."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mmrl.config import Config
from mmrl.core.filters import keep_informative_groups
from mmrl.data import PromptStream, rollout_seeds
from mmrl.engine import Ranks
from mmrl.metrics import Metrics
from mmrl.protocols import Generator, Policy, Task
from mmrl.rollouts import Rollouts


class Batches:
    def __init__(self, config: Config, policy: Policy, task: Task, engine: Ranks, generator: Generator | None) -> None:
        self.config, self.policy, self.task, self.engine, self.generator = config, policy, task, engine, generator
        self.prompts = PromptStream(task.train, config.seed)
        self.cursor = 0  # next position of the stream
        self.coming: Coming | None = None  # with rollout.ahead, what engines are making
        self.filler = torch.zeros(0, dtype=torch.bool)  # [rollout] places that dynamic sampling could not fill

    def next(self, step: int, metrics: Metrics) -> Rollouts:
        """Of the step after `step` finished ones."""
        if self.config.rollout.ahead:
            return self._look_ahead(step, metrics)
        with awake(self.generator) as measured:
            metrics.set(measured)
            return self.collect(step, metrics)

    def wait(self) -> None:
        """Until engines are free for something else; they have one set of weights at a time."""
        if self.coming is not None:
            wait([self.coming.rollouts])

    @property
    def untrained(self) -> int:
        """Where the stream has to go on so that what is being made, and may be lost, is made again."""
        return self.cursor if self.coming is None else self.coming.cursor

    def _look_ahead(self, step: int, metrics: Metrics) -> Rollouts:
        """The batch that engines made while the step before was trained; leaves them making the next one, with the
        weights of now."""
        assert self.generator is not None
        if self.coming is None:
            self._begin(step, metrics)
        assert self.coming is not None
        made_at = self.coming.step
        rollouts = self.collect(step, metrics)
        metrics.set({"generation/staleness": float(step - made_at)})
        if step + 1 < self.config.steps:
            self._begin(step, metrics)
        return rollouts

    def _begin(self, step: int, metrics: Metrics) -> None:
        assert self.generator is not None
        metrics.set(self.generator.synchronise())
        self.coming = Coming(step, self.cursor, lambda: self.sample_round(step))

    def _round(self, step: int) -> Rollouts:
        """What engines have been making, or a new round."""
        if self.coming is None:
            return self.sample_round(step)
        batch, self.coming = self.coming.rollouts.result(), None
        return batch

    def collect(self, step: int, metrics: Metrics) -> Rollouts:
        """A full batch of scored rollouts: this rank's share of the step's prompts, in groups.

        With dynamic sampling, groups that teach nothing are replaced by new ones; when max_rounds have not filled the
        batch, the places left are taken by such groups after all, whose advantages are 0.
        """
        sampling = self.config.rollout.dynamic_sampling
        wanted = self.config.rollout.prompts // self.engine.world * self.config.group_size
        kept: list[Rollouts] = []
        spare: list[Rollouts] = []
        for _ in range(sampling.max_rounds if sampling.enabled else 1):
            batch = self._round(step)
            if self.config.algorithm.method == "supervised":
                return batch
            informative = torch.ones(len(batch), dtype=torch.bool)
            if sampling.enabled:
                assert batch.rewards is not None and batch.accuracy is not None
                scored = (
                    batch.accuracy
                    if sampling.low is not None or sampling.high is not None
                    else total_reward(batch, self.task.reward_weights)
                )
                informative, _ = keep_informative_groups(scored, batch.group, low=sampling.low, high=sampling.high)
            metrics.add("dynamic_sampling/kept", informative.float())
            kept.append(batch.select(informative))
            spare.append(batch.select(~informative))
            if self.engine.max(sum(len(part) for part in kept) < wanted) == 0:
                break
        self.filler = torch.arange(wanted) >= sum(len(part) for part in kept)
        return Rollouts.concat([*kept, *spare]).select(torch.arange(wanted))

    def sample_round(self, step: int) -> Rollouts:
        """One round of rollouts for this rank's share of the next prompts, scored."""
        config, share = self.config, self.config.rollout.prompts // self.engine.world
        first = self.cursor + self.engine.rank * share
        positions = list(range(first, first + share))
        self.cursor += config.rollout.prompts
        prompts = [self.prompts[p] for p in positions]
        seeds = rollout_seeds(config.seed, positions, config.group_size)
        group = torch.tensor(positions).repeat_interleave(config.group_size)
        if config.algorithm.method == "supervised":
            batch = self.policy.demonstrate(prompts, seeds)
            batch.group = group
            return batch
        size = max(1, (config.rollout.micro_batch or len(group)) // config.group_size)
        parts, scores = [], []
        with one_thread("rewards") as background:
            for i in range(0, len(prompts), size):
                rows = slice(i * config.group_size, (i + size) * config.group_size)
                part = self.policy.rollout(prompts[i : i + size], config.group_size, seeds[rows], step=step)
                parts.append(part)
                scores.append(background.submit(self.task.score, part.samples, group[rows]))
                if not config.rollout.score_in_background:
                    scores[-1].result()
        batch = Rollouts.concat(parts)
        batch.group = group
        batch.rewards = torch.cat([score.result() for score in scores])
        batch.accuracy = self.task.accuracy(batch.samples)
        return batch


class Coming:
    """Rollouts in the making by engines, in a thread. step: finished steps behind the weights they are made with.
    cursor: where the prompt stream stood: nothing is lost if they are made again."""

    def __init__(self, step: int, cursor: int, make: Callable[[], Rollouts]) -> None:
        self.step, self.cursor = step, cursor
        thread = one_thread("rollouts")
        self.rollouts = thread.submit(make)
        thread.shutdown(wait=False)


def awake(generator: Generator | None) -> AbstractContextManager[dict[str, float]]:
    """Inside it an engine that generates for the policy has its present weights."""
    return nullcontext({}) if generator is None else generator.generation()


def one_thread(name: str) -> ThreadPoolExecutor:
    """On this rank's GPU: a new thread would begin with the first one of the machine."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (torch.cuda.current_device(),))


def total_reward(batch: Rollouts, weights: list[float]) -> Tensor:
    """[rollout] the weighted sum of the components that weigh anything; NaN where one of those is."""
    assert batch.rewards is not None
    weight = torch.tensor(weights)
    return (batch.rewards * weight)[:, weight != 0].sum(1)
