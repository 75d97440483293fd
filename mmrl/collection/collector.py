"""Where the rollouts of each step come from: made in time, or ahead of it, or over several steps; with others added."""

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
    """Collects what a step learns from: prompts are drawn, answered, scored and measured, groups are chosen, and the
    rollouts of further sources are added."""

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
        """The rollouts of the step after `step` finished ones."""
        if self.steps_ahead:
            return self._with_extras(self._look_ahead(step, metrics), step, metrics)
        with awake(self.weights.generator) as measured:
            self.weights.version = step
            metrics.set(measured)
            return self._with_extras(self.collect(step, metrics), step, metrics)

    def _look_ahead(self, step: int, metrics: Metrics) -> Rollouts:
        """The batch that was made while earlier steps were trained. Where it was the last one of those, the generator
        is left making the next `steps_ahead` ones, with the weights of now."""
        if not self.pending:
            self.pending.begin([step], step, metrics)
        rollouts = self.collect(step, metrics)
        if not self.pending:
            last = min(step + self.steps_ahead, self.config.steps - 1)
            self.pending.begin(range(step + 1, last + 1), step, metrics)
        return rollouts

    def collect(self, step: int, metrics: Metrics) -> Rollouts:
        """A full batch of scored rollouts: this rank's share of the step's prompts, in groups.

        With dynamic sampling, groups that teach nothing are replaced by new ones; when max_rounds have not filled the
        batch, the places left are taken by such groups after all, whose advantages are 0.
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
        """The first of what the generator has been making, or a new round."""
        if self.pending:
            return self.pending.take()
        if self.steps_ahead and self.weights.lent:
            self.weights.give(step, metrics)
        return self.rounds.make(step, self.weights.version)

    def _informative(self, batch: Rollouts, filters: DynamicSampling) -> Tensor:
        """[rollout] bool: by the reward that the advantages are made of, and by the bounds of accuracy."""
        weights = torch.tensor(self.task.reward_weights)
        varied = self.config.algorithm.informative(batch, weights, list(self.task.reward_names))
        accuracy = require(batch.accuracy, "accuracy")
        return varied & groups_within(accuracy, batch.group, low=filters.low, high=filters.high)

    def _with_extras(self, fresh: Rollouts, step: int, metrics: Metrics) -> Rollouts:
        """The step's rollouts with those of further sources behind them."""
        if fresh.version is not None:
            metrics.add("generation/staleness", step - fresh.version)
        return self.extras.joined(fresh)

    def observe(self, batch: Batch) -> None:
        """Tells the sampler of prompts what became of a step's fresh rollouts, and further sources of all of them."""
        if batch.rollouts.rewards is None:
            return
        self.draws.observe(outcomes(batch))
        self.extras.observe(batch)

    # --- between steps ---

    def lend_generator(self) -> None:
        """For something else than training, such as evaluation, which gives it other weights. Waits until what it makes
        ahead of time is made: it has one set of weights at a time."""
        self.pending.wait()
        self.weights.lent = True

    def give_up(self) -> None:
        """Batches ahead of time that have not begun do not begin any more."""
        before = self.pending.give_up()
        if before is not None:
            self._load(*before)

    def close(self) -> None:
        self.draws.close()

    def state(self) -> State:
        """From which `load` goes on, so that nothing is lost: where drawing has to go on, equal on all ranks, and what
        this rank has in the making."""
        shared, own = self.pending.state()
        # Extras have no part in what is in the making
        return shared | {"extras": self.extras.state()}, {"rounds": own, "extras": self.extras.own_state()}

    def load(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        self._load(shared, own["rounds"])
        self.extras.load(shared["extras"])
        self.extras.load_own(own["extras"])

    def _load(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        self.draws.load(shared)
        self.rounds.load(own)


def outcomes(batch: Batch) -> list[Outcome]:
    """What became of the fresh groups of all ranks, in the order of their draw."""
    names = ("group", "origin", "prompt", "accuracy")
    columns = [batch.fact(name).tolist() for name in names]
    rows = sorted(zip(*columns, batch.combined().tolist(), strict=True), key=itemgetter(0))
    fresh = (row for row in rows if row[1] == FRESH)
    groups = [list(group) for _, group in groupby(fresh, itemgetter(0))]
    return [Outcome(group[0][2], tuple(row[4] for row in group), tuple(row[3] for row in group)) for group in groups]


def awake(generator: SyncedGenerator | None) -> AbstractContextManager[dict[str, float]]:
    """Inside it an engine that generates for the policy has its present weights."""
    return nullcontext({}) if generator is None else generator.generation()


def sampled_by(policy: Policy, generator: SyncedGenerator | None) -> RolloutSource:
    """Who is asked for rollouts and answers: the policy, which may have tokens from engines, or workers for it."""
    return generator if isinstance(generator, RolloutSource) else policy
