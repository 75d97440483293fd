"""Prepares a step's rollouts for the updates: minibatches, log-probabilities under the old and the reference policy,
advantages, and masks."""

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
from mmrl.protocols.abilities import Recording, ResamplingStates, Stepwise, UnevenCost, require_ability
from mmrl.protocols.auxiliary import AuxiliaryModules
from mmrl.protocols.batch import Batch
from mmrl.protocols.checks import check_mask, check_values, noting_columns
from mmrl.protocols.job import JobConfig
from mmrl.protocols.measurement import PreparedContext, Weights
from mmrl.protocols.parts import Policy, Task
from mmrl.rollouts import OBJECTIVE, DecisionColumn, Replay, Rollouts, Steps, require
from mmrl.training.balancing import balance_ranks
from mmrl.training.metrics import Metrics

Minibatch = list[Rollouts]  # its micro-batches
OLD_COLUMNS = ("old_logp", "old_entropy", "old_square_sum", "old_prediction")  # under the policy that sampled
OTHER_COLUMNS = (*OLD_COLUMNS, "ref_logp", "ref_prediction")  # under the sampling and the reference policy


class Preparation:
    """Divides a step's rollouts into minibatches and micro-batches, and fills in what the loss needs.

    Log-probabilities of the old policy are computed in the same micro-batches as the updates, so that the importance
    ratio of the first update is exactly 1.
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
        """engine: wraps the policy's module. sampling_policy: an average of the weights that samples rollouts, if the
        algorithm has one. reference: weights of the reference policy, if any."""
        self.config, self.policy, self.task, self.engine = config, policy, task, engine
        self.sampling_policy, self.reference = sampling_policy, reference
        self.algorithm, self.needs = config.algorithm, config.needs
        # State of parts of the algorithm across steps, equal on all ranks
        self.memory: dict[str, Any] = {}
        self.modules = AuxiliaryModules()
        for measurement in self.needs.prepared:
            measurement.start(policy, self.modules, config.seed)
        # Minibatches of each later epoch, if they differ from those of the first; else empty
        self.later_epochs: list[list[Minibatch]] = []

    def minibatches(
        self, rollouts: Rollouts, step: int, shuffle: torch.Generator, metrics: Metrics
    ) -> tuple[list[Minibatch], Batch]:
        """Returns the minibatches in the order of their updates, which `shuffle` decides, and the batch. The rollouts
        have advantages and final masks; with load balancing some come from other ranks. step: number of finished
        steps."""
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
            seed=self.config.seed * 1_000_003 + step,  # steps of runs with neighbouring seeds have different seeds
            memory=self.memory,
            modules=self.modules,
        )
        for key, mask in self._masks("rollouts"):
            with noting_columns(key, rollouts=rollouts):
                keep = mask.keep(batch)
            check_mask(key, keep, batch.rollout_mask.shape)
            batch.rollout_mask &= keep
        rollouts.mask = rollouts.mask & batch.rollout_mask[:, None]
        if self.algorithm.by_step:  # advantages are of whole episodes, and need no other policy
            self.set_advantages(batch)
            rollouts = require_ability(self.policy, Stepwise).by_step(rollouts)
            parts = self.cut(rollouts, shuffle)
        given_logp = rollouts.old_logp
        complete = self.compute_logprobs(rollouts, parts)
        resampled = self.resample_states(rollouts, given_logp, parts)
        self.measure(rollouts, parts, step)
        if not self.algorithm.by_step:
            self.set_advantages(batch)
        self.algorithm.prepare(batch)
        minibatches = [[rollouts.select(rows) for rows in part] for part in parts]
        if not complete:  # the first update uses its own log-probabilities as the old ones
            unknown: dict[str, Any] = dict.fromkeys(OLD_COLUMNS)
            minibatches[0] = [replace(micro, **unknown) for micro in minibatches[0]]
        copies = (replace(rollouts, **columns) for columns in resampled)
        self.later_epochs = [[[copy.select(rows) for rows in part] for part in parts] for copy in copies]
        for minibatch in chain(minibatches, *self.later_epochs):
            self.algorithm.prepare_minibatch(minibatch, self.engine.sum)
        metrics.set(batch.reports)
        return minibatches, batch

    def epochs(self, minibatches: list[Minibatch], shuffle: torch.Generator) -> Iterator[Minibatch]:
        """Yields the minibatches of all epochs: in the first epoch in the given order, in later ones in a random
        order."""
        yield from minibatches
        for epoch in range(1, self.algorithm.epochs):
            epoch_minibatches = self.later_epochs[epoch - 1] if self.later_epochs else minibatches
            for index in torch.randperm(len(epoch_minibatches), generator=shuffle).tolist():
                yield epoch_minibatches[index]

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
        """Exchanges rollouts between ranks to balance the cost of updates, and returns this rank's. The rows in `parts`
        may hold other rollouts afterwards. Groups in the step's table of samples stay on their rank, which has recorded
        their frames."""
        # Recorded steps stay: they refer to whole episodes of their rank, and their ids are unique on one rank only.
        staying = rollouts.recorded
        log = self.config.log
        if log.samples_every and (step + 1) % log.samples_every == 0:
            staying[whole_groups(rollouts.group, log.samples)] = True
        lengths = require_ability(self.policy, UnevenCost).lengths(rollouts)
        rollouts, reports = balance_ranks(rollouts, parts, lengths, staying, self.engine)
        metrics.set(reports)
        return rollouts

    def by_length(self, rollouts: Rollouts, parts: list[list[Tensor]]) -> list[list[Tensor]]:
        """Regroups the micro-batches of each minibatch by length, and splits micro-batches of more than
        engine.micro_tokens, where these are configured. All ranks get the same number, since every backward pass is a
        collective."""
        tokens = self.config.engine.token_limit
        if not self.sorts and tokens is None:
            return parts
        lengths = require_ability(self.policy, UnevenCost).lengths(rollouts)
        parts = [sort_by_length(part, rollouts.group, lengths) for part in parts]
        if tokens is None:
            return parts
        rows = self.config.engine.micro_batch
        parts = [split_by_tokens(part, lengths, max_tokens=tokens, max_rows=rows) for part in parts]
        counts = [max(by_rank) for by_rank in zip(*self.engine.gather([len(part) for part in parts]), strict=True)]
        return [split_to_count(part, lengths, count) for part, count in zip(parts, counts, strict=True)]

    def compute_logprobs(self, rollouts: Rollouts, parts: list[list[Tensor]]) -> bool:
        """Fills in log-probabilities under the policy that sampled the rollouts and under the reference policy.

        They are computed in the micro-batches of `parts`, unless the rollouts already have them. Returns whether
        `old_logp` is complete. The first minibatch gets none if its update is the first one: the current policy is
        still the old one then, and the loss uses its log-probabilities. Other minibatches need no
        forward pass if the policy recorded log-probabilities while sampling. If a critic's values are missing, they are
        computed here too, and every decision is a time step.
        """
        micro_batches = [rows for part in parts for rows in part]
        existing, complete = rollouts.old_logp, True
        needs_old = self.algorithm.updates > 1 or self.sampling_policy is not None
        needs_values = self.needs.critic is not None and "steps" not in rollouts.extras
        if self.needs.statistics or needs_values or (self.needs.old and existing is not None):
            logp = self._compute_old(rollouts, ReplayColumns(self.policy, self.engine, rollouts), micro_batches)
            if existing is not None:
                existing = existing.to(logp)
                rollouts.old_logp = logp.where(existing.isnan(), existing)
        elif self.needs.old and needs_old:
            recorded = self.policy.recorded_replay(rollouts) if isinstance(self.policy, Recording) else None
            # Recorded values cannot be used for the first minibatch, whose ratio must be exactly 1.
            first = [] if self.sampling_policy is not None else parts[0]
            complete = not first or self.algorithm.epochs > 1
            missing = [*(first if complete else []), *([] if recorded is not None else micro_batches[len(first) :])]
            self._compute_old(rollouts, ReplayColumns(self.policy, self.engine, rollouts, recorded), missing)
        if self.reference is not None:
            with torch.no_grad(), self.reference.applied():
                reference = ReplayColumns(self.policy, self.engine, rollouts).replay(micro_batches, reference=True)
            rollouts.ref_logp, rollouts.ref_prediction = reference.column("logp"), reference.column("prediction")
        return complete

    def resample_states(
        self, rollouts: Rollouts, given_logp: Tensor | None, parts: list[list[Tensor]]
    ) -> list[dict[str, Any]]:
        """Resamples the states from which a policy estimates likelihoods (`ResamplingStates`), for the second and later
        epochs. Returns, for each of these epochs, the columns that change; an empty list for other policies.

        given_logp: log-probabilities that rollouts had when they were collected. Such rollouts keep their states, since
        the policy that sampled them no longer exists."""
        if not isinstance(self.policy, ResamplingStates):
            return []
        keep = torch.zeros(len(rollouts), dtype=torch.bool) if given_logp is None else ~given_logp.isnan().any(1)
        unknown: dict[str, Any] = {**dict.fromkeys(OTHER_COLUMNS), "old_logp": given_logp}
        by_epoch = []
        for epoch in range(1, self.algorithm.epochs):
            resampled = self.policy.resample_states(replace(rollouts, **unknown), epoch, keep)
            if resampled is None:
                return []
            self.compute_logprobs(resampled, parts)
            by_epoch.append({name: vars(resampled)[name] for name in ("inputs", *OTHER_COLUMNS)})
        return by_epoch

    def _compute_old(self, rollouts: Rollouts, old: ReplayColumns, parts: list[Tensor]) -> Tensor:
        """Replays the micro-batches `parts` under the policy that sampled, and fills in the old columns and, where a
        critic has no steps yet, its steps. Returns the old log-probabilities."""
        with torch.no_grad(), applied(self.sampling_policy):
            old.replay(parts)
        logp = old.require("logp")
        rollouts.old_logp, rollouts.old_prediction = logp, old.column("prediction")
        rollouts.old_entropy, rollouts.old_square_sum = old.column("entropy"), old.column("square_sum")
        if self.needs.critic is not None and "steps" not in rollouts.extras:
            value = old.require("value").cpu()
            rollouts.extras["steps"] = Steps.from_decisions(rollouts.mask, value, old.column("moment"))
        return logp

    def measure(self, rollouts: Rollouts, parts: list[list[Tensor]], step: int) -> None:
        """Adds the measurements that parts of the algorithm need to `rollouts.extras`. parts: rows of the micro-batches
        of each minibatch. step: number of finished steps."""
        micro_batches = [rows for part in parts for rows in part]

        def replayed(rollouts: Rollouts, name: str, weights: Weights = "sampling") -> Tensor:
            """Returns the column `name` of `Replay` under the policy with these weights."""
            with torch.no_grad(), self.weights(weights):
                columns = ReplayColumns(self.policy, self.engine, rollouts)
                return columns.replay(micro_batches, reference=weights == "reference").require(name)

        context = PreparedContext(
            self.policy,
            self.task,
            self.config.seed,
            step,
            self.config.group_size,
            self.engine.max,
            micro_batches,
            replayed,
            self.weights,
            self.modules,
            self.engine.sum,
        )
        for measurement in self.needs.prepared:
            rollouts.extras[measurement.name] = measurement.measure(rollouts, context)

    def played_with(self) -> dict[str, Tensor]:
        """Returns the tensors of the networks that the policy plays with, which are saved beside its weights."""
        tensors: dict[str, Tensor] = {}
        for measurement in self.needs.prepared:
            tensors |= measurement.played_with(self.modules)
        return tensors

    def weights(self, which: Weights) -> AbstractContextManager[Any]:
        """Returns a context in which the policy has the weights that sampled the step's rollouts, or those of the
        reference policy. Raises ValueError if the job has no reference policy."""
        if which == "sampling":
            return applied(self.sampling_policy)
        if self.reference is None:
            raise ValueError(
                "a measurement needs the weights of the reference policy, but its part of the algorithm does not set "
                "`Needs.reference`"
            )
        return self.reference.applied()

    def move_reference(self, step: int) -> None:
        """Moves the reference policy and resets the optimizer after `step` finished steps, if a part of the
        algorithm needs that (`Needs.reference`)."""
        needed = self.needs.reference
        if needed is None or not isinstance(self.reference, Snapshot):
            return
        if any(step % period == 0 for period in needed.resets):
            self.reference.take()
        if any(step % period == 0 for period in needed.optimizer_resets):
            self.engine.reset_optimizer()
        for decay in needed.decays:
            self.reference.blend(decay)

    def set_advantages(self, batch: Batch) -> None:
        """Computes the advantages by the algorithm and its shapers, and applies the masks of decisions."""
        rollouts, algorithm = batch.rollouts, self.algorithm
        key, shape = f"algorithm.type={algorithm.type}", rollouts.mask.shape
        with noting_columns(key, rollouts=rollouts):
            advantages = algorithm.advantages(batch)
        if isinstance(advantages, Tensor) and advantages.shape == shape[:1]:
            advantages = advantages[:, None].expand(shape)
        check_values(key, advantages, shape, finite=True)
        if rollouts.filler is not None:
            advantages = advantages.masked_fill(rollouts.filler[:, None], 0.0)
        if algorithm.shapers:
            shapeable = batch.scored()[:, None]
            for i, shaper in enumerate(algorithm.shapers):
                key = f"algorithm.shaping.{i} ({shaper.type})"
                with noting_columns(key, rollouts=rollouts):
                    shaped = shaper.shape(advantages, batch)
                check_values(key, shaped, shape, finite=True)
                advantages = shaped.where(shapeable, advantages)
        rollouts.advantages = advantages
        self._mask_decisions(batch)

    def _mask_decisions(self, batch: Batch) -> None:
        """Applies the masks of decisions: they exclude decisions from the whole loss, or, with `of: objective`, from
        the algorithm's objective alone."""
        rollouts = batch.rollouts
        objective = torch.ones_like(rollouts.mask)
        for key, mask in self._masks("decisions", "objective"):
            with noting_columns(key, rollouts=rollouts):
                keep = mask.keep(batch)
            check_mask(key, keep, rollouts.mask.shape)
            keep = keep.to(rollouts.mask.device)
            if mask.of == "objective" and self.algorithm.weighs_decisions:
                objective = objective & keep
            else:
                rollouts.mask = rollouts.mask & keep
        if not objective.all():
            rollouts.extras[OBJECTIVE] = DecisionColumn(objective.float())

    def _masks(self, *units: str) -> list[tuple[str, Any]]:
        """Returns the masks whose option `of` is one of `units` ("rollouts", "decisions", "objective"), with their
        configuration keys."""
        masks = ((f"algorithm.masks.{i} ({mask.type})", mask) for i, mask in enumerate(self.algorithm.masks))
        return [(key, mask) for key, mask in masks if mask.of in units]


def weigh_objective(micro: Rollouts, replay: Replay) -> None:
    """Sets `replay.weight` to 0 for decisions that masks have excluded from the objective alone."""
    if OBJECTIVE in micro.extras:
        included = micro.extra(OBJECTIVE, DecisionColumn).values.to(replay.logp)
        replay.weight = included if replay.weight is None else replay.weight * included


class ReplayColumns:
    """Replays rollouts micro-batch by micro-batch, and joins the columns of the replays."""

    def __init__(self, policy: Policy, engine: Ranks, rollouts: Rollouts, recorded: Replay | None = None) -> None:
        """recorded: a replay of all rollouts that the policy kept from sampling; `replay` replaces rows of it."""
        self.policy, self.engine, self.rollouts = policy, engine, rollouts
        self._replays = [] if recorded is None else [(torch.arange(len(rollouts)), recorded)]

    def replay(self, parts: list[Tensor], *, reference: bool = False) -> ReplayColumns:
        """Replays these micro-batches under the policy's current weights. parts: rows [n] of each. reference: the
        weights are the reference policy's."""
        for rows in parts:
            part = self.policy.replay(self.rollouts.select(rows), self.engine, reference=reference)
            self._replays.append((rows, part))
        return self

    def require(self, name: str) -> Tensor:
        """Returns a column of `Replay`. Raises ValueError where the policy does not compute it."""
        return require(self.column(name), name)

    def column(self, name: str) -> Tensor | None:
        """Returns a column of `Replay`, NaN for rollouts that were not replayed; None where the policy does not compute
        it."""
        columns = [(rows, replay.column(name)) for rows, replay in self._replays]
        values = columns[0][1]
        if values is None:
            return None
        empty = torch.nan if values.is_floating_point() else 0
        joined: Tensor = values.new_full((len(self.rollouts), *values.shape[1:]), empty)
        for rows, values in columns:
            joined[rows] = values
        return joined
