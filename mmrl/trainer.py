"""The training loop. `Trainer.train` is the whole algorithm; everything below it is a detail of one of its lines."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl import checkpoints
from mmrl.batches import Batches, awake, total_reward
from mmrl.config import Config
from mmrl.core.advantages import gae, group_advantages
from mmrl.core.correction import correction_weight, effective_sample_size
from mmrl.core.credit import branch_advantages
from mmrl.core.ratios import by_unit, normalised
from mmrl.core.reduce import denominator, reduce
from mmrl.core.regularizers import kl_estimate, token_divergence
from mmrl.core.surrogates import contrast, surrogate
from mmrl.data import rollout_seeds
from mmrl.engine import Engine, Ranks, Shadow, ramp, warmed_up
from mmrl.errors import UserError
from mmrl.kernels import clipped_surrogate
from mmrl.metrics import Metrics, step_line
from mmrl.protocols import Generator, Policy, Task
from mmrl.report.run import Run
from mmrl.rollouts import Replay, Rollouts, Sample


class Trainer:
    def __init__(
        self,
        config: Config,
        policy: Policy,
        task: Task,
        engine: Engine,
        run: Run,
        generator: Generator | None = None,
    ) -> None:
        check_batch(config, engine.world)
        self.config, self.policy, self.task, self.engine, self.run = config, policy, task, engine, run
        self.generator = generator
        self.batches = Batches(config, policy, task, engine, generator)
        self.ema = None if config.optim.ema is None else Shadow(policy.module, warmed_up(config.optim.ema))
        slow = config.algorithm.sampling_policy
        self.sampling_policy = None if slow is None else Shadow(policy.module, ramp(slow.slope, slow.most, slow.start))
        self.step = 0  # finished steps
        self.bad_steps = 0  # skipped updates in a row
        self.best: float | None = None
        self.accuracies: dict[str, float] = {}  # held-out accuracy by step
        self.signalled = False  # this rank got SIGTERM
        self.stopping = False  # some rank did; all ranks learn it at the same step

    def train(self) -> None:
        """Rollout, score, advantages, filter, epochs of minibatches, step, log, evaluate, save."""
        signal.signal(signal.SIGTERM, self._stop)
        if self.step == 0 and self.config.evaluation.before:
            self.evaluate()
        while self.step < self.config.steps and not self.stopping:
            metrics = Metrics(self.engine)
            with metrics.phase("rollout"), applied(self.sampling_policy):
                rollouts = self.batches.next(self.step, metrics)
            rollouts.advantages = self.advantages(rollouts, metrics)
            with metrics.phase("update"):
                for minibatch in self.minibatches(rollouts):
                    self.update(minibatch, metrics)
            if self.sampling_policy is not None:
                self.sampling_policy.update()
            self.step += 1
            self.log(rollouts, metrics)
            if due(self.step, self.config.evaluation.every, self.config.steps):
                self.evaluate()
            self.stopping = bool(self.engine.max(self.signalled))
            if self.stopping or due(self.step, self.config.checkpoint.every):
                self.save()
        self.save_weights("final")

    # --- advantages ---

    def advantages(self, rollouts: Rollouts, metrics: Metrics) -> Tensor:
        """[rollout], from the rewards of all ranks, so that sharding changes nothing."""
        algorithm = self.config.algorithm
        if rollouts.rewards is None:
            return torch.ones(len(rollouts))  # demonstrations
        if algorithm.method == "ppo":
            return self.estimated_advantages(rollouts, metrics)
        if rollouts.nodes is not None:
            total = total_reward(rollouts, self.task.reward_weights)  # a tree lies on one rank
            values = branch_advantages(total, rollouts.group, rollouts.nodes, scale=algorithm.scale)
            return values.masked_fill(self.batches.filler[:, None], 0.0)
        everyone = self.engine.gather((rollouts.rewards, rollouts.group, rollouts.mask.sum(1)))
        rewards, group, lengths = (torch.cat(column) for column in zip(*everyone, strict=True))
        values, stats = group_advantages(
            rewards,
            group,
            baseline=algorithm.baseline,
            scale=algorithm.scale,
            components=algorithm.components,
            weights=torch.tensor(self.task.reward_weights),
            lengths=lengths if algorithm.baseline == "length_weighted" else None,
        )
        metrics.set({f"advantages/{name}": float(value) for name, value in stats.items()})
        first = self.engine.rank * len(rollouts)
        return values[first : first + len(rollouts)].masked_fill(self.batches.filler, 0.0)

    def estimated_advantages(self, rollouts: Rollouts, metrics: Metrics) -> Tensor:
        """[rollout, decision], standardised over the steps of all ranks; leaves the critic's targets in `rollouts`.

        The reward of the task comes with an episode's last step, the simulator's own with each.
        """
        ppo, steps = self.config.algorithm.ppo, rollouts.step_mask
        assert steps is not None and rollouts.step_rewards is not None and rollouts.step_values is not None
        assert rollouts.step_terminated is not None
        rewards = ppo.simulator_reward * rollouts.step_rewards
        last = torch.arange(steps.shape[1]) == steps.sum(1, keepdim=True) - 1
        total = total_reward(rollouts, self.task.reward_weights)
        rewards = rewards + total.nan_to_num(0.0)[:, None].where(last, 0.0)
        values, rollouts.step_returns = gae(
            rewards,
            rollouts.step_values,
            rollouts.step_terminated,
            torch.zeros_like(steps),
            gamma=ppo.gamma,
            lam=ppo.lam,
            mask=steps,
            bootstrap=rollouts.step_bootstrap,
        )
        counted = torch.cat(self.engine.gather(values[steps]))
        values = ((values - counted.mean()) / (counted.std() + 1e-6)).where(steps, 0.0)
        metrics.add("critic/value", rollouts.step_values[steps])
        metrics.add("critic/return", rollouts.step_returns[steps])
        return values.repeat_interleave(rollouts.mask.shape[1] // steps.shape[1], 1)

    # --- updates ---

    def minibatches(self, rollouts: Rollouts) -> Iterator[list[Rollouts]]:
        """Epochs of minibatches, each a list of micro-batches.

        The partition is fixed before the first update and old_logp is computed in it, so the first ratio is exactly 1.
        The order is random, but rollouts of one prompt stay together: a policy may read their prompt once for all.
        """
        algorithm = self.config.algorithm
        if algorithm.mask_truncated:
            cut = torch.tensor([s.truncated for s in rollouts.samples])
            rollouts.mask = rollouts.mask & ~cut[:, None]
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        groups, member = rollouts.group.unique(return_inverse=True)
        order = torch.randperm(len(groups), generator=generator)[member].argsort(stable=True)
        size = self.config.engine.micro_batch
        parts = [
            [rollouts.select(index) for index in part.split(size)] for part in order.tensor_split(algorithm.minibatches)
        ]
        several = algorithm.epochs * algorithm.minibatches > 1 or self.sampling_policy is not None
        for micro in (micro for part in parts for micro in part):
            if several and algorithm.method != "supervised":
                with torch.no_grad(), applied(self.sampling_policy):
                    old = self.policy.replay(micro, self.engine)
                micro.old_logp, micro.old_prediction = old.logp, old.prediction
            if algorithm.kl.coefficient > 0:
                reference = self.policy.reference(micro)
                micro.ref_logp, micro.ref_prediction = reference.logp, reference.prediction
        for _ in range(algorithm.epochs):
            for place in torch.randperm(len(parts), generator=generator).tolist():
                yield parts[place]

    def update(self, minibatch: list[Rollouts], metrics: Metrics) -> None:
        """One optimizer step. A loss or gradient that is not finite skips it; too many in a row end the run."""
        mode = self.config.algorithm.reduce
        total = self.engine.sum(torch.stack([denominator(micro.mask, mode=mode) for micro in minibatch]).sum())
        steps = None
        if self.config.algorithm.method == "ppo":
            steps = self.engine.sum(
                torch.stack([micro.step_mask.sum() for micro in minibatch if micro.step_mask is not None]).sum()
            )
        finite = True
        for micro in minibatch:
            loss, stats = self.loss(micro, total, steps)
            if not loss.isfinite():
                finite = False
                loss = loss * torch.nan  # the engine skips a step whose gradient is not finite, on every rank
            self.engine.backward(loss)
            metrics.add("loss", loss[None] / (self.config.total_updates / self.config.steps), sums=True)
            for name, values in stats.items():
                counted = micro.step_mask if name.startswith("critic/") else micro.mask
                assert counted is not None
                metrics.add(name, values[counted.to(values.device)])
        metrics.set({"lr": self.engine.lr})
        changed, norm = self.engine.step()
        metrics.add("grad_norm", torch.tensor([norm]))
        metrics.add("updates_skipped", torch.tensor([0.0 if changed else 1.0]))
        self.bad_steps = 0 if changed else self.bad_steps + 1
        if changed and self.ema is not None:
            self.ema.update()
        if not changed:
            self._report_bad_step(minibatch, "loss" if not finite else "gradient")

    def loss(self, micro: Rollouts, total: Tensor, steps: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of the loss, and statistics [rollout, decision]; the critic's are [rollout, step].

        total, steps: the denominators of the whole minibatch on all ranks, of decisions and of a critic's steps.
        """
        algorithm = self.config.algorithm
        replay = self.policy.replay(micro, self.engine)
        mask = micro.mask.to(replay.logp.device)
        corrected = self.correct(micro, replay, mask)
        stats: dict[str, Tensor] = {}
        clipped = algorithm.method != "supervised" and algorithm.surrogate == "clip"
        values = torch.zeros_like(replay.logp)
        if algorithm.method == "supervised":
            values = -replay.logp
        elif not clipped:
            values, stats = self.surrogate(micro, replay, mask)
        if replay.weight is not None:
            values = values * replay.weight
        if algorithm.kl.coefficient > 0:
            kl = replay.reference_kl
            if kl is None:
                assert micro.ref_logp is not None
                kl = kl_estimate(replay.logp, micro.ref_logp, kind=algorithm.kl.kind)
            values = values + algorithm.kl.coefficient * kl
            stats["kl"] = kl.detach()
        if algorithm.entropy_coefficient != 0:
            if replay.entropy is None:
                raise UserError(
                    "algorithm.entropy_coefficient is set, but the entropy of this policy's decisions is constant"
                )
            values = values - algorithm.entropy_coefficient * replay.entropy
        if replay.entropy is not None:
            stats["entropy"] = replay.entropy.detach()
        over: dict[str, Any] = {"mode": algorithm.reduce, "total": total, "length": self.policy.max_decisions}
        loss = reduce(values, mask, **over)
        if clipped:
            objective, measured = self.clipped(micro, replay, mask, over)
            loss, stats = objective + loss, stats | measured
        if replay.value is not None and algorithm.method == "ppo":
            error, known = self.value_error(micro, replay.value)
            stats["critic/error"] = error.detach()
            loss = loss + algorithm.ppo.value_coefficient * reduce(error, known, mode="token_mean", total=steps)
        return loss, stats | corrected

    def correct(self, micro: Rollouts, replay: Replay, mask: Tensor) -> dict[str, Tensor]:
        """Gives decisions that another engine sampled their weight in the loss, as `replay.weight`; statistics."""
        if micro.behaviour_logp is None:
            return {}
        old = replay.logp.detach() if micro.old_logp is None else micro.old_logp
        options = self.config.rollout.correction.model_dump(exclude={"max_gap"})
        weight, stats = correction_weight(old, micro.behaviour_logp.to(old.device), mask.to(old.device), **options)
        weight = weight.to(mask.device)
        replay.weight = weight if replay.weight is None else replay.weight * weight
        if replay.routing_differs is not None:
            stats["routing_differs"] = replay.routing_differs
        return {f"correction/{name}": value for name, value in stats.items()}

    def clipped(
        self, micro: Rollouts, replay: Replay, mask: Tensor, over: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`surrogate` of kind clip and its reduction, in one pass. Of the statistics that come with it as means, every
        decision gets the mean."""
        ratio, stats = self.log_ratio(micro, replay, mask)
        assert micro.advantages is not None
        advantages = micro.advantages.to(ratio.device)
        if replay.weight is not None:
            advantages = (advantages[:, None] if advantages.dim() == 1 else advantages) * replay.weight
        low, high = self.config.algorithm.clip_low, self.config.algorithm.clip_high
        loss, means = clipped_surrogate(ratio, advantages, mask, clip_low=low, clip_high=high, **over)
        return loss, stats | {f"surrogate/{name}": mean.expand_as(ratio) for name, mean in means.items()}

    def log_ratio(self, micro: Rollouts, replay: Replay, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """To the policy that made the rollouts, at the level of the algorithm, and statistics; [rollout, decision]."""
        algorithm = self.config.algorithm
        old = replay.logp.detach() if micro.old_logp is None else micro.old_logp
        ratio = replay.logp - old if replay.log_ratio is None else replay.log_ratio
        if algorithm.ratio == "normalised":
            assert replay.divergence is not None and replay.std is not None
            ratio = normalised(ratio, replay.divergence, replay.std)
        ratio = by_unit(ratio, mask, level=algorithm.level, segments=replay.segments)
        stats = {"surrogate/ratio_gap": (ratio.detach().exp() - 1).abs()}
        if replay.divergence is not None:
            stats["surrogate/divergence"] = replay.divergence
        return ratio, stats

    def value_error(self, micro: Rollouts, value: Tensor) -> tuple[Tensor, Tensor]:
        """Squared error of the critic and which steps count, [rollout, step]. Clipped, the worse of the errors of the
        value and of the value kept near what it was (arXiv 1707.06347's released code)."""
        assert micro.step_returns is not None and micro.step_values is not None and micro.step_mask is not None
        parts = (micro.step_returns, micro.step_values, micro.step_mask)
        returns, before, known = (part.to(value.device) for part in parts)
        error = (value - returns).square()
        if (clip := self.config.algorithm.ppo.value_clip) is not None:
            near = before + (value - before).clamp(-clip, clip)
            error = torch.maximum(error, (near - returns).square())
        return error, known

    def surrogate(self, micro: Rollouts, replay: Replay, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Values to minimise and statistics, [rollout, decision]."""
        algorithm = self.config.algorithm
        options: dict[str, Any] = dict(algorithm.surrogate_options)
        assert micro.advantages is not None
        advantages = micro.advantages.to(replay.logp.device)
        if replay.errors is not None:
            values, stats = contrast(*replay.errors, advantages, strength=self.config.denoising.strength, **options)
            measured: dict[str, Tensor] = {}
        else:
            ratio, measured = self.log_ratio(micro, replay, mask)
            if algorithm.surrogate == "divergence_mask":
                old = replay.logp.detach() if micro.old_logp is None else micro.old_logp
                exact = replay.divergence
                options["divergence"] = token_divergence(replay.logp, old) if exact is None else exact
            bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
            values, stats = surrogate(ratio, advantages, kind=algorithm.surrogate, **bounds, **options)
        return values, measured | {f"surrogate/{name}": value for name, value in stats.items()}

    def _report_bad_step(self, minibatch: list[Rollouts], what: str) -> None:
        path = self.run.folder / f"bad-step-{self.step + 1}-rank{self.engine.rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)  # another host's disk may not have the run directory yet
        with path.open("w") as file:
            for micro in minibatch:
                rewards = micro.rewards.tolist() if micro.rewards is not None else [None] * len(micro)
                for sample, reward in zip(micro.samples, rewards, strict=True):
                    row = {"prompt": sample.prompt.id, "response": sample.response, "rewards": reward}
                    file.write(json.dumps(row) + "\n")
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
        """Accuracy on the first evaluation.prompts held-out prompts, by kind too where prompts have one."""
        settings = self.config.evaluation
        self.batches.wait()
        started = time.perf_counter()
        with applied(self.ema), awake(self.generator):
            result, samples = evaluate(self.policy, self.task, self.engine, settings.prompts, self.config)
        accuracy = result["evaluation/accuracy"]
        result["time/evaluation"] = time.perf_counter() - started
        self.run.log(self.step, result)
        self.run.samples(f"evaluation-{self.step:06d}", samples[: self.config.log.samples], {})
        self.run.line(
            f"evaluation at step {self.step}: held-out accuracy {accuracy:.4f} on {int(result['evaluation/n'])}"
        )
        self.accuracies[str(self.step)] = accuracy
        if self.config.checkpoint.best and self.step > 0 and (self.best is None or accuracy > self.best):
            self.best = accuracy
            self.save_weights("best")
        return result

    # --- log, save, resume, stop ---

    def log(self, rollouts: Rollouts, metrics: Metrics) -> None:
        names = self.task.reward_names
        if rollouts.rewards is not None:
            for k, name in enumerate(names):
                metrics.add(f"reward/{name}", rollouts.rewards[:, k])
            metrics.add("unscored", rollouts.rewards.isnan().float())
            for name, measured in self.task.measures(rollouts.samples, rollouts.group).items():
                metrics.add(name, measured)
        if rollouts.accuracy is not None:
            metrics.add("accuracy", rollouts.accuracy)
        for name, count in self.policy.counts().items():
            metrics.add(name, torch.tensor([count]), sums=True)
        values = metrics.result()
        self.judge_engines(values)
        values["throughput/rollouts_per_second"] = self.config.rollouts_per_step / values["time/step"]
        self.run.log(self.step, values)
        self.run.line(step_line(self.step, self.config.steps, values))
        if due(self.step, self.config.log.samples_every):
            shown = rollouts.select(torch.arange(min(self.config.log.samples, len(rollouts))))
            columns = {} if shown.rewards is None else dict(zip(names, shown.rewards.T.tolist(), strict=True))
            assert shown.advantages is not None
            columns["advantage"] = shown.advantages.reshape(len(shown), -1).mean(1).tolist()
            self.run.samples(f"train-{self.step:06d}", shown.samples, columns)

    def judge_engines(self, values: dict[str, float]) -> None:
        """Adds what follows from the step's means. Raises UserError, on all ranks, if the engine that samples and the
        model that is trained are too far apart."""
        if "correction/logp_gap" not in values:
            return
        squared = values.pop("correction/weight_squared")
        values["correction/effective_sample_size"] = effective_sample_size(values["correction/weight"], squared)
        gap, limit = values["correction/logp_gap"], self.config.rollout.correction.max_gap
        if not gap <= limit:
            raise UserError(
                f"step {self.step}: log-probabilities of the sampling engine are {gap:.3g} from the trained model's on "
                f"average, more than rollout.correction.max_gap={limit:g}; try model.dtype=float32, a lower optim.lr, "
                "or rollout.engine=transformers"
            )

    def save(self) -> None:
        cursor, pending = self.batches.untrained()
        state = {
            "cursor": cursor,
            "best": self.best,
            "bad_steps": self.bad_steps,
            "accuracies": self.accuracies,
            "config": self.config.model_dump(mode="json"),
        }
        folder = self.run.folder / "checkpoints"
        own = {name: shadow.state() for name, shadow in self._shadows().items()} | {"pending": pending}
        path = checkpoints.save(folder, self.step, state, own, self.engine, keep=self.config.checkpoint.keep)
        self.run.line(f"saved {path}")

    def save_weights(self, name: str) -> None:
        """Into the run directory, in the library's own format: what evaluation measures, the average where there is
        one."""
        with applied(self.ema):
            checkpoints.save_weights(self.run.folder / name, self.policy, self.engine)

    def _shadows(self) -> dict[str, Shadow]:
        named = {"ema": self.ema, "sampling_policy": self.sampling_policy}
        return {name: shadow for name, shadow in named.items() if shadow is not None}

    def resume(self) -> None:
        """Go on from the newest finished checkpoint of the run directory; raises as `resumable`."""
        path = resumable(self.config, self.run.folder)
        state, own = checkpoints.load(path, self.engine)
        for name, shadow in self._shadows().items():
            shadow.load(own[name])
        self.batches.load(state["cursor"], own["pending"])
        self.step, self.best = state["step"], state["best"]
        self.bad_steps, self.accuracies = state["bad_steps"], state["accuracies"]
        self.run.forget_after(self.step)
        self.run.line(f"resumed from {path}")

    def _stop(self, signum: int, frame: Any) -> None:
        self.signalled = True


def evaluate(
    policy: Policy, task: Task, engine: Ranks, count: int, config: Config
) -> tuple[dict[str, float], list[Sample]]:
    """Held-out accuracy with its standard error, the task's measures, and this rank's samples.

    Every rank takes every world-th prompt.
    """
    settings = config.evaluation
    count = min(count, len(task.evaluation))
    share = -(-count // engine.world)  # equal on all ranks, as ZeRO-3 needs; the surplus is not counted
    indices = [min(engine.rank + i * engine.world, count - 1) for i in range(share)]
    samples: list[Sample] = []
    for start in range(0, share, settings.micro_batch):
        part = indices[start : start + settings.micro_batch]
        seeds = rollout_seeds(config.seed + 1, part, 1)
        prompts = [task.evaluation[i] for i in part]
        samples += policy.respond(prompts, seeds)
    columns = {"accuracy": task.accuracy(samples).nan_to_num(0.0), **task.measures(samples, torch.tensor(indices))}
    rows = [{name: float(values[i]) for name, values in columns.items()} for i in range(share)]
    kinds = [str(s.prompt.metadata.get("kind", "")) for s in samples]
    gathered = engine.gather(list(zip(indices, rows, kinds, strict=True)))
    by_index = {index: (row, kind) for rank in gathered for index, row, kind in rank}
    result = {}
    for name in columns:
        known = [row[name] for row, _ in by_index.values() if not math.isnan(row[name])]
        if known:
            result[f"evaluation/{name}"] = sum(known) / len(known)
    for kind in sorted({kind for _, kind in by_index.values()} - {""}):
        of_kind = [row["accuracy"] for row, k in by_index.values() if k == kind]
        result[f"evaluation/accuracy/{kind}"] = sum(of_kind) / len(of_kind)
    for name, wrong in policy.counts().items():
        result[f"evaluation/{name}"] = float(engine.sum(torch.tensor(wrong)))
    marks = torch.tensor([row["accuracy"] for row, _ in by_index.values()])
    result["evaluation/n"] = float(len(marks))
    result["evaluation/standard_error"] = float(marks.std() / len(marks) ** 0.5) if len(marks) > 1 else 0.0
    return result, samples


def applied(shadow: Shadow | None) -> AbstractContextManager[None]:
    """Inside it the policy computes with averaged weights, where there are any."""
    return nullcontext() if shadow is None else shadow.applied()


def due(step: int, every: int, last: int | None = None) -> bool:
    return step == last or (every > 0 and step % every == 0)


def check_batch(config: Config, world: int) -> None:
    """Raises UserError where the batch can not be divided as asked."""
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.prompts % world:
        raise UserError(f"rollout.prompts={rollout.prompts} can not be shared by {world} ranks; make it a multiple")
    if rollout.partial.extra % world:
        raise UserError(
            f"rollout.partial.extra={rollout.partial.extra} can not be shared by {world} ranks; make it a multiple"
        )
    mine = config.rollouts_per_step // world
    if mine % algorithm.minibatches:
        raise UserError(
            f"{mine} rollouts a rank (rollout.prompts x group_size / ranks) can not be cut into "
            f"algorithm.minibatches={algorithm.minibatches} equal parts"
        )


def resumable(config: Config, folder: Path) -> Path:
    """The newest finished checkpoint of the run directory `folder`.

    Raises UserError if there is none, or it was written under a configuration that trains differently.
    """
    found = checkpoints.finished(folder / "checkpoints")
    if not found:
        raise UserError(f"checkpoint.resume=true, but run_dir={folder} holds no finished checkpoint")
    saved = json.loads((found[-1] / "trainer.json").read_text())["config"]
    check_same_training(saved, config.model_dump(mode="json"), found[-1])
    return found[-1]


def check_same_training(saved: dict[str, Any], now: dict[str, Any], path: Path, prefix: str = "") -> None:
    """Raises UserError naming the first key that differs and that would make the run a different one."""
    free = {"run_dir", "steps", "threads", "evaluation", "checkpoint", "log", "kernels"}
    for key in sorted({*saved, *now} - (free if not prefix else set())):
        name = prefix + key
        before, after = saved.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            check_same_training(before, after, path, name + ".")
        elif before != after:
            raise UserError(
                f"resume with a changed configuration: {name} is {after!r} but {path} was trained with {before!r}; "
                "restore it or start a new run_dir"
            )
