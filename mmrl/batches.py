"""The rollouts of each step: prompts from the stream, responses, rewards; made in time, or ahead of it by engines, or
over several steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

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
        self.version = 0  # finished steps behind the weights that engines have
        self.pool = Pool(policy, self.prompts, config) if config.rollout.partial.extra else None
        self.coming: Coming | None = None  # with rollout.ahead, what engines are making
        self.filler = torch.zeros(0, dtype=torch.bool)  # [rollout] places that dynamic sampling could not fill

    def next(self, step: int, metrics: Metrics) -> Rollouts:
        """Of the step after `step` finished ones."""
        if self.config.rollout.ahead:
            rollouts = self._look_ahead(step, metrics)
        else:
            with awake(self.generator) as measured:
                self.version = step
                metrics.set(measured)
                rollouts = self.collect(step, metrics)
        if rollouts.version is not None:
            metrics.add("generation/staleness", step - rollouts.version)
        return rollouts

    def wait(self) -> None:
        """Until engines are free for something else; they have one set of weights at a time."""
        if self.coming is not None:
            wait([self.coming.rollouts])

    def untrained(self) -> tuple[int, dict[str, Any]]:
        """For a checkpoint: where the stream has to go on, and with what in the making, so that nothing is lost. A
        round that has begun is made again."""
        return self._untrained() if self.coming is None else self.coming.before

    def _untrained(self) -> tuple[int, dict[str, Any]]:
        return self.cursor, {} if self.pool is None else self.pool.state()

    def load(self, cursor: int, pool: dict[str, Any]) -> None:
        self.cursor = cursor
        if self.pool is not None:
            self.pool.load(pool)

    def _look_ahead(self, step: int, metrics: Metrics) -> Rollouts:
        """The batch that engines made while the step before was trained; leaves them making the next one, with the
        weights of now."""
        if self.coming is None:
            self._begin(step, step, metrics)
        rollouts = self.collect(step, metrics)
        if step + 1 < self.config.steps:
            self._begin(step + 1, step, metrics)
        return rollouts

    def _begin(self, step: int, version: int, metrics: Metrics) -> None:
        assert self.generator is not None
        metrics.set(self.generator.synchronise())
        self.version = version
        self.coming = Coming(self._untrained(), lambda: self.sample_round(step))

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
        """One round of rollouts for this rank's share of the next prompts, scored. step: what they are for."""
        config, share = self.config, self.config.rollout.prompts // self.engine.world
        if self.pool is not None:
            return self._drawn_from_pool(self.pool, step, share)
        positions = self._positions(share)
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
        if config.rollout.ahead:
            batch.version = torch.full_like(group, self.version)
        return batch

    def _positions(self, share: int) -> list[int]:
        """The next of the stream, as many on every rank."""
        first = self.cursor + self.engine.rank * share
        self.cursor += share * self.engine.world
        return list(range(first, first + share))

    def _drawn_from_pool(self, pool: Pool, step: int, share: int) -> Rollouts:
        """`sample_round` of what is finished first. Every rank has as many groups in the making; towards the end of
        the run no more than will be trained on."""
        extra = self.config.rollout.partial.extra // self.engine.world
        room = max(share, min(share + extra, share * (self.config.steps - step)))
        pool.add(self._positions(max(0, room - len(pool.groups))))
        batch = pool.take(share, step, self.version)
        batch.rewards = self.task.score(batch.samples, batch.group)
        batch.accuracy = self.task.accuracy(batch.samples)
        return batch


@dataclass(eq=False)
class Group:
    """Rollouts in the making. version: finished steps behind the weights that drew their first tokens, if any did."""

    position: int
    drafts: list[Any]
    version: int | None = None


class Pool:
    """More groups in the making than a step needs, so that it need not wait for the longest responses: they go on in
    the next step, with its weights, from the tokens they have (partial rollouts, arXiv 2501.12599).

    Responses grow by whole segments; a step ends after one, when it has its groups. So what it gets does not depend on
    time, and as long as weights stay the same a response does not depend on how many steps it took.
    """

    def __init__(self, policy: Any, prompts: PromptStream, config: Config) -> None:
        """policy: one that drafts, see `VisionLanguagePolicy.draft`."""
        self.policy, self.prompts, self.seed, self.rollout = policy, prompts, config.seed, config.rollout
        self.groups: list[Group] = []  # oldest first

    def add(self, positions: list[int]) -> None:
        size = self.rollout.group_size
        if positions:
            seeds = rollout_seeds(self.seed, positions, size)
            drafts = self.policy.draft([self.prompts[p] for p in positions], size, seeds)
            for i, position in enumerate(positions):
                self.groups.append(Group(position, drafts[i * size : (i + 1) * size]))

    def take(self, count: int, step: int, version: int) -> Rollouts:
        """The `count` oldest finished groups, as soon as there are as many. Waits for a group that would be older than
        rollout.max_staleness in the step after `step`. version: of the weights that engines have."""
        while not self._enough(count, step):
            for group in self.groups:
                group.version = version if group.version is None else group.version
            unfinished = [draft for group in self.groups for draft in group.drafts]
            self.policy.extend(self.policy.engine, unfinished, self.rollout.partial.segment)
        taken = [group for group in self.groups if self._finished(group)][:count]
        self.groups = [group for group in self.groups if group not in taken]
        batch = self.policy.complete([draft for group in taken for draft in group.drafts], self.rollout.group_size)
        batch.group = torch.tensor([group.position for group in taken]).repeat_interleave(self.rollout.group_size)
        batch.version = torch.tensor([group.version for group in taken]).repeat_interleave(self.rollout.group_size)
        return batch

    def _enough(self, count: int, step: int) -> bool:
        oldest = step + 1 - self.rollout.max_staleness
        late = [group for group in self.groups if group.version is not None and group.version < oldest]
        return sum(map(self._finished, self.groups)) >= count and all(map(self._finished, late))

    def _finished(self, group: Group) -> bool:
        return all(draft.finished(self.policy.eos) for draft in group.drafts)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers that `load` needs; later steps do not change them."""
        return {
            "positions": [group.position for group in self.groups],
            "versions": [group.version for group in self.groups],
            "responses": [draft.tokens.response for group in self.groups for draft in group.drafts],
            "logp": [draft.logp for group in self.groups for draft in group.drafts],
            "experts": [draft.tokens.experts for group in self.groups for draft in group.drafts],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.groups = []
        self.add(state["positions"])
        drafts = (draft for group in self.groups for draft in group.drafts)
        kept = zip(drafts, state["responses"], state["logp"], state["experts"], strict=True)
        for draft, response, logp, experts in kept:
            draft.grow(response, logp, experts)
        for group, version in zip(self.groups, state["versions"], strict=True):
            group.version = version


class Coming:
    """Rollouts in the making by engines, in a thread. before: what `Batches.untrained` was: nothing is lost if they are
    made again."""

    def __init__(self, before: tuple[int, dict[str, Any]], make: Callable[[], Rollouts]) -> None:
        self.before = before
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
