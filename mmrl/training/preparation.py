"""Preparation of a step's rollouts before its first update: log-probabilities under other policies, advantages, and
masks of decisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mmrl.core.filters import whole_groups
from mmrl.core.partition import partition, sort_by_length, split_by_tokens, split_to_count
from mmrl.engine import EMA, Engine, Ranks, applied
from mmrl.engine.settings import UnevenEngine
from mmrl.engine.snapshot import AdaptersOff, Snapshot
from mmrl.protocols.abilities import Recording, Redrawing, Stepwise, Uneven, able
from mmrl.protocols.auxiliary import AuxiliaryModules
from mmrl.protocols.batch import Batch
from mmrl.protocols.checks import check_mask, check_values
from mmrl.protocols.job import JobConfig
from mmrl.protocols.measurement import PreparedContext
from mmrl.protocols.parts import Policy, Task
from mmrl.rollouts import OBJECTIVE, DecisionColumn, Replay, Rollouts, Steps, require
from mmrl.training.balancing import balanced
from mmrl.training.metrics import Metrics

Minibatch = list[Rollouts]  # its micro-batches
OF_OLD = ("old_logp", "old_entropy", "old_square_sum", "old_prediction")  # columns under the policy that sampled
OF_OTHERS = (*OF_OLD, "ref_logp", "ref_prediction")  # and under the reference


class Preparation:
    """Cuts a step's rollouts into minibatches.

    The partition is fixed first, and other policies replay in its micro-batches, so that the first ratio is exactly 1.
    """

    def __init__(
        self,
        config: JobConfig,
        policy: Policy,
        task: Task,
        engine: Engine,
        sampling_policy: EMA | None,
        reference: Snapshot | AdaptersOff | None,
    ) -> None:
        """engine: wraps the policy's module; sampling_policy, reference: weights of other policies, if any."""
        self.config, self.policy, self.task, self.engine = config, policy, task, engine
        self.sampling_policy, self.reference = sampling_policy, reference
        self.algorithm, self.needs = config.algorithm, config.needs
        # State of parts of the algorithm across steps, equal on all ranks
        self.memory: dict[str, Any] = {}
        self.modules = AuxiliaryModules()
        self.further: list[list[Minibatch]] = []  # of the second and later epochs, where they differ from the first's

    def minibatches(
        self, rollouts: Rollouts, step: int, shuffle: torch.Generator, metrics: Metrics
    ) -> tuple[list[Minibatch], Batch]:
        """Returns minibatches in the order of their updates, drawn by `shuffle`, and the batch. step: finished steps.
        After balancing, rollouts may come from other ranks; they have advantages and the mask of counted decisions."""
        if not self.algorithm.by_step:
            parts = self.cut(rollouts, shuffle)
            if self.balances:
                rollouts = self.balance(rollouts, parts, step, metrics)
            parts = self.by_length(rollouts, parts)
        batch = Batch(
            rollouts,
            self.task.reward_names,
            self.task.reward_weights,
            gather=self.engine.gather,
            rank=self.engine.rank,
            seed=self.config.seed * 1_000_003 + step,
            memory=self.memory,
            modules=self.modules,
        )
        for key, mask in self._masks("rollouts"):
            keep = mask.keep(batch)
            check_mask(key, keep, batch.rollout_mask.shape)
            batch.rollout_mask &= keep
        rollouts.mask = rollouts.mask & batch.rollout_mask[:, None]
        if self.algorithm.by_step:  # advantages are of whole episodes, and need no other policy
            self.set_advantages(batch)
            rollouts = able(self.policy, Stepwise).by_step(rollouts)
            parts = self.cut(rollouts, shuffle)
        brought = rollouts.old_logp
        complete = self.compute_logprobs(rollouts, parts)
        redrawn = self.redraw(rollouts, brought, parts)
        self.measure(rollouts, parts, step)
        if not self.algorithm.by_step:
            self.set_advantages(batch)
        self.algorithm.prepare(batch)
        minibatches = [[rollouts.select(rows) for rows in part] for part in parts]
        if not complete:
            unknown: dict[str, Any] = dict.fromkeys(OF_OLD)
            minibatches[0] = [replace(micro, **unknown) for micro in minibatches[0]]
        copies = (replace(rollouts, **columns) for columns in redrawn)
        self.further = [[[copy.select(rows) for rows in part] for part in parts] for copy in copies]
        for minibatch in chain(minibatches, *self.further):
            self.algorithm.prepare_minibatch(minibatch, self.engine.sum)
        metrics.set(batch.reports)
        return minibatches, batch

    def epochs(self, minibatches: list[Minibatch], shuffle: torch.Generator) -> Iterator[Minibatch]:
        """Yields the minibatches that `minibatches` returned in order, and in each further epoch in a shuffled one."""
        yield from minibatches
        for epoch in range(1, self.algorithm.epochs):
            again = self.further[epoch - 1] if self.further else minibatches
            for index in torch.randperm(len(again), generator=shuffle).tolist():
                yield again[index]

    def cut(self, rollouts: Rollouts, shuffle: torch.Generator) -> list[list[Tensor]]:
        """Returns the rows of the micro-batches of each minibatch, in the order of the updates."""
        parts = partition(
            rollouts.group,
            minibatches=self.algorithm.minibatches,
            size=self.config.engine.micro_batch,
            whole_groups=self.needs.whole_groups,
            generator=shuffle,
        )
        return [parts[index] for index in torch.randperm(len(parts), generator=shuffle).tolist()]

    @property
    def balances(self) -> bool:
        """Returns whether ranks exchange rollouts."""
        return self.engine.world > 1 and self.sorts

    @property
    def sorts(self) -> bool:
        """Returns whether rollouts of similar lengths are replayed together."""
        engine = self.config.engine
        return isinstance(engine, UnevenEngine) and engine.balance == "lengths"

    def balance(self, rollouts: Rollouts, parts: list[list[Tensor]], step: int, metrics: Metrics) -> Rollouts:
        """Exchanges rollouts between ranks to balance the cost of updates. Rows in `parts` may hold other rollouts
        afterwards. Groups of the step's table of samples stay on their rank, for their episodes were filmed."""
        staying, log = torch.zeros(len(rollouts), dtype=torch.bool), self.config.log
        if log.samples_every and (step + 1) % log.samples_every == 0:
            staying[whole_groups(rollouts.group, log.samples)] = True
        rollouts, reports = balanced(rollouts, parts, able(self.policy, Uneven).lengths(rollouts), staying, self.engine)
        metrics.set(reports)
        return rollouts

    def by_length(self, rollouts: Rollouts, parts: list[list[Tensor]]) -> list[list[Tensor]]:
        """Regroups the micro-batches of each minibatch by length, and splits those above `engine.micro_tokens`, where
        either is configured. All ranks have as many, for every backward pass is a collective."""
        tokens = self.config.engine.token_limit
        if not self.sorts and tokens is None:
            return parts
        lengths = able(self.policy, Uneven).lengths(rollouts)
        parts = [sort_by_length(part, rollouts.group, lengths) for part in parts]
        if tokens is None:
            return parts
        rows = self.config.engine.micro_batch
        parts = [split_by_tokens(part, lengths, max_tokens=tokens, max_rows=rows) for part in parts]
        counts = [max(by_rank) for by_rank in zip(*self.engine.gather([len(part) for part in parts]), strict=True)]
        return [split_to_count(part, lengths, count) for part, count in zip(parts, counts, strict=True)]

    def compute_logprobs(self, rollouts: Rollouts, parts: list[list[Tensor]]) -> bool:
        """Fills in log-probabilities under the policy that sampled and under the reference, in the micro-batches of
        `parts`. Returns whether the former are complete, with those of the first minibatch. Log-probabilities that
        rollouts already have are kept.

        Until the first update the policy that sampled is the policy that is trained: with one epoch the first minibatch
        needs no extra pass. Nor do others where the policy recorded its log-probabilities. Where rollouts have no
        values of the critic, the critic runs in this pass, and every decision is a step.
        """
        every = [rows for part in parts for rows in part]
        brought, complete = rollouts.old_logp, True
        several = self.algorithm.updates > 1 or self.sampling_policy is not None
        unvalued = self.needs.critic is not None and "steps" not in rollouts.extras
        if self.needs.statistics or unvalued or (self.needs.old and brought is not None):
            logp = self._compute_old(rollouts, ReplayColumns(self.policy, self.engine, rollouts), every)
            if brought is not None:
                brought = brought.to(logp)
                rollouts.old_logp = logp.where(brought.isnan(), brought)
        elif self.needs.old and several:
            recorded = self.policy.recorded(rollouts) if isinstance(self.policy, Recording) else None
            now = [] if self.sampling_policy is not None else parts[0]  # its ratio must be exactly 1
            complete = not now or self.algorithm.epochs > 1
            wanted = [*(now if complete else []), *([] if recorded is not None else every[len(now) :])]
            self._compute_old(rollouts, ReplayColumns(self.policy, self.engine, rollouts, recorded), wanted)
        if self.reference is not None:
            with torch.no_grad(), self.reference.applied():
                reference = ReplayColumns(self.policy, self.engine, rollouts).replay(every, reference=True)
            rollouts.ref_logp, rollouts.ref_prediction = reference.column("logp"), reference.column("prediction")
        return complete

    def redraw(self, rollouts: Rollouts, brought: Tensor | None, parts: list[list[Tensor]]) -> list[dict[str, Any]]:
        """Returns the inputs of further epochs and their columns under other policies, by epoch, where likelihoods are
        estimated from states that every epoch draws anew; else nothing. brought: log-probabilities that rollouts
        already had. Such rollouts stay in their states, for the policy that made them is gone."""
        if not isinstance(self.policy, Redrawing):
            return []
        keep = torch.zeros(len(rollouts), dtype=torch.bool) if brought is None else ~brought.isnan().any(1)
        unknown: dict[str, Any] = {**dict.fromkeys(OF_OTHERS), "old_logp": brought}
        further = []
        for epoch in range(1, self.algorithm.epochs):
            redrawn = self.policy.redrawn(replace(rollouts, **unknown), epoch, keep)
            if redrawn is None:
                return []
            self.compute_logprobs(redrawn, parts)
            further.append({name: vars(redrawn)[name] for name in ("inputs", *OF_OTHERS)})
        return further

    def _compute_old(self, rollouts: Rollouts, old: ReplayColumns, parts: list[Tensor]) -> Tensor:
        """Fills in the columns under the policy that sampled; returns its log-probabilities."""
        with torch.no_grad(), applied(self.sampling_policy):
            old.replay(parts)
        logp = old.require("logp")
        rollouts.old_logp, rollouts.old_prediction = logp, old.column("prediction")
        rollouts.old_entropy, rollouts.old_square_sum = old.column("entropy"), old.column("square_sum")
        if self.needs.critic is not None and "steps" not in rollouts.extras:
            value = old.require("value").cpu()
            rollouts.extras["steps"] = Steps.of_decisions(rollouts.mask, value, old.column("moment"))
        return logp

    def measure(self, rollouts: Rollouts, parts: list[list[Tensor]], step: int) -> None:
        """Fills in the measurements that methods need. parts: of the minibatches; step: finished steps."""
        every = [rows for part in parts for rows in part]

        def replayed(changed: Rollouts, name: str) -> Tensor:
            with torch.no_grad(), applied(self.sampling_policy):
                return ReplayColumns(self.policy, self.engine, changed).replay(every).require(name)

        context = PreparedContext(
            self.policy,
            self.task,
            self.config.seed,
            step,
            self.config.group_size,
            self.engine.max,
            every,
            replayed,
            self.reference_weights,
            self.modules,
            self.engine.sum,
        )
        for measurement in self.needs.prepared:
            rollouts.extras[measurement.name] = measurement.measure(rollouts, context)

    def reference_weights(self) -> AbstractContextManager[Any]:
        """Returns a context in which the policy has the reference's weights."""
        if self.reference is None:
            raise ValueError(
                "a measurement needs the reference's weights, but its method does not set `Needs.reference`"
            )
        return self.reference.applied()

    def move_reference(self, step: int) -> None:
        """Resets the reference to the present policy, and the optimizer, or averages the reference, after `step` steps,
        where a part needs that."""
        wanted = self.needs.reference
        if wanted is None or not isinstance(self.reference, Snapshot):
            return
        if any(step % every == 0 for every in wanted.resets):
            self.reference.take()
        if any(step % every == 0 for every in wanted.optimizer_resets):
            self.engine.reset_optimizer()
        for decay in wanted.decays:
            self.reference.blend(decay)

    def set_advantages(self, batch: Batch) -> None:
        """Fills in the advantages, and excludes decisions by the masks."""
        rollouts, algorithm = batch.rollouts, self.algorithm
        advantages, shape = algorithm.advantages(batch), rollouts.mask.shape
        if isinstance(advantages, Tensor) and advantages.shape == shape[:1]:
            advantages = advantages[:, None].expand(shape)
        check_values(f"algorithm.type={algorithm.type}", advantages, shape, finite=True)
        if rollouts.filler is not None:
            advantages = advantages.masked_fill(rollouts.filler[:, None], 0.0)
        for i, shaper in enumerate(algorithm.shapers):
            advantages = shaper.shape(advantages, batch)
            check_values(f"algorithm.shaping.{i} ({shaper.type})", advantages, shape, finite=True)
        rollouts.advantages = advantages
        self._mask_decisions(batch)

    def _mask_decisions(self, batch: Batch) -> None:
        """Excludes decisions by the masks: altogether, or from an objective that has a value for each of them."""
        rollouts = batch.rollouts
        objective = torch.ones_like(rollouts.mask)
        for key, mask in self._masks("decisions", "objective"):
            keep = mask.keep(batch)
            check_mask(key, keep, rollouts.mask.shape)
            keep = keep.to(rollouts.mask.device)
            if mask.of == "objective" and self.algorithm.weighs_decisions:
                objective = objective & keep
            else:
                rollouts.mask = rollouts.mask & keep
        if not objective.all():
            rollouts.extras[OBJECTIVE] = DecisionColumn(objective.float())

    def _masks(self, *of: str) -> list[tuple[str, Any]]:
        """Returns the masks of rollouts, or of decisions, with their keys."""
        named = ((f"algorithm.masks.{i} ({mask.type})", mask) for i, mask in enumerate(self.algorithm.masks))
        return [(key, mask) for key, mask in named if mask.of in of]


def weigh_objective(micro: Rollouts, replay: Replay) -> None:
    """Sets the weights of decisions that masks have excluded from the objective alone to 0."""
    if OBJECTIVE in micro.extras:
        counts = micro.extra(OBJECTIVE, DecisionColumn).values.to(replay.logp)
        replay.weight = counts if replay.weight is None else replay.weight * counts


class ReplayColumns:
    """Columns of `Replay` of rollouts, under the weights that the policy has when `replay` is called."""

    def __init__(self, policy: Policy, engine: Ranks, rollouts: Rollouts, recorded: Replay | None = None) -> None:
        """recorded: a replay of all rollouts from sampling; `replay` replaces rows of it."""
        self.policy, self.engine, self.rollouts = policy, engine, rollouts
        self._replays = [] if recorded is None else [(torch.arange(len(rollouts)), recorded)]

    def replay(self, parts: list[Tensor], *, reference: bool = False) -> ReplayColumns:
        """Replays the rollouts of these micro-batches."""
        for rows in parts:
            part = self.policy.replay(self.rollouts.select(rows), self.engine, reference=reference)
            self._replays.append((rows, part))
        return self

    def require(self, name: str) -> Tensor:
        """A column of `Replay` that this policy gives. Raises ValueError where it does not."""
        return require(self.column(name), name)

    def column(self, name: str) -> Tensor | None:
        """Returns a column of `Replay`, NaN for rollouts that were not replayed; None where the policy does not compute
        it."""
        columns = [(rows, replay.column(name)) for rows, replay in self._replays]
        values = columns[0][1]
        if values is None:
            return None
        empty = torch.nan if values.is_floating_point() else 0
        whole: Tensor = values.new_full((len(self.rollouts), *values.shape[1:]), empty)
        for rows, values in columns:
            whole[rows] = values
        return whole
