"""The training loop, `Trainer.train`. The algorithm defines the loss."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from mmrl import checkpoints
from mmrl.collection.checks import check_batch
from mmrl.collection.collector import Collector, synced
from mmrl.config import Config
from mmrl.core.correction import effective_sample_size
from mmrl.core.filters import whole_groups
from mmrl.engine import EMA, Engine, Interruption, applied, ema_warmup, ramp
from mmrl.engine.snapshot import AdaptersOff, Snapshot, make_reference
from mmrl.errors import UserError
from mmrl.evaluation.evaluate import checkpoint_score, evaluate
from mmrl.generation.correction import apply_correction
from mmrl.monitors.guards import Guards
from mmrl.protocols.checks import check_loss, check_pair, check_values, noting_columns
from mmrl.protocols.measurement import ReplayedContext
from mmrl.protocols.parts import ExplainingTask, Policy, RewardingTask, SyncedGenerator, Task
from mmrl.report.run import Run
from mmrl.rollouts import Rollouts
from mmrl.runtime.progress import Interval, Work, display
from mmrl.schedules.schedule import Schedules
from mmrl.settings import plain
from mmrl.training.metrics import Metrics, UnscoredMonitor, ZeroGradientMonitor, evaluation_line, step_line
from mmrl.training.preparation import Minibatch, Preparation, weigh_objective
from mmrl.training.throughput import Workload


class Trainer:
    """Trains a policy on a task (`train`), and holds the state that a checkpoint saves and restores."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        task: Task,
        engine: Engine,
        run: Run,
        generator: SyncedGenerator | None = None,
    ) -> None:
        """run: writes the run directory. generator: samples rollouts in place of the policy; None: the policy samples.
        Raises UserError if the batch cannot be divided over the ranks."""
        check_batch(config, engine.world)
        self.config, self.policy, self.task, self.engine, self.run = config, policy, task, engine, run
        self.generator = generator
        self.algorithm, self.needs, self.controls = config.algorithm, config.needs, Schedules(config)
        self.collector = Collector(config, policy, task, engine, generator)
        self.ema = None if config.optim.ema is None else EMA(policy.module, ema_warmup(config.optim.ema))
        slow = self.algorithm.slow_sampling
        self.sampling_policy = None if slow is None else EMA(policy.module, ramp(slow.slope, slow.most, slow.start))
        reference = self.needs.reference
        self.reference: Snapshot | AdaptersOff | None = None
        if reference is not None:
            self.reference = make_reference(policy.module, fixed=not reference.moves, zero_stage=engine.zero_stage)
        self.preparation = Preparation(config, policy, task, engine, self.sampling_policy, self.reference)
        self.algorithm.start(policy, engine)
        self._reward_states()  # raises now for a state that no checkpoint can hold
        self.step = 0  # finished steps
        self.bad_steps = 0  # skipped updates in a row
        self.guards = Guards(config.guards)
        self.unscored_monitor = UnscoredMonitor(config.rollout.unscored_limit)
        self.zero_gradient_monitor = ZeroGradientMonitor(config.rollout.max_idle_steps)
        self.best: float | None = None  # score of the weights in best/
        self.accuracies: dict[str, float] = {}  # held-out accuracy by step
        self.saver = checkpoints.Saver(run.folder / "checkpoints", config.checkpoint, engine, run.line)
        self.interruption = Interruption()  # SIGTERM or Ctrl-C, on this rank
        self.stop_signal = 0  # number of the signal that a rank received, 0 for none; the same on all ranks
        self.stop_requested = False  # whether a program requested the end, see `Job.stop`
        self.progress: Work | None = None  # the progress bar of the training
        self.line_interval = Interval(config.log.lines_every, at_once=True)  # between printed step lines

    def train(self) -> None:
        """Trains from the current step to the last one, or until a stop is requested; see `loop`."""
        with self.interruption, self.saver, display.work("training", self.config.steps, self.step, lines=False) as work:
            self.progress = work
            try:
                self.loop()
            finally:
                self.collector.cancel()
                self.collector.close()

    def loop(self) -> None:
        """Runs the training steps. Each collects rollouts, prepares minibatches with advantages, updates the policy
        once for each minibatch of each epoch, logs, and evaluates and saves where these are due."""
        if self.step == 0 and self.config.evaluation.before:
            self.evaluate()
        while self.step < self.config.steps and not (self.stop_signal or self.stop_requested):
            metrics = Metrics(
                self.engine, Workload.from_policy(self.policy, self.algorithm.epochs, self.config.model.dtype)
            )
            with metrics.phase("rollout"), applied(self.sampling_policy):
                rollouts = self.collector.next(self.step, metrics)
            with metrics.phase("update"):
                # seeded by run and step, so that a resumed run has the same minibatches
                shuffle = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
                minibatches, batch = self.preparation.minibatches(rollouts, self.step, shuffle, metrics)
                for minibatch in self.preparation.epochs(minibatches, shuffle):
                    if self.algorithm.ends_epochs(self.update(minibatch, metrics)):
                        break
            self.collector.observe(batch)
            if self.sampling_policy is not None:
                self.sampling_policy.update()
            self.step += 1
            self.log(batch.rollouts, metrics)
            if due(self.step, self.config.evaluation.every, self.config.steps):
                self.evaluate()
            self.stop_signal = self.engine.max(self.interruption.signum)
            self.stop_requested = bool(self.engine.max(int(self.stop_requested)))
            self.saver.poll()
            save_due = self.guards.all_in_band and due(self.step, self.config.checkpoint.every)
            if self.stop_signal or self.stop_requested or save_due:
                self.save()
        self.saver.finish()
        if self.step >= self.config.steps:
            self.save_weights("final")

    # --- updates ---

    def update(self, minibatch: Minibatch, metrics: Metrics) -> dict[str, float]:
        """Performs one optimizer step on a minibatch. Returns the means of `Algorithm.early_stop_statistics` over all
        decisions and ranks. A loss or gradient that is not finite skips the step. Raises UserError after
        engine.max_bad_steps skipped steps in a row."""
        denominators = [self.algorithm.denominators(micro) for micro in minibatch]
        totals = {
            name: self.engine.sum(torch.stack([part[name] for part in denominators]).sum()) for name in denominators[0]
        }
        loss_parts: list[dict[str, Tensor]] = []
        early_stop = {name: torch.zeros(2) for name in self.algorithm.early_stop_statistics}  # sum and count
        for micro in minibatch:
            parts, stats = self.losses(micro, totals)
            loss = torch.stack(list(parts.values())).sum()
            loss_parts.append({name: value.detach() for name, value in (*parts.items(), ("loss", loss))})
            # The engine skips a step whose gradient is not finite, on every rank. The loss is not read here, since that
            # would wait for the GPU.
            loss = loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
            self.engine.backward(loss)
            metrics.add("loss", loss[None] / self.algorithm.updates, sums=True)
            for mask, columns in self.by_mask(stats, micro):
                metrics.add_all(columns, where=mask)
                for name in early_stop.keys() & columns.keys():
                    early_stop[name] += torch.stack([columns[name].where(mask, 0.0).sum(), mask.sum()]).cpu()
        metrics.set({"lr": self.engine.lr})
        changed, norm = self.engine.step()
        metrics.add("grad_norm", torch.tensor([norm]))
        metrics.add("updates", torch.tensor([1.0 / self.engine.world]), sums=True)  # all ranks share one update
        metrics.add("updates_skipped", torch.tensor([0.0 if changed else 1.0]))
        self.bad_steps = 0 if changed else self.bad_steps + 1
        if changed and self.ema is not None:
            self.ema.update()
        if not changed:
            not_finite = [name for parts in reversed(loss_parts) for name, part in parts.items() if not part.isfinite()]
            self._report_bad_step(minibatch, not_finite[0] if not_finite else "gradient")
        sums = {name: self.engine.sum(values) for name, values in early_stop.items()}
        return {name: float(total / count.clamp(min=1)) for name, (total, count) in sums.items()}

    def by_mask(self, stats: dict[str, Tensor], micro: Rollouts) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Groups statistics by the mask that they are averaged under. Returns pairs of a bool mask and the statistics
        by name, all of the mask's shape."""
        groups: dict[tuple[int, torch.device], tuple[Tensor, dict[str, Tensor]]] = {}
        for name, values in stats.items():
            mask = self.algorithm.counted_mask(name, micro)
            check_values(f"the statistic {name}", values, mask.shape)
            # [1]: the statistics under this mask
            groups.setdefault((id(mask), values.device), (mask, {}))[1][name] = values
        return [(mask.to(device), columns) for (_, device), (mask, columns) in groups.items()]

    def losses(self, micro: Rollouts, totals: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Computes the loss of a micro-batch. Returns its summands, 0-d each, by the configuration key that they come
        from, and statistics for the log, [rollout, decision] by default. totals: the algorithm's denominators, summed
        over the minibatch and all ranks."""
        replay = self.policy.replay(micro, self.engine)
        context = ReplayedContext(self.policy, self.engine, self.step, self.config.seed, self.preparation.modules)
        for measurement in self.needs.replayed:
            replay.extras[measurement.name] = measurement.measure(micro, context)
        stats = {} if micro.behaviour_logp is None else apply_correction(micro, replay, self.config.correction)
        weigh_objective(micro, replay)
        reduce = self.algorithm.reduction(micro, totals, self.policy.max_decisions, replay.logp.device)
        key = f"algorithm.type={self.algorithm.type}"
        loss, loss_stats = check_pair(key, self.algorithm.objective(micro, replay, reduce))
        check_loss(key, loss)
        parts = {f"loss of {key}": loss}
        stats |= loss_stats
        for i, term in enumerate(self.algorithm.terms):
            key = f"algorithm.terms.{i} ({term.type})"
            with noting_columns(key, micro=micro, replay=replay):
                values, term_stats = check_pair(key, term.values(micro, replay))
            check_values(key, values, micro.mask.shape)
            parts[key] = reduce(values)
            # Two terms may report a statistic of the same name.
            stats |= {f"{name}/{i}" if name in stats else name: column for name, column in term_stats.items()}
        if replay.entropy is not None:
            stats["entropy"] = replay.entropy.detach()
        return parts, stats

    def _report_bad_step(self, minibatch: Minibatch, culprit: str) -> None:
        """Saves the rollouts of an update that was skipped, and prints the path. culprit: which part of the loss, or
        "gradient", is not finite. Raises UserError after engine.max_bad_steps skipped updates in a row."""
        path = self.run.skipped_update(self.step + 1, self.engine.rank, minibatch)
        ids = ", ".join(sorted({s.prompt.id for micro in minibatch for s in micro.samples})[:3])
        self.run.line(
            f"step {self.step + 1}: {culprit} not finite, update skipped; its rollouts ({ids}, ...) are in {path}"
        )
        if self.bad_steps >= self.config.engine.max_bad_steps:
            raise UserError(
                f"{self.bad_steps} updates in a row were skipped, the last because its {culprit} is not finite; lower "
                f"optim.lr, or look at its rollouts in {path}"
            )

    # --- evaluation ---

    def evaluate(self) -> dict[str, float]:
        """Evaluates on the first evaluation.prompts held-out prompts, logs the metrics and a table of samples, and
        saves the weights if they are the best so far. Returns the metrics."""
        self.collector.pause_prefetch()
        self.engine.mark("evaluation")
        started = time.perf_counter()
        with applied(self.ema), synced(self.generator) as measured:
            num_prompts = self.config.evaluation.prompts
            result, samples, accuracies = evaluate(
                self.collector.sampling, self.task, self.engine, num_prompts, self.config
            )
        result["time/evaluation"] = time.perf_counter() - started
        result |= {f"evaluation/{name}": value for name, value in measured.items() if not name.startswith("time/")}
        self.run.log(self.step, result)
        self.run.samples("evaluation", self.step, samples[: self.config.log.samples], {"accuracy": accuracies})
        self.run.line(evaluation_line(self.step, result))
        if "evaluation/accuracy" in result:
            self.accuracies[str(self.step)] = result["evaluation/accuracy"]
        self.guards.judge(result, self, evaluation=True)
        if self.config.checkpoint.best and self.step > 0:
            value = checkpoint_score(result, self.config.checkpoint)
            if value > (-math.inf if self.best is None else self.best):
                self.best = value
                self.save_weights("best")
        return result

    # --- actions of guards (`monitors.guards`) ---

    def line(self, text: str) -> None:
        """Prints a line above the progress bar, on rank 0."""
        self.run.line(text)

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rate of all later updates by `factor`."""
        self.engine.lr_factor *= factor

    def go_back(self) -> str:
        """Restores the weights and the optimizer of the newest checkpoint, while the step, the order of prompts and the
        schedules continue. Returns the checkpoint's name."""
        self.saver.finish()
        return checkpoints.go_back(self.saver.folder, self.engine, self._copies(), self.line)

    # --- log, save, resume, stop ---

    def log(self, rollouts: Rollouts, metrics: Metrics) -> None:
        """Logs the metrics of a step over all ranks, and every log.samples_every steps a table of samples. Lets guards,
        monitors and schedules see the metrics. Raises UserError where a guard or a monitor ends the run."""
        metrics.add_rollouts(rollouts, self.task)
        metrics.add_counts(self.collector.sampling.counts())
        metrics.set(self.controls.values())
        values = metrics.result()
        self.judge_generator(values)
        self.controls.update(self.step, values)
        self.preparation.move_reference(self.step)
        values |= self.guards.judge(values, self)
        values["throughput/rollouts_per_second"] = self.config.rollouts_per_step / values["time/step"]
        self.run.log(self.step, values)
        self.print_step_line(values)
        reasons = self.task.unscored_reasons() if isinstance(self.task, ExplainingTask) else {}
        self.unscored_monitor.judge(self.step, values, reasons)
        if (warning := self.zero_gradient_monitor.judge(self.step, values)) is not None:
            self.run.line(warning)
        if due(self.step, self.config.log.samples_every):
            logged = rollouts.select(whole_groups(rollouts.group, self.config.log.samples))
            names, rewards = self.task.reward_names, logged.rewards
            columns = {} if rewards is None else dict(zip(names, rewards.T.tolist(), strict=True))
            assert logged.advantages is not None
            columns["advantage"] = logged.advantages.mean(1).tolist()
            self.run.samples("train", self.step, logged.samples, columns)

    def print_step_line(self, values: dict[str, float]) -> None:
        """Advances the progress bar. Prints a line with the main metrics for the first and the last step, and otherwise
        at most every log.lines_every seconds."""
        if self.progress is not None:
            self.progress.advance()
        if self.line_interval.due() or self.step == self.config.steps:
            seconds_left = None if self.progress is None else self.progress.left
            self.run.line(step_line(self.step, self.config.steps, values, seconds_left))

    def judge_generator(self, values: dict[str, float]) -> None:
        """Compares the sampling engine's log-probabilities with the trained model's. Adds the effective sample size of
        the importance weights to `values`. Raises UserError, on all ranks, where the mean difference exceeds
        correction.max_gap."""
        if "correction/logp_gap" not in values:
            return
        squared = values.pop("correction/weight_squared")
        values["correction/effective_sample_size"] = effective_sample_size(values["correction/weight"], squared)
        gap, limit = values["correction/logp_gap"], self.config.correction.max_gap
        if not gap <= limit:  # true for NaN, too
            generator: Any = self.config.generator
            raise UserError(
                f"step {self.step}: log-probabilities of the sampling engine differ from the trained model's by "
                f"{gap:.3g} on average, more than {generator.where}.correction.max_gap={limit:g}; try "
                f"model.dtype=float32, a lower optim.lr, or {generator.instead}"
            )

    def save(self) -> None:
        """Saves a checkpoint. `state` is the same on all ranks; each rank has a `rank_state` of its own."""
        shared, pending = self.collector.state()
        state = {
            "best": self.best,
            "bad_steps": self.bad_steps,
            "accuracies": self.accuracies,
            "controls": self.controls.state(),
            "guards": {"outside": self.guards.state(), "lr_factor": self.engine.lr_factor},
            "monitors": [self.unscored_monitor.state(), self.zero_gradient_monitor.state()],
            "batches": shared,
            "memory": self.preparation.memory,
            "config": plain(self.config),
        }
        averages = {name: copy.state() for name, copy in self._copies().items()}
        rank_state = {
            "averages": averages,
            "pending": pending,
            "modules": self.preparation.modules.state(),
            "rewards": self._reward_states(),
        }
        self.run.sync()
        self.saver.save(self.step, state, rank_state)

    def _reward_states(self) -> dict[str, Any]:
        """Returns the states of rewards that have one, by name."""
        return self.task.rewards.state() if isinstance(self.task, RewardingTask) else {}

    def save_weights(self, name: str) -> None:
        """Writes the weights that are evaluated (the EMA, if any) to the folder `name` of the run directory, in the
        format of the model's library."""
        with applied(self.ema):
            origin = checkpoints.make_origin(self.step, plain(self.config))
            checkpoints.save_weights(
                self.run.folder / name, self.policy, self.engine, origin, self.preparation.played_with()
            )

    def _copies(self) -> dict[str, EMA | Snapshot]:
        """Returns the copies of the weights that checkpoints hold, by name."""
        copies: dict[str, EMA | Snapshot | None] = {"ema": self.ema, "sampling_policy": self.sampling_policy}
        if isinstance(self.reference, Snapshot) and self.needs.reference is not None and self.needs.reference.moves:
            copies["reference"] = self.reference  # a fixed one equals the weights that the run starts from
        return {name: copy for name, copy in copies.items() if copy is not None}

    def resume(self) -> None:
        """Restores the newest intact checkpoint of the run directory. Without a checkpoint the run starts at step 0, or
        with checkpoint.resume=true raises UserError. Raises as `checkpoints.resume`."""
        required = self.config.checkpoint.resume is True
        restored = checkpoints.resume(
            self.saver.folder, plain(self.config), self.engine, self.run.line, required=required
        )
        if restored is None:
            self.run.drop_after(-1)
            return
        state, rank_state = restored
        for name, copy in self._copies().items():
            if name not in rank_state["averages"]:
                raise UserError(
                    f"the checkpoint holds no copy of the weights for {name}, which the configuration needs now; set "
                    "optim and algorithm as in the run's config.yaml"
                )
            copy.load(rank_state["averages"][name])
        self.collector.load(state["batches"], rank_state["pending"])
        self.controls.load(state["controls"])
        self.guards.load(state["guards"]["outside"])
        self.engine.lr_factor = state["guards"]["lr_factor"]
        unscored, idle = state.get("monitors", (0, [0, 0]))  # missing in checkpoints of earlier versions
        self.unscored_monitor.load(unscored)
        self.zero_gradient_monitor.load(idle)
        self.preparation.memory = state["memory"]
        self.preparation.modules.load(rank_state["modules"])
        if isinstance(self.task, RewardingTask):
            self.task.rewards.load(rank_state["rewards"])
        self.step, self.best = state["step"], state["best"]
        self.bad_steps, self.accuracies = state["bad_steps"], state["accuracies"]
        self.run.drop_after(self.step)


def due(step: int, every: int, last: int | None = None) -> bool:
    """Returns whether an action is due after `step` that is done every `every` steps (0: never) and after `last`."""
    return step == last or (every > 0 and step % every == 0)
