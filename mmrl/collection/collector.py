"""The collector of a step's rollouts. They are sampled in the step, ahead of it, or over several steps, and rollouts of
extra sources (`rollout.extras`) join them."""

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
from mmrl.protocols.parts import Policy, RolloutSource, Source, SyncedGenerator, Task, get_demonstrations
from mmrl.rollouts import FRESH, Rollouts, require
from mmrl.training.metrics import Metrics


class Collector:
    """Collects a step's rollouts: draws prompts, samples and scores responses, takes measurements, selects groups, and
    adds the rollouts of extra sources."""

    def __init__(
        self, config: JobConfig, policy: Policy, task: Task, ranks: Ranks, generator: SyncedGenerator | None
    ) -> None:
        """generator: engines or workers that sample in place of the policy; None: the policy samples itself. ranks: the
        communication between ranks."""
        source: Source = require(task.train, "the task's training prompts")
        if config.algorithm.collects == "demonstrations":
            source = get_demonstrations(task, source)
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
        """Returns the maker of rounds of rollouts: from demonstrations, by sampling whole responses, or by generating
        responses over several steps (partial rollouts)."""
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
        """Returns the batch that was sampled during earlier steps. When all batches that were sampled ahead are used
        up, starts the next `steps_ahead` ones with the current weights."""
        if not self.pending:
            self.pending.begin([step], step, metrics)
        rollouts = self.collect(step, metrics)
        if not self.pending:
            last = min(step + self.steps_ahead, self.config.steps - 1)
            self.pending.begin(range(step + 1, last + 1), step, metrics)
        return rollouts

    def collect(self, step: int, metrics: Metrics) -> Rollouts:
        """Returns this rank's scored rollouts for a step: the groups of its share of the prompts, and the rollouts of
        extra sources.

        With dynamic sampling, groups without a learning signal are replaced by new ones. Whether a group has one also
        depends on the rollouts of extra sources that join it. If the batch is not full after max_rounds, it is filled
        up with groups without signal, whose advantages are 0.
        """
        filters = self.config.rollout.filters
        if filters is None:
            fresh = self._round(step, metrics)
            self._log_staleness(fresh, step, metrics)
            return self.extras.add_all(fresh)
        candidates = Candidates(self.draws.share, self.ranks, shared=filters.shared)
        for _ in range(filters.max_rounds):
            fresh = self._round(step, metrics)
            batch = self.extras.add_to_groups(fresh)
            informative = self._informative(batch, filters)
            metrics.add("dynamic_sampling/kept", informative[: len(fresh)].float())
            candidates.add(batch, informative)
            if candidates.full:
                break
        selected = candidates.select()
        self._log_staleness(selected, step, metrics)
        return self.extras.add_separate(selected)

    def _round(self, step: int, metrics: Metrics) -> Rollouts:
        """Returns the next batch that was sampled ahead, or samples a new round. Passes its rewards to the prompt
        sampler."""
        if self.pending:
            batch = self.pending.take()
        else:
            if self.steps_ahead and self.weights.stale:
                self.weights.send(step, metrics)
            batch = self.rounds.make(step, self.weights.version)
        if batch.rewards is not None:
            self.pending.observe(self._outcomes(batch, batch.rewards))
        return batch

    def _informative(self, batch: Rollouts, filters: DynamicSampling) -> Tensor:
        """Returns whether the group of each rollout has a learning signal, [rollout] bool. It has one where its rewards
        differ, or a shaper learns from groups with equal rewards too, and its accuracy is within the bounds."""
        weights, algorithm = torch.tensor(self.task.reward_weights), self.config.algorithm
        informative = algorithm.informative(batch, weights, list(self.task.reward_names))
        if any(shaper.learns_from_equal_rewards for shaper in algorithm.shapers):
            informative = torch.ones_like(informative)
        accuracy = require(batch.accuracy, "accuracy")
        return informative & groups_in_range(accuracy, batch.group, low=filters.low, high=filters.high)

    def _outcomes(self, fresh: Rollouts, rewards: Tensor) -> list[Outcome]:
        """Returns prompt, rewards and accuracies of each group of a round, over all ranks, in the order in which
        prompts were drawn; the prompt sampler observes them. A collective."""
        total = combined_reward(rewards, torch.tensor(self.task.reward_weights))
        columns = fresh.group, require(fresh.prompt, "prompts"), total, require(fresh.accuracy, "accuracy")
        local_rows = list(zip(*(column.tolist() for column in columns), strict=True))
        # by group: its id is the position of its prompt in the order in which prompts were drawn
        rows = sorted((row for part in self.ranks.gather(local_rows) for row in part), key=itemgetter(0))
        outcomes = []
        for _, group in groupby(rows, itemgetter(0)):
            _, prompts, totals, accuracies = zip(*group, strict=True)
            outcomes.append(Outcome(prompts[0], totals, accuracies))
        return outcomes

    def _log_staleness(self, rollouts: Rollouts, step: int, metrics: Metrics) -> None:
        """Adds the metric generation/staleness: the number of steps between the weights that sampled a fresh rollout
        and the current weights."""
        if rollouts.version is not None:
            fresh = torch.ones_like(rollouts.group) if rollouts.origin is None else rollouts.origin == FRESH
            metrics.add("generation/staleness", step - rollouts.version, where=fresh.bool())

    def observe(self, batch: Batch) -> None:
        """Passes a step's batch to the extra sources, after the updates on it."""
        if batch.rollouts.rewards is not None:
            self.extras.observe(batch)

    # --- between steps ---

    def pause_prefetch(self) -> None:
        """Waits for batches that are being sampled ahead, and marks the generator's weights as stale. Must be called
        before an evaluation, which may load other weights into the generator."""
        self.pending.wait()
        self.weights.stale = True

    def cancel(self) -> None:
        """Cancels batches that have not been sampled yet, and sets the order of prompts back to before them."""
        state = self.pending.cancel()
        if state is not None:
            self._load(*state)

    def close(self) -> None:
        self.draws.close()

    def state(self) -> State:
        """Returns the state that `load` restores, in two mappings: the state that is the same on all ranks (the order
        of prompts, the extra sources), and this rank's own (unfinished rollouts, extra sources)."""
        shared, rounds = self.pending.state()
        # Batches that are sampled ahead do not depend on the extra sources, so their latest state is right.
        return shared | {"extras": self.extras.state()}, {"rounds": rounds, "extras": self.extras.rank_state()}

    def load(self, shared: dict[str, Any], rank_state: dict[str, Any]) -> None:
        self._load(shared, rank_state["rounds"])
        self.extras.load(shared["extras"])
        self.extras.load_rank(rank_state["extras"])

    def _load(self, shared: dict[str, Any], rank_state: dict[str, Any]) -> None:
        self.draws.load(shared)
        self.rounds.load(rank_state)


def synced(generator: SyncedGenerator | None) -> AbstractContextManager[dict[str, float]]:
    """Returns a context in which the generator has the policy's current weights; without one, an empty context."""
    return nullcontext({}) if generator is None else generator.generation()


def sampled_by(policy: Policy, generator: SyncedGenerator | None) -> RolloutSource:
    """Returns the sampler of rollouts: the generator if it returns whole rollouts, as workers do; otherwise the policy,
    which may use the generator to sample tokens."""
    return generator if isinstance(generator, RolloutSource) else policy
