"""The collector of a step's rollouts: sampled in the step, ahead of it, or over several steps, with those of extra
sources."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from operator import itemgetter
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
from mmrl.core.filters import groups_within
from mmrl.engine import Ranks
from mmrl.prompts.sampler import Outcome
from mmrl.protocols.batch import Batch
from mmrl.protocols.job import JobConfig
from mmrl.protocols.parts import Policy, RolloutSource, Source, SyncedGenerator, Task
from mmrl.rollouts import FRESH, Rollouts, require
from mmrl.training.metrics import Metrics


class Collector:
    """Collects a step's rollouts: draws prompts, samples and scores responses, takes measurements, selects groups, and
    adds the rollouts of extra sources."""

    def __init__(
        self, config: JobConfig, policy: Policy, task: Task, ranks: Ranks, generator: SyncedGenerator | None
    ) -> None:
        source: Source = require(task.train, "the task's training prompts")
        self.config, self.task, self.ranks = config, task, ranks
        self.sampling = sampled_by(policy, generator)
        self.draws = PromptDraws(config.rollout, source, config.seed, policy, ranks)
        context = SourceContext(policy, self.draws.source, task, config.seed, (ranks.rank, ranks.world), ranks.max)
        self.extras = ExtraRolloutSources(config.rollout.extra_sources, context)
        self.rounds = self._rounds(policy)
        self.weights = GeneratorWeights(generator)
        self.pending = PendingBatches(self.rounds, self.draws, self.weights)
        self.steps_ahead = 0 if config.generator is None else config.generator.steps_ahead

    def _rounds(self, policy: Policy) -> Rounds:
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
            return self._with_extras(self._take_ahead(step, metrics), step, metrics)
        with synced(self.weights.generator) as measured:
            self.weights.version = step
            metrics.set(measured)
            return self._with_extras(self.collect(step, metrics), step, metrics)

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
        """Returns a full batch of scored rollouts: this rank's share of the step's prompts, in groups.

        With dynamic sampling, uninformative groups are replaced by new ones. When max_rounds have not filled the batch,
        it is filled up with uninformative groups, whose advantages are 0.
        """
        filters = self.config.rollout.filters
        if filters is None:
            return self._round(step, metrics)
        candidates = Candidates(self.draws.share, self.ranks, shared=filters.shared)
        for _ in range(filters.max_rounds):
            batch = self._round(step, metrics)
            informative = self._informative(batch, filters)
            metrics.add("dynamic_sampling/kept", informative.float())
            candidates.add(batch, informative)
            if candidates.full:
                break
        return candidates.taken()

    def _round(self, step: int, metrics: Metrics) -> Rollouts:
        """Returns the first pending batch, or a new round."""
        if self.pending:
            return self.pending.take()
        if self.steps_ahead and self.weights.stale:
            self.weights.give(step, metrics)
        return self.rounds.make(step, self.weights.version)

    def _informative(self, batch: Rollouts, filters: DynamicSampling) -> Tensor:
        """Returns whether each rollout's group is informative, [rollout] bool: its rewards differ, and its accuracy is
        within the bounds."""
        weights = torch.tensor(self.task.reward_weights)
        varied = self.config.algorithm.informative(batch, weights, list(self.task.reward_names))
        accuracy = require(batch.accuracy, "accuracy")
        return varied & groups_within(accuracy, batch.group, low=filters.low, high=filters.high)

    def _with_extras(self, fresh: Rollouts, step: int, metrics: Metrics) -> Rollouts:
        """Returns the step's rollouts, followed by those of extra sources."""
        if fresh.version is not None:
            metrics.add("generation/staleness", step - fresh.version)
        return self.extras.joined(fresh)

    def observe(self, batch: Batch) -> None:
        """Passes the outcomes of a step's fresh rollouts to the prompt sampler, and the whole batch to the extra
        sources."""
        if batch.rollouts.rewards is None:
            return
        self.draws.observe(outcomes(batch))
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


def outcomes(batch: Batch) -> list[Outcome]:
    """Returns the outcomes of the fresh groups of all ranks, in the order of their draw."""
    names = ("group", "origin", "prompt", "accuracy")
    columns = [batch.fact(name).tolist() for name in names]
    rows = sorted(zip(*columns, batch.combined().tolist(), strict=True), key=itemgetter(0))
    fresh = (row for row in rows if row[1] == FRESH)
    groups = [list(group) for _, group in groupby(fresh, itemgetter(0))]
    return [Outcome(group[0][2], tuple(row[4] for row in group), tuple(row[3] for row in group)) for group in groups]


def synced(generator: SyncedGenerator | None) -> AbstractContextManager[dict[str, float]]:
    """Returns a context in which the generator, if there is one, has the policy's present weights."""
    return nullcontext({}) if generator is None else generator.generation()


def sampled_by(policy: Policy, generator: SyncedGenerator | None) -> RolloutSource:
    """Returns the source of rollouts: the policy, which may generate through engines, or the generator where it makes
    whole rollouts."""
    return generator if isinstance(generator, RolloutSource) else policy
