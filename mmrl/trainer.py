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
from mmrl.engine import EMA, Engine, Interruption, applied, ramp, warmed_up
from mmrl.engine.snapshot import AdaptersOff, Snapshot, start_of
from mmrl.errors import UserError
from mmrl.evaluation.evaluate import evaluate, worth
from mmrl.generation.correction import corrected
from mmrl.monitors.guards import Guards
from mmrl.protocols.checks import check_loss, check_values
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
    def __init__(
        self,
        config: Config,
        policy: Policy,
        task: Task,
        engine: Engine,
        run: Run,
        generator: SyncedGenerator | None = None,
    ) -> None:
        check_batch(config, engine.world)
        self.config, self.policy, self.task, self.engine, self.run = config, policy, task, engine, run
        self.generator = generator
        self.algorithm, self.needs, self.controls = config.algorithm, config.needs, Schedules(config)
        self.collector = Collector(config, policy, task, engine, generator)
        self.ema = None if config.optim.ema is None else EMA(policy.module, warmed_up(config.optim.ema))
        slow = self.algorithm.slow_sampling
        self.sampling_policy = None if slow is None else EMA(policy.module, ramp(slow.slope, slow.most, slow.start))
        reference = self.needs.reference
        self.reference: Snapshot | AdaptersOff | None = None
        if reference is not None:
            self.reference = start_of(policy.module, stays=not reference.moves, zero_stage=engine.zero_stage)
        self.preparation = Preparation(config, policy, task, engine, self.sampling_policy, self.reference)
        self.algorithm.start(policy, engine)
        self._reward_states()  # one that no checkpoint can hold is named now
        self.step = 0  # finished steps
        self.bad_steps = 0  # skipped updates in a row
        self.guards = Guards(config.guards)
        self.unscored_monitor = UnscoredMonitor(config.rollout.longest_silence)
        self.zero_gradient_monitor = ZeroGradientMonitor(config.rollout.max_idle_steps)
        self.best: float | None = None
        self.accuracies: dict[str, float] = {}  # held-out accuracy by step
        self.saver = checkpoints.Saver(run.folder / "checkpoints", config.checkpoint, engine, run.line)
        self.interruption = Interruption()  # SIGTERM or Ctrl-C, on this rank
        self.stopping = 0  # the number of the signal that any rank got; all ranks learn it at the same step
        self.ends = False  # whether a program requested the end, see `Job.stop`
        self.work: Work | None = None  # the progress of the training
        self.line_interval = Interval(config.log.lines_every, at_once=True)  # between printed step lines

    def train(self) -> None:
        with self.interruption, self.saver, display.work("training", self.config.steps, self.step, lines=False) as work:
            self.work = work
            try:
                self.loop()
            finally:
                self.collector.give_up()
                self.collector.close()

    def loop(self) -> None:
        """Runs the steps: rollouts, advantages, epochs of minibatches, log, evaluate, save."""
        if self.step == 0 and self.config.evaluation.before:
            self.evaluate()
        while self.step < self.config.steps and not (self.stopping or self.ends):
            metrics = Metrics(self.engine, Workload.of(self.policy, self.algorithm.epochs, self.config.model.dtype))
            with metrics.phase("rollout"), applied(self.sampling_policy):
                rollouts = self.collector.next(self.step, metrics)
            with metrics.phase("update"):
                shuffle = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
                minibatches, batch = self.preparation.minibatches(rollouts, self.step, shuffle, metrics)
                for minibatch in self.preparation.epochs(minibatches, shuffle):
                    if self.algorithm.should_stop_early(self.update(minibatch, metrics)):
                        break
            self.collector.observe(batch)
            if self.sampling_policy is not None:
                self.sampling_policy.update()
            self.step += 1
            self.log(batch.rollouts, metrics)
            if due(self.step, self.config.evaluation.every, self.config.steps):
                self.evaluate()
            self.stopping = self.engine.max(self.interruption.signum)
            self.ends = bool(self.engine.max(int(self.ends)))
            self.saver.poll()
            if self.stopping or self.ends or (self.guards.all_in_band and due(self.step, self.config.checkpoint.every)):
                self.save()
        self.saver.finish()
        if self.step >= self.config.steps:
            self.save_weights("final")

    # --- updates ---

    def update(self, minibatch: Minibatch, metrics: Metrics) -> dict[str, float]:
        """Performs one optimizer step. Returns means of the statistics that the algorithm watches. A loss or gradient
        that is not finite skips it; too many in a row end the run."""
        denominators = [self.algorithm.denominators(micro) for micro in minibatch]
        totals = {
            name: self.engine.sum(torch.stack([part[name] for part in denominators]).sum()) for name in denominators[0]
        }
        loss_parts: list[dict[str, Tensor]] = []
        watched = {name: torch.zeros(2) for name in self.algorithm.early_stop_statistics}  # sum and count
        for micro in minibatch:
            parts, stats = self.losses(micro, totals)
            loss = torch.stack(list(parts.values())).sum()
            loss_parts.append({name: part.detach() for name, part in (*parts.items(), ("loss", loss))})
            # The engine skips a step whose gradient is not finite, on every rank. The loss is not read here, since that
            # would wait for the GPU.
            loss = loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
            self.engine.backward(loss)
            metrics.add("loss", loss[None] / self.algorithm.updates, sums=True)
            for mask, columns in self.by_mask(stats, micro):
                metrics.add_all(columns, where=mask)
                for name in watched.keys() & columns.keys():
                    watched[name] += torch.stack([columns[name].where(mask, 0.0).sum(), mask.sum()]).cpu()
        metrics.set({"lr": self.engine.lr})
        changed, norm = self.engine.step()
        metrics.add("grad_norm", torch.tensor([norm]))
        metrics.add("updates", torch.tensor([1.0 / self.engine.world]), sums=True)  # all ranks make it together
        metrics.add("updates_skipped", torch.tensor([0.0 if changed else 1.0]))
        self.bad_steps = 0 if changed else self.bad_steps + 1
        if changed and self.ema is not None:
            self.ema.update()
        if not changed:
            wrong = (name for parts in reversed(loss_parts) for name, part in parts.items() if not part.isfinite())
            self._report_bad_step(minibatch, next(wrong, "gradient"))
        sums = {name: self.engine.sum(values) for name, values in watched.items()}
        return {name: float(total / count.clamp(min=1)) for name, (total, count) in sums.items()}

    def by_mask(self, stats: dict[str, Tensor], micro: Rollouts) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Groups statistics by the mask of the entries that they are averaged over: (bool mask, statistics by name)."""
        groups: dict[tuple[int, torch.device], tuple[Tensor, dict[str, Tensor]]] = {}
        for name, values in stats.items():
            counted = self.algorithm.statistic_mask(name, micro)
            check_values(f"the statistic {name}", values, counted.shape)
            groups.setdefault((id(counted), values.device), (counted, {}))[1][name] = values
        return [(counted.to(device), columns) for (_, device), (counted, columns) in groups.items()]

    def losses(self, micro: Rollouts, totals: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns this micro-batch's parts of the loss by origin, 0-d each, and statistics, [rollout, decision] by
        default. totals: the algorithm's denominators, summed over the minibatch and all ranks."""
        replay = self.policy.replay(micro, self.engine)
        context = ReplayedContext(self.policy, self.engine, self.step)
        for measurement in self.needs.replayed:
            replay.extras[measurement.name] = measurement.measure(micro, context)
        stats = {} if micro.behaviour_logp is None else corrected(micro, replay, self.config.correction)
        weigh_objective(micro, replay)
        over = self.algorithm.reduction(micro, totals, self.policy.max_decisions, replay.logp.device)
        loss, more = self.algorithm.objective(micro, replay, over)
        key = f"algorithm.type={self.algorithm.type}"
        check_loss(key, loss)
        parts = {f"loss of {key}": loss}
        stats |= more
        for i, term in enumerate(self.algorithm.terms):
            values, more = term.values(micro, replay)
            name = f"algorithm.terms.{i} ({term.type})"
            check_values(name, values, micro.mask.shape)
            parts[name] = over(values)
            stats |= {
                f"{statistic}/{i}" if statistic in stats else statistic: tensor for statistic, tensor in more.items()
            }
        if replay.entropy is not None:
            stats["entropy"] = replay.entropy.detach()
        return parts, stats

    def _report_bad_step(self, minibatch: Minibatch, what: str) -> None:
        """Saves the rollouts of an update that was skipped, and prints where. Raises UserError after
        engine.max_bad_steps in a row."""
        path = self.run.skipped_update(self.step + 1, self.engine.rank, minibatch)
        ids = ", ".join(sorted({s.prompt.id for micro in minibatch for s in micro.samples})[:3])
        self.run.line(
            f"step {self.step + 1}: {what} not finite, update skipped; its rollouts ({ids}, ...) are in {path}"
        )
        if self.bad_steps >= self.config.engine.max_bad_steps:
            raise UserError(
                f"{self.bad_steps} updates in a row had a {what} that is not finite; lower optim.lr or look at {path}"
            )

    # --- evaluation ---

    def evaluate(self) -> dict[str, float]:
        """Evaluates the first evaluation.prompts held-out prompts, also by kind where prompts have one. Returns
        metrics."""
        self.collector.pause_prefetch()
        self.engine.mark("evaluation")
        started = time.perf_counter()
        with applied(self.ema), synced(self.generator) as measured:
            count = self.config.evaluation.prompts
            result, samples, marks = evaluate(self.collector.sampling, self.task, self.engine, count, self.config)
        result["time/evaluation"] = time.perf_counter() - started
        result |= {f"evaluation/{name}": value for name, value in measured.items() if not name.startswith("time/")}
        self.run.log(self.step, result)
        self.run.samples("evaluation", self.step, samples[: self.config.log.samples], {"accuracy": marks})
        self.run.line(evaluation_line(self.step, result))
        if "evaluation/accuracy" in result:
            self.accuracies[str(self.step)] = result["evaluation/accuracy"]
        self.guards.judge(result, self, evaluation=True)
        if self.config.checkpoint.best and self.step > 0:
            value = worth(result, self.config.checkpoint)
            if value > (-math.inf if self.best is None else self.best):
                self.best = value
                self.save_weights("best")
        return result

    # --- what guards may do ---

    def line(self, text: str) -> None:
        self.run.line(text)

    def scale_lr(self, factor: float) -> None:
        self.engine.lr_factor *= factor

    def go_back(self) -> str:
        """Restores weights and optimizer of the newest checkpoint, but not step, prompts and schedules. Returns its
        name."""
        self.saver.finish()
        return checkpoints.go_back(self.saver.folder, self.engine, self._copies(), self.line)

    # --- log, save, resume, stop ---

    def log(self, rollouts: Rollouts, metrics: Metrics) -> None:
        """Logs a step: metrics of all ranks, guards, monitors, and from time to time samples."""
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
        if (idle := self.zero_gradient_monitor.judge(self.step, values)) is not None:
            self.run.line(idle)
        if due(self.step, self.config.log.samples_every):
            shown = rollouts.select(whole_groups(rollouts.group, self.config.log.samples))
            names, rewards = self.task.reward_names, shown.rewards
            columns = {} if rewards is None else dict(zip(names, rewards.T.tolist(), strict=True))
            assert shown.advantages is not None
            columns["advantage"] = shown.advantages.mean(1).tolist()
            self.run.samples("train", self.step, shown.samples, columns)

    def print_step_line(self, values: dict[str, float]) -> None:
        """Prints the line of a step: of the first, the last, and others every log.lines_every seconds."""
        if self.work is not None:
            self.work.advance()
        if self.line_interval.due() or self.step == self.config.steps:
            left = None if self.work is None else self.work.left
            self.run.line(step_line(self.step, self.config.steps, values, left))

    def judge_generator(self, values: dict[str, float]) -> None:
        """Adds the effective sample size. Raises UserError, on all ranks, if log-probabilities of the generator are too
        far from the trained model's."""
        if "correction/logp_gap" not in values:
            return
        squared = values.pop("correction/weight_squared")
        values["correction/effective_sample_size"] = effective_sample_size(values["correction/weight"], squared)
        gap, limit = values["correction/logp_gap"], self.config.correction.max_gap
        if not gap <= limit:
            generator: Any = self.config.generator
            raise UserError(
                f"step {self.step}: log-probabilities of the sampling engine are {gap:.3g} from the trained model's on "
                f"average, more than {generator.where}.correction.max_gap={limit:g}; try model.dtype=float32, a lower "
                f"optim.lr, or {generator.instead}"
            )

    def save(self) -> None:
        shared, pending = self.collector.state()
        state = {
            "best": self.best,
            "bad_steps": self.bad_steps,
            "accuracies": self.accuracies,
            "controls": self.controls.state(),
            "guards": {"outside": self.guards.state(), "lr_factor": self.engine.lr_factor},
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
        return self.task.rewards.state() if isinstance(self.task, RewardingTask) else {}

    def save_weights(self, name: str) -> None:
        """Writes the weights that evaluation measures (the EMA, if any) to the folder `name` of the run directory, in
        the library's own format."""
        with applied(self.ema):
            origin = checkpoints.origin_of(self.step, plain(self.config))
            checkpoints.save_weights(self.run.folder / name, self.policy, self.engine, origin)

    def _copies(self) -> dict[str, EMA | Snapshot]:
        named: dict[str, EMA | Snapshot | None] = {"ema": self.ema, "sampling_policy": self.sampling_policy}
        if isinstance(self.reference, Snapshot) and self.needs.reference is not None and self.needs.reference.moves:
            named["reference"] = self.reference  # else it is the start of the run
        return {name: copy for name, copy in named.items() if copy is not None}

    def resume(self) -> None:
        """Resumes from the newest intact checkpoint of the run directory; with checkpoint.resume=auto starts where
        there is none. Raises as `checkpoints.resume`."""
        required = self.config.checkpoint.resume is True
        restored = checkpoints.resume(
            self.saver.folder, plain(self.config), self.engine, self.run.line, required=required
        )
        if restored is None:
            self.run.forget_after(-1)
            return
        state, rank_state = restored
        for name, copy in self._copies().items():
            if name not in rank_state["averages"]:
                raise UserError(f"the checkpoint has no weights of {name}, which a changed key asks for; restore it")
            copy.load(rank_state["averages"][name])
        self.collector.load(state["batches"], rank_state["pending"])
        self.controls.load(state["controls"])
        self.guards.load(state["guards"]["outside"])
        self.engine.lr_factor = state["guards"]["lr_factor"]
        self.preparation.memory = state["memory"]
        self.preparation.modules.load(rank_state["modules"])
        if isinstance(self.task, RewardingTask):
            self.task.rewards.load(rank_state["rewards"])
        self.step, self.best = state["step"], state["best"]
        self.bad_steps, self.accuracies = state["bad_steps"], state["accuracies"]
        self.run.forget_after(self.step)


def due(step: int, every: int, last: int | None = None) -> bool:
    return step == last or (every > 0 and step % every == 0)
