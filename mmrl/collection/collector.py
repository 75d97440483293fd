"""Where the rollouts of each step come from: made in time, or ahead of it, or over several steps; with others added."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.collection.dynamic_sampling import Rounds
from mmrl.collection.extra_sources import SourceContext
from mmrl.collection.partial_rollouts import Pool
from mmrl.collection.prefetch import ReadAhead
from mmrl.collection.segment_values import continued
from mmrl.collection.settings import Independent
from mmrl.core.advantages import combined_reward
from mmrl.core.filters import groups_within
from mmrl.engine import Ranks
from mmrl.errors import UserError
from mmrl.prompts.sampler import Outcome
from mmrl.protocols.batch import Batch
from mmrl.protocols.job import JobConfig
from mmrl.protocols.parts import (
    Completing,
    Continuing,
    Encoding,
    Policy,
    ReadableSource,
    RolloutSource,
    Source,
    SyncedGenerator,
    Task,
)
from mmrl.rewards.twins import twin_of
from mmrl.rollouts import FRESH, Column, DecisionColumn, Rollouts, Texts, alike
from mmrl.runtime.seeds import rollout_seeds
from mmrl.training.metrics import Metrics

Drawn = tuple[list[int], list[int]]  # places of a draw of prompts, and their indices


class Batches:
    def __init__(
        self, config: JobConfig, policy: Policy, task: Task, ranks: Ranks, generator: SyncedGenerator | None
    ) -> None:
        assert task.train is not None
        self.config, self.policy, self.task, self.ranks, self.generator = config, policy, task, ranks, generator
        self.sampling = sampled_by(policy, generator)
        self.rollout = config.rollout
        self.reader = reader_of(task.train, policy)
        self.source: Source = task.train if self.reader is None else self.reader
        self.share = config.rollout.prompts // ranks.world  # prompts of a rank in a step
        # Copies, for a default is shared by all configurations of the process.
        self.sampler = config.rollout.sampler.model_copy(deep=True)
        self.sampler.look(self.source)
        self.sampler.start(len(self.source), config.seed)
        self.extras = [extra.model_copy(deep=True) for extra in self.rollout.extra_sources]
        for extra in self.extras:
            share = (ranks.rank, ranks.world)
            extra.start(SourceContext(policy, self.source, task, config.seed, share, ranks.max))
        self.drawn = 0  # prompts drawn so far, over all ranks
        self.version = 0  # finished steps behind the weights that the generator has
        settings = config.generator
        self.steps_ahead = 0 if settings is None else settings.steps_ahead
        partial = None if settings is None else settings.unfinished
        self.oversample = 0 if partial is None else partial.oversample
        self.pool: Pool | None = None
        if partial is not None:
            assert isinstance(self.rollout, Independent)
            self.pool = Pool(policy, self.source, config.seed, self.rollout, partial)  # type: ignore[arg-type]
        self.pending: deque[PendingBatch] = deque()  # what the generator makes ahead of time, the next one first
        self.lent = False  # whether the generator may have weights that are not those of `version`

    def next(self, step: int, metrics: Metrics) -> Rollouts:
        """Of the step after `step` finished ones."""
        if self.steps_ahead:
            return self._with_extras(self._look_ahead(step, metrics), step, metrics)
        with awake(self.generator) as measured:
            self.version = step
            metrics.set(measured)
            return self._with_extras(self.collect(step, metrics), step, metrics)

    def observe(self, batch: Batch) -> None:
        """Tells the sampler of prompts what became of a step's fresh rollouts, and further sources of all of them."""
        if batch.rollouts.rewards is None:
            return
        columns = [batch.fact(name).tolist() for name in ("group", "prompt", "accuracy", "origin")]
        rows = sorted(zip(columns[0], columns[1], batch.combined().tolist(), *columns[2:], strict=True), key=_position)
        groups: dict[int, list[tuple[Any, ...]]] = {}
        for row in rows:
            if row[4] == FRESH:
                groups.setdefault(row[0], []).append(row)
        self.sampler.observe(
            [Outcome(g[0][1], tuple(r[2] for r in g), tuple(r[3] for r in g)) for g in groups.values()]
        )
        for extra in self.extras:
            extra.observe(batch)

    def close(self) -> None:
        """Ends what reads ahead."""
        if self.reader is not None:
            self.reader.close()

    def lend_generator(self) -> None:
        """For something else than training, such as evaluation, which gives it other weights. Waits until what it makes
        ahead of time is made: it has one set of weights at a time."""
        wait([pending.rollouts for pending in self.pending])
        self.lent = True

    def give_up(self) -> None:
        """Batches ahead of time that have not begun do not begin any more; their prompts are drawn again, should
        training go on. A pool has one batch at most in the making, which has."""
        if self.pool is not None or not self.pending:
            return
        state = self.state()
        for pending in self.pending:
            pending.rollouts.cancel()
        self.pending.clear()
        self.load(*state)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """From which `load` goes on, so that nothing is lost: where drawing has to go on, equal on all ranks, and what
        this rank has in the making. A round that has begun is made again."""
        if not self.pending:
            return self._state()
        shared, own = self.pending[0].before
        return shared | {"extras": self._states_of_extras()}, own  # which have no part in what is in the making

    def _states_of_extras(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(extra.state()) for extra in self.extras]

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        shared = {
            "drawn": self.drawn,
            "sampler": copy.deepcopy(self.sampler.state()),
            "extras": self._states_of_extras(),
        }
        return shared, {} if self.pool is None else self.pool.state()

    def load(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        self.drawn = shared["drawn"]
        self.sampler.load(shared["sampler"])
        for extra, kept in zip(self.extras, shared["extras"], strict=True):
            extra.load(kept)
        if self.pool is not None:
            self.pool.load(own)

    def _look_ahead(self, step: int, metrics: Metrics) -> Rollouts:
        """The batch that was made while earlier steps were trained. Where it was the last one of those, the generator
        is left making the next `steps_ahead` ones, with the weights of now."""
        if not self.pending:
            self._begin([step], step, metrics)
        rollouts = self.collect(step, metrics)
        if not self.pending:
            last = min(step + self.steps_ahead, self.config.steps - 1)
            self._begin(range(step + 1, last + 1), step, metrics)
        return rollouts

    def _begin(self, steps: Sequence[int], version: int, metrics: Metrics) -> None:
        """Batches for these steps, one after the other. Their prompts are drawn now, so that they do not depend on when
        a batch is begun; only those of a pool follow from what it still has in the making then."""
        if not steps:
            return
        self._give_weights(version, metrics)
        thread = one_thread("rollouts")
        drawn = [(self._state(), None if self.pool is not None else self._draw(self.share)) for _ in steps]
        self._foresee(*(draw for _, draw in drawn))
        for step, (before, draw) in zip(steps, drawn, strict=True):
            self.pending.append(PendingBatch(before, thread.submit(self.sample_round, step, draw)))
        thread.shutdown(wait=False)

    def _give_weights(self, version: int, metrics: Metrics) -> None:
        """Gives the generator the weights of now, which are those after `version` steps. A collective."""
        assert self.generator is not None
        metrics.set(self.generator.synchronise())
        self.version, self.lent = version, False

    def _round(self, step: int, metrics: Metrics) -> Rollouts:
        """The first of what the generator has been making, or a new round."""
        if self.pending:
            return self.pending.popleft().rollouts.result()
        if self.steps_ahead and self.lent:
            self._give_weights(step, metrics)
        return self.sample_round(step)

    def collect(self, step: int, metrics: Metrics) -> Rollouts:
        """A full batch of scored rollouts: this rank's share of the step's prompts, in groups.

        With dynamic sampling, groups that teach nothing are replaced by new ones; when max_rounds have not filled the
        batch, the places left are taken by such groups after all, whose advantages are 0.
        """
        filters = self.rollout.filters
        if filters is None:
            return self._round(step, metrics)
        rounds = Rounds(self.share, self.ranks, shared=filters.shared)
        for _ in range(filters.max_rounds):
            batch = self._round(step, metrics)
            informative = self._informative(batch)
            metrics.add("dynamic_sampling/kept", informative.float())
            rounds.add(batch, informative)
            if rounds.full:
                break
        return rounds.taken()

    def _informative(self, batch: Rollouts) -> Tensor:
        """[rollout] bool: by the reward that the advantages are made of, and by the bounds of accuracy."""
        filters, task = self.rollout.filters, self.task
        assert filters is not None and batch.accuracy is not None
        weights = torch.tensor(task.reward_weights)
        varied = self.config.algorithm.informative(batch, weights, list(task.reward_names))
        return varied & groups_within(batch.accuracy, batch.group, low=filters.low, high=filters.high)

    def sample_round(self, step: int, drawn: Drawn | None = None) -> Rollouts:
        """One round of rollouts for this rank's share of the next prompts, or for those that were drawn, scored. step:
        what they are for."""
        if self.pool is not None:
            return self._drawn_from_pool(self.pool, step, self.share)
        positions, indices = self._draw(self.share) if drawn is None else drawn
        prompts = [self.source[i] for i in indices]
        if drawn is None:
            self._foresee()
        size = self.config.group_size
        seeds = rollout_seeds(self.config.seed, positions, size)
        group = torch.tensor(positions).repeat_interleave(size)
        if self.config.algorithm.collects == "demonstrations":
            shared = [seed for seed in seeds[::size] for _ in range(size)]  # what is compared is drawn alike
            batch = self.policy.demonstrate(self.config.algorithm.shown(prompts), shared)
            batch.group = group
            return batch
        at_once = max(1, (self.rollout.generated_at_once or len(group)) // size)
        parts, scores = [], []
        with one_thread("rewards") as background:
            for i in range(0, len(prompts), at_once):
                rows = slice(i * size, (i + at_once) * size)
                asked, each = prompts[i : i + at_once], size
                if self.rollout.paired:
                    asked, each = [one for prompt in asked for one in (prompt, twin_of(prompt))], size // 2
                part = self.sampling.rollout(asked, each, seeds[rows], step=step)
                parts.append(part)
                scores.append(background.submit(self.task.score, part.samples, group[rows]))
                if not self.rollout.scores_in_background:
                    scores[-1].result()
        batch = Rollouts.concat(parts)
        batch.group, batch.prompt = group, torch.tensor(indices).repeat_interleave(size)
        batch.rewards = torch.cat([score.result() for score in scores])
        batch.accuracy = self.task.accuracy(batch.samples)
        if self.steps_ahead:
            batch.version = torch.full_like(group, self.version)
        self._ask_more(batch, step)
        self._complete(batch)
        self._continue(batch)
        return batch

    def _draw(self, share: int) -> Drawn:
        """This rank's share of the next prompts, as many on every rank: the places of their draw, and their indices."""
        first, count = self.drawn, share * self.ranks.world
        indices = self.sampler.draw(count)
        self.drawn += count
        return self._own(range(first, first + count)), self._own(indices)

    def _own(self, drawn: Sequence[int]) -> list[int]:
        """This rank's share of a draw, or of several draws after another."""
        share = len(drawn) // self.ranks.world
        return list(drawn[self.ranks.rank * share : (self.ranks.rank + 1) * share])

    def _foresee(self, *known: Drawn | None) -> None:
        """Has prompts read that were drawn, and those that would be drawn next. A sampler may change its mind in
        between, by what it observes; then those are read for nothing."""
        if self.reader is not None:
            drawn = [index for draw in known if draw is not None for index in draw[1]]
            sampler = self.sampler.model_copy(deep=True)
            self.reader.expect([*drawn, *self._own(sampler.draw(self.share * self.ranks.world))])

    def _drawn_from_pool(self, pool: Pool, step: int, share: int) -> Rollouts:
        """`sample_round` of what is finished first. Every rank has as many groups in the making; towards the end of
        the run no more than will be trained on."""
        extra = self.oversample // self.ranks.world
        room = max(share, min(share + extra, share * (self.config.steps - step)))
        pool.add(*self._draw(max(0, room - len(pool.groups))))
        if not self.steps_ahead:
            self._foresee()
        batch = pool.take(share, step, self.version)
        batch.rewards = self.task.score(batch.samples, batch.group)
        batch.accuracy = self.task.accuracy(batch.samples)
        self._ask_more(batch, step)
        return batch

    def _ask_more(self, batch: Rollouts, step: int) -> None:
        """Leaves in `extras` what parts need of further responses to the rollouts' prompts: the rewards of a greedy
        one, and how often those under a view are right."""
        needs, size = self.config.needs, self.config.group_size
        if not needs.greedy and not needs.answered_under:
            return
        groups, member = batch.group.unique(return_inverse=True)
        first = [int((member == g).nonzero()[0]) for g in range(len(groups))]
        prompts = [batch.samples[row].prompt for row in first]
        if needs.greedy:
            answers = self.sampling.respond(prompts, [0] * len(prompts))
            batch.extras["greedy"] = Column(self.task.score(answers, torch.arange(len(prompts)))[member])
        seeds = rollout_seeds(self.config.seed, groups.tolist(), size)
        for view in needs.answered_under:
            changed = [view.change(prompt) for prompt in prompts]
            samples = self.sampling.rollout(changed, size, seeds, step=step).samples
            right = self.task.accuracy(samples)
            batch.extras[f"answered {view.name}"] = Column(right.view(-1, size).nanmean(1)[member])
            said = [[sample.response for sample in samples[g * size : (g + 1) * size]] for g in range(len(groups))]
            batch.extras[f"said {view.name}"] = Texts([said[g] for g in member.tolist()])

    def _complete(self, batch: Rollouts) -> None:
        """Leaves the rewards of what the states of chains lead to in `extras`, where a part needs them."""
        needs = self.config.needs
        if not (needs.completions or needs.outcomes):
            return
        assert isinstance(self.policy, Completing) and batch.rewards is not None
        weights, count = torch.tensor(self.task.reward_weights), batch.mask.shape[1]
        if needs.outcomes:
            ends = self.policy.complete_steps(batch, ends=True)
            behind = combined_reward(self.task.score(ends, batch.group.repeat_interleave(count)), weights)
            batch.extras["outcomes"] = Column(behind.view(-1, count))
        if not needs.completions:
            return
        made = self.policy.complete_steps(batch)
        before = combined_reward(self.task.score(made, batch.group.repeat_interleave(count)), weights)
        after = combined_reward(batch.rewards, weights)
        batch.extras["completions"] = Column(torch.cat([before.view(-1, count), after[:, None]], 1))

    def _continue(self, batch: Rollouts) -> None:
        """Leaves what segments of responses add to the expected reward in `extras`, where a part asks for that."""
        for asked in self.config.needs.continuations:
            assert isinstance(self.policy, Continuing)
            made = continued(self.policy, self.task, batch, asked, self.config.seed, self.ranks.max)
            batch.extras[asked.name] = DecisionColumn(made)

    def _with_extras(self, fresh: Rollouts, step: int, metrics: Metrics) -> Rollouts:
        """The step's rollouts with those of further sources behind them."""
        if fresh.version is not None:
            metrics.add("generation/staleness", step - fresh.version)
        if not self.extras:
            return fresh
        fresh.origin = torch.full((len(fresh),), FRESH)
        added = [alike(extra.make(fresh), fresh) for extra in self.extras]
        if fresh.filler is not None:  # a group may teach something, now that it holds more
            joined = torch.cat([part.group for part in added])
            fresh = replace(fresh, filler=fresh.filler & ~torch.isin(fresh.group, joined))
        if any(part.old_logp is not None for part in added):
            fresh = replace(fresh, old_logp=torch.full(fresh.mask.shape, torch.nan))
            added = [alike(part, fresh) for part in added]
        return Rollouts.concat([fresh, *added])


@dataclass(frozen=True)
class PendingBatch:
    """Rollouts in the making, in a thread. before: what `Batches.state` was: nothing is lost if they are made again."""

    before: tuple[dict[str, Any], dict[str, Any]]
    rollouts: Future[Rollouts]


def awake(generator: SyncedGenerator | None) -> AbstractContextManager[dict[str, float]]:
    """Inside it an engine that generates for the policy has its present weights."""
    return nullcontext({}) if generator is None else generator.generation()


def sampled_by(policy: Policy, generator: SyncedGenerator | None) -> RolloutSource:
    """Who is asked for rollouts and answers: the policy, which may have tokens from engines, or workers for it."""
    return generator if isinstance(generator, RolloutSource) else policy


def reader_of(source: Source, policy: Policy) -> ReadAhead | None:
    """What reads ahead where the source asks for that; the policy learns of it."""
    if not isinstance(source, ReadableSource) or source.readers == 0:
        return None
    if not isinstance(policy, Encoding):
        return ReadAhead(source, None)
    policy.reader = found = ReadAhead(source, policy.encoder())
    return found


def one_thread(name: str) -> ThreadPoolExecutor:
    """A pool of one thread that computes on this rank's GPU: a new thread would begin with the machine's first one."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, name)
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (torch.cuda.current_device(),))


def _position(row: tuple[Any, ...]) -> int:
    return row[0]


def prompts_at_once(config: JobConfig, world: int) -> int:
    """Of which a rank asks for rollouts together."""
    share, most = config.rollout.prompts // world, config.rollout.generated_at_once
    return share if most is None else min(share, max(1, most // config.group_size))


def check_batch(config: JobConfig, world: int) -> None:
    """Raises UserError where the batch can not be divided as asked."""
    rollout, minibatches = config.rollout, config.algorithm.minibatches
    shared = {"rollout.prompts": rollout.prompts}
    if config.generator is not None and config.generator.unfinished is not None:
        shared["rollout.generator.partial.oversample"] = config.generator.unfinished.oversample
    shared |= {f"rollout.extras.{i}": extra.rollouts for i, extra in enumerate(rollout.extra_sources)}
    for key, count in shared.items():
        if count % world:
            raise UserError(f"{key}={count} can not be shared by {world} ranks; make it a multiple")
    workers = vars(rollout).get("workers")
    if workers is not None and workers.count > (most := prompts_at_once(config, world)):
        raise UserError(
            f"rollout.workers.count={workers.count} is more than the {most} prompts that a rank samples at once "
            "(rollout.prompts / ranks, rollout.micro_batch / group_size); lower it"
        )
    if rollout.paired and config.generator is not None and config.generator.unfinished is not None:
        raise UserError("rollout.generator.partial draws groups of one prompt; set rollout.twins=false")
    mine = config.rollouts_per_step // world
    if mine % minibatches:
        raise UserError(
            f"{mine} rollouts a rank (rollout.prompts x group_size / ranks) can not be cut into "
            f"algorithm.minibatches={minibatches} equal parts"
        )
    if config.needs.whole_groups and vars(config.engine).get("micro_tokens") is not None:
        raise UserError(
            f"engine.micro_tokens cuts groups, which algorithm.type={config.algorithm.type} needs whole; set it to null"
        )
    largest = config.group_size + sum(extra.in_group for extra in rollout.extra_sources)
    if config.needs.whole_groups and largest > config.engine.micro_batch:
        raise UserError(
            f"engine.micro_batch={config.engine.micro_batch} cuts groups of {largest}, which "
            f"algorithm.type={config.algorithm.type} needs whole; raise it"
        )
