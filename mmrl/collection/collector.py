"""The collector of a step's rollouts: sampled in the step, ahead of it, or over several steps, with those of extra
sources."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.collection.draws import PromptDraws
from mmrl.collection.dynamic_sampling import Candidates
from mmrl.collection.extra_sources import ExtraRolloutSources, SourceContext
from mmrl.collection.partial_rollouts import Pool
from mmrl.collection.pending_batches import GeneratorWeights, PendingBatches, State
from mmrl.collection.rounds import DemonstratedRounds, PooledRounds, Rounds, SampledRounds
from mmrl.collection.settings import DynamicSampling
from mmrl.core.advantages import combined_reward
from mmrl.core.filters import groups_in_range
from mmrl.engine import Ranks
from mmrl.prompts.sampler import Outcome
from mmrl.protocols.batch import Batch
from mmrl.protocols.job import JobConfig
from mmrl.protocols.parts import Policy, RolloutSource, Source, SyncedGenerator, Task, demonstrations_of
from mmrl.rollouts import FRESH, Rollouts, require
from mmrl.training.metrics import Metrics


class Collector:
    """Collects a step's rollouts: draws prompts, samples and scores responses, takes measurements, selects groups, and
    adds the rollouts of extra sources."""

    def __init__(
        self, config: JobConfig, policy: Policy, task: Task, ranks: Ranks, generator: SyncedGenerator | None
    ) -> None:
        source: Source = require(task.train, "the task's training prompts")
        if config.algorithm.collects == "demonstrations":
            source = demonstrations_of(task, source)
        self.config, self.task, self.ranks = config, task, ranks
        self.sampling = sampled_by(policy, generator)
        self.draws = PromptDraws(config.rollout, source, config.seed, policy, ranks)
        context = SourceContext(
            policy,
            self.draws.source,
            task,
            config.seed,
            (ranks.rank, ranks.world),
            ranks.max,
            Path(config.run_dir),
            config.checkpoint.keep,
        )
        self.extras = ExtraRolloutSources(config.rollout.extra_sources, context)
        self.rounds = self._rounds(policy)
        self.weights = GeneratorWeights(generator)
        self.pending = PendingBatches(self.rounds, self.draws, self.weights)
        self.steps_ahead = 0 if config.generator is None else config.generator.steps_ahead

    def _rounds(self, policy: Policy) -> Rounds:
        """Returns how a step's rollouts are collected: demonstrations, whole responses, or responses that may stay
        unfinished over steps (partial rollouts)."""
        config, draws = self.config, self.draws
        if config.algorithm.collects == "demonstrations":
            return DemonstratedRounds(config, draws, policy)
        parts = policy, self.sampling, self.task, self.ranks
        partial = None if config.generator is None else config.generator.unfinished
        if partial is None:
            return SampledRounds(config, draws, *parts)
        pool = Pool(policy, draws.source, config.seed, config.group_size, partial)
        return PooledRounds(config, draws, *parts, pool=pool)

    # --- a step ---

    def next(self, step: int, metrics: Metrics) -> Rollouts:
        """Returns the rollouts of the next step. step: number of finished steps."""
        if self.steps_ahead:
            return self._take_ahead(step, metrics)
        with synced(self.weights.generator) as measured:
            self.weights.version = step
            metrics.set(measured)
            return self.collect(step, metrics)

    def _take_ahead(self, step: int, metrics: Metrics) -> Rollouts:
        """Returns the batch that was sampled while earlier steps were trained. After the last one, the generator starts
        on the next `steps_ahead` batches with the present weights."""
        if not self.pending:
            self.pending.begin([step], step, metrics)
        rollouts = self.collect(step, metrics)
        if not self.pending:
            last = min(step + self.steps_ahead, self.config.steps - 1)
            self.pending.begin(range(step + 1, last + 1), step, metrics)
        return rollouts

    def collect(self, step: int, metrics: Metrics) -> Rollouts:
        """Returns a full batch of scored rollouts: this rank's share of the step's prompts, in groups, and the rollouts
        of extra sources.

        With dynamic sampling, uninformative groups are replaced by new ones. Those that extra sources could rescue are
        judged with what joined them. When max_rounds have not filled the batch, it is filled up with uninformative
        groups, whose advantages are 0.
        """
        filters = self.config.rollout.filters
        if filters is None:
            fresh = self._round(step, metrics)
            self._add_staleness(fresh, step, metrics)
            return self.extras.joined(fresh)
        candidates = Candidates(self.draws.share, self.ranks, shared=filters.shared)
        for _ in range(filters.max_rounds):
            fresh = self._round(step, metrics)
            batch = self.extras.rescued(fresh)
            informative = self._informative(batch, filters)
            metrics.add("dynamic_sampling/kept", informative[: len(fresh)].float())
            candidates.add(batch, informative)
            if candidates.full:
                break
        taken = candidates.taken()
        self._add_staleness(taken, step, metrics)
        return self.extras.added(taken)

    def _round(self, step: int, metrics: Metrics) -> Rollouts:
        """Returns the first pending batch, or a new round, and passes its outcomes to the prompt sampler."""
        if self.pending:
            batch = self.pending.take()
        else:
            if self.steps_ahead and self.weights.stale:
                self.weights.give(step, metrics)
            batch = self.rounds.make(step, self.weights.version)
        if batch.rewards is not None:
            self.pending.observe(self._outcomes(batch, batch.rewards))
        return batch

    def _informative(self, batch: Rollouts, filters: DynamicSampling) -> Tensor:
        """Returns whether each rollout's group is informative, [rollout] bool: its rewards differ, or the method
        learns from others too, and its accuracy is within the bounds."""
        weights, algorithm = torch.tensor(self.task.reward_weights), self.config.algorithm
        teaches = algorithm.informative(batch, weights, list(self.task.reward_names))
        if any(shaper.learns_from_equal_rewards for shaper in algorithm.shapers):
            teaches = torch.ones_like(teaches)
        accuracy = require(batch.accuracy, "accuracy")
        return teaches & groups_in_range(accuracy, batch.group, low=filters.low, high=filters.high)

    def _outcomes(self, fresh: Rollouts, rewards: Tensor) -> list[Outcome]:
        """Returns the outcomes of a round's groups on all ranks, in the order of their draw. A collective."""
        total = combined_reward(rewards, torch.tensor(self.task.reward_weights))
        columns = fresh.group, require(fresh.prompt, "prompts"), total, require(fresh.accuracy, "accuracy")
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        every = sorted((row for part in self.ranks.gather(rows) for row in part), key=itemgetter(0))
        groups = [list(group) for _, group in groupby(every, itemgetter(0))]
        return [
            Outcome(group[0][1], tuple(row[2] for row in group), tuple(row[3] for row in group)) for group in groups
        ]

    def _add_staleness(self, rollouts: Rollouts, step: int, metrics: Metrics) -> None:
        if rollouts.version is not None:
            fresh = torch.ones_like(rollouts.group) if rollouts.origin is None else rollouts.origin == FRESH
            metrics.add("generation/staleness", step - rollouts.version, where=fresh.bool())

    def observe(self, batch: Batch) -> None:
        """Passes a step's batch to the extra sources, after its updates."""
        if batch.rollouts.rewards is not None:
            self.extras.observe(batch)

    # --- between steps ---

    def pause_prefetch(self) -> None:
        """Waits for the pending batches and marks the generator's weights as stale. To be called before something else
        than training, such as evaluation, gives the generator other weights."""
        self.pending.wait()
        self.weights.stale = True

    def give_up(self) -> None:
        """Cancels pending batches that have not begun, and resets the draws of prompts to before them."""
        before = self.pending.give_up()
        if before is not None:
            self._load(*before)

    def close(self) -> None:
        self.draws.close()

    def state(self) -> State:
        """Returns the state that `load` restores: the draws of prompts and the extra sources, equal on all ranks, and
        this rank's unfinished rollouts."""
        shared, rounds = self.pending.state()
        # Pending batches do not depend on the extra sources
        return shared | {"extras": self.extras.state()}, {"rounds": rounds, "extras": self.extras.rank_state()}

    def load(self, shared: dict[str, Any], rank_state: dict[str, Any]) -> None:
        self._load(shared, rank_state["rounds"])
        self.extras.load(shared["extras"])
        self.extras.load_rank(rank_state["extras"])

    def _load(self, shared: dict[str, Any], rank_state: dict[str, Any]) -> None:
        self.draws.load(shared)
        self.rounds.load(rank_state)


def synced(generator: SyncedGenerator | None) -> AbstractContextManager[dict[str, float]]:
    """Returns a context in which the generator, if there is one, has the policy's present weights."""
    return nullcontext({}) if generator is None else generator.generation()


def sampled_by(policy: Policy, generator: SyncedGenerator | None) -> RolloutSource:
    """Returns the source of rollouts: the policy, which may generate through engines, or the generator where it makes
    whole rollouts."""
    return generator if isinstance(generator, RolloutSource) else policy
