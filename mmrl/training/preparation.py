"""What is known of a step's rollouts before its first update: what other policies say of them, their advantages, and
which of their decisions count."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmrl.core.filters import whole_groups
from mmrl.core.partition import halved, longest_first, partition, within_tokens
from mmrl.engine import EMA, Ranks, applied
from mmrl.engine.settings import UnevenEngine
from mmrl.engine.snapshot import AdaptersOff, Snapshot
from mmrl.protocols.abilities import Recording, Stepwise, Uneven, able
from mmrl.protocols.auxiliary import AuxiliaryModules
from mmrl.protocols.batch import Batch
from mmrl.protocols.checks import check_mask, check_values
from mmrl.protocols.job import JobConfig
from mmrl.protocols.measurement import PreparedContext
from mmrl.protocols.parts import Policy, Task
from mmrl.rollouts import Replay, Rollouts, Steps, require
from mmrl.training.balancing import balanced
from mmrl.training.metrics import Metrics

Minibatch = list[Rollouts]  # its micro-batches
OF_OLD = ("old_logp", "old_entropy", "old_square_sum", "old_prediction")  # what the policy that made rollouts says


class Preparation:
    """Makes a step's rollouts into minibatches.

    The partition is fixed first, and other policies are asked in it, so that the first ratio is exactly 1.
    """

    def __init__(
        self,
        config: JobConfig,
        policy: Policy,
        task: Task,
        engine: Ranks,
        sampling_policy: EMA | None,
        reference: Snapshot | AdaptersOff | None,
    ) -> None:
        """engine: around the policy's module; sampling_policy, reference: weights of other policies, where there are
        any."""
        self.config, self.policy, self.task, self.engine = config, policy, task, engine
        self.sampling_policy, self.reference = sampling_policy, reference
        self.algorithm, self.needs = config.algorithm, config.needs
        # Of parts of the algorithm, from step to step; equal on all ranks
        self.memory: dict[str, Any] = {}
        self.modules = AuxiliaryModules()

    def minibatches(
        self, rollouts: Rollouts, step: int, shuffle: torch.Generator, metrics: Metrics
    ) -> tuple[list[Minibatch], Batch]:
        """In the order in which they are learned from, which `shuffle` draws; step: finished steps. The rollouts of the
        batch, which may be other ranks', have advantages and the mask of what counts too."""
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
            kept = mask.keep(batch)
            check_mask(key, kept, batch.kept.shape)
            batch.kept &= kept
        rollouts.mask = rollouts.mask & batch.kept[:, None]
        if self.algorithm.by_step:  # advantages are of whole episodes, and need no other policy's word
            self.set_advantages(batch)
            rollouts = able(self.policy, Stepwise).by_step(rollouts)
            parts = self.cut(rollouts, shuffle)
        known = self.ask_others(rollouts, parts)
        self.measure(rollouts, parts, step)
        if not self.algorithm.by_step:
            self.set_advantages(batch)
        self.algorithm.prepare(batch)
        minibatches = [[rollouts.select(rows) for rows in part] for part in parts]
        if not known:
            unknown: dict[str, Any] = dict.fromkeys(OF_OLD)
            minibatches[0] = [replace(micro, **unknown) for micro in minibatches[0]]
        for minibatch in minibatches:
            self.algorithm.of_minibatch(minibatch, self.engine.sum)
        metrics.set(batch.reports)
        return minibatches, batch

    def cut(self, rollouts: Rollouts, shuffle: torch.Generator) -> list[list[Tensor]]:
        """The rows of the micro-batches of each minibatch, in the order in which they are learned from."""
        parts = partition(
            rollouts.group,
            minibatches=self.algorithm.minibatches,
            size=self.config.engine.micro_batch,
            whole_groups=self.needs.whole_groups,
            generator=shuffle,
        )
        return [parts[place] for place in torch.randperm(len(parts), generator=shuffle).tolist()]

    @property
    def balances(self) -> bool:
        """Whether ranks exchange rollouts."""
        engine = self.config.engine
        return self.engine.world > 1 and isinstance(engine, UnevenEngine) and engine.balance == "lengths"

    def balance(self, rollouts: Rollouts, parts: list[list[Tensor]], step: int, metrics: Metrics) -> Rollouts:
        """This rank's rollouts after ranks have shared out the work; those at the rows of a micro-batch in `parts` may
        be others. What the step's table shows stays where it is: episodes were filmed for it."""
        staying, log = torch.zeros(len(rollouts), dtype=torch.bool), self.config.log
        if log.samples_every and (step + 1) % log.samples_every == 0:
            staying[whole_groups(rollouts.group, log.samples)] = True
        rollouts, reports = balanced(rollouts, parts, able(self.policy, Uneven).lengths(rollouts), staying, self.engine)
        metrics.set(reports)
        return rollouts

    def by_length(self, rollouts: Rollouts, parts: list[list[Tensor]]) -> list[list[Tensor]]:
        """The micro-batches of each minibatch with similar lengths together, and of no more tokens than there may be,
        where either is asked for. All ranks have as many, for they meet in every backward pass."""
        tokens = self.config.engine.token_limit
        if not self.balances and tokens is None:
            return parts
        lengths = able(self.policy, Uneven).lengths(rollouts)
        parts = [longest_first(part, rollouts.group, lengths) for part in parts]
        if tokens is None:
            return parts
        rows = self.config.engine.micro_batch
        parts = [within_tokens(part, lengths, tokens=tokens, rows=rows) for part in parts]
        counts = [max(told) for told in zip(*self.engine.gather([len(part) for part in parts]), strict=True)]
        return [halved(part, lengths, count) for part, count in zip(parts, counts, strict=True)]

    def ask_others(self, rollouts: Rollouts, parts: list[list[Tensor]]) -> bool:
        """Fills in what the policy that made the rollouts and the reference say of them, micro-batch by micro-batch of
        the minibatches `parts`; whether the former is known of the first of these too. Likelihoods that rollouts
        brought along are kept.

        Until the first update the former is the policy that is trained: where each minibatch is learned from once,
        the first one needs no pass of its own. Nor do others where the policy kept what it said when it made them.
        Where a critic did not speak when the rollouts were made, it is asked here, and every decision is a step.
        """
        every = [rows for part in parts for rows in part]
        brought, known = rollouts.old_logp, True
        several = self.algorithm.updates > 1 or self.sampling_policy is not None
        silent = self.needs.critic is not None and "steps" not in rollouts.extras
        if self.needs.statistics or silent or (self.needs.old and brought is not None):
            logp = self._ask_old(rollouts, Answers(self.policy, self.engine, rollouts), every)
            if brought is not None:
                brought = brought.to(logp)
                rollouts.old_logp = logp.where(brought.isnan(), brought)
        elif self.needs.old and several:
            made = self.policy.recorded(rollouts) if isinstance(self.policy, Recording) else None
            now = [] if self.sampling_policy is not None else parts[0]  # of which the ratio shall be exactly 1
            known = not now or self.algorithm.epochs > 1
            asked = [*(now if known else []), *([] if made is not None else every[len(now) :])]
            self._ask_old(rollouts, Answers(self.policy, self.engine, rollouts, made), asked)
        if self.reference is not None:
            with torch.no_grad(), self.reference.applied():
                reference = Answers(self.policy, self.engine, rollouts).ask(every, reference=True)
            rollouts.ref_logp, rollouts.ref_prediction = reference.column("logp"), reference.column("prediction")
        return known

    def _ask_old(self, rollouts: Rollouts, old: Answers, parts: list[Tensor]) -> Tensor:
        """Fills in what the policy that made the rollouts says; its log-probabilities."""
        with torch.no_grad(), applied(self.sampling_policy):
            old.ask(parts)
        logp = old.require("logp")
        rollouts.old_logp, rollouts.old_prediction = logp, old.column("prediction")
        rollouts.old_entropy, rollouts.old_square_sum = old.column("entropy"), old.column("square_sum")
        if self.needs.critic is not None and "steps" not in rollouts.extras:
            value = old.require("value").cpu()
            rollouts.extras["steps"] = Steps.of_decisions(rollouts.mask, value, old.column("moment"))
        return logp

    def measure(self, rollouts: Rollouts, parts: list[list[Tensor]], step: int) -> None:
        """Fills in what else methods want to know of the rollouts. parts: of the minibatches; step: finished steps."""
        every = [rows for part in parts for rows in part]

        def replayed(seen: Rollouts, name: str) -> Tensor:
            with torch.no_grad(), applied(self.sampling_policy):
                return Answers(self.policy, self.engine, seen).ask(every).require(name)

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
        )
        for measurement in self.needs.prepared:
            rollouts.extras[measurement.name] = measurement.measure(rollouts, context)

    def reference_weights(self) -> AbstractContextManager[Any]:
        """Inside it the policy has the reference's weights."""
        if self.reference is None:
            raise ValueError("a measurement asks for the reference's weights; `Needs.reference` of its method does not")
        return self.reference.applied()

    def move_reference(self, step: int) -> None:
        """After `step` steps the reference becomes the present policy, or follows it, where a part asks for that."""
        kept = self.needs.reference
        if kept is None or not isinstance(self.reference, Snapshot):
            return
        if any(step % every == 0 for every in kept.resets):
            self.reference.take()
        for decay in kept.decays:
            self.reference.blend(decay)

    def set_advantages(self, batch: Batch) -> None:
        """Fills in the advantages, and leaves out decisions that a mask does not keep."""
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
        for key, mask in self._masks("decisions"):
            kept = mask.keep(batch)
            check_mask(key, kept, shape)
            rollouts.mask = rollouts.mask & kept.to(rollouts.mask.device)

    def _masks(self, of: str) -> list[tuple[str, Any]]:
        """The masks of rollouts, or of decisions, by their keys."""
        named = ((f"algorithm.masks.{i} ({mask.type})", mask) for i, mask in enumerate(self.algorithm.masks))
        return [(key, mask) for key, mask in named if mask.of == of]


class Answers:
    """What a policy, with the weights that it has when it is asked, says of rollouts."""

    def __init__(self, policy: Policy, engine: Ranks, rollouts: Rollouts, known: Replay | None = None) -> None:
        """known: what was found of all of them before; what is asked replaces it."""
        self.policy, self.engine, self.rollouts = policy, engine, rollouts
        self._found = [] if known is None else [(torch.arange(len(rollouts)), known)]

    def ask(self, parts: list[Tensor], *, reference: bool = False) -> Answers:
        """Of the rollouts of these micro-batches."""
        for rows in parts:
            replay = self.policy.replay(self.rollouts.select(rows), self.engine, reference=reference)
            self._found.append((rows, replay))
        return self

    def require(self, name: str) -> Tensor:
        """A column of `Replay` that this policy gives. Raises ValueError where it does not."""
        return require(self.column(name), name)

    def column(self, name: str) -> Tensor | None:
        """A column of `Replay`, NaN for rollouts of which it is not known; None where the policy does not give it."""
        found = [(rows, replay.column(name)) for rows, replay in self._found]
        values = found[0][1]
        if values is None:
            return None
        empty = torch.nan if values.is_floating_point() else 0
        whole: Tensor = values.new_full((len(self.rollouts), *values.shape[1:]), empty)
        for rows, values in found:
            whole[rows] = values
        return whole
