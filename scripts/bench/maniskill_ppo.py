"""PPO on a task of ManiSkill from states: this repository's recipe beside ManiSkill's own, to equal success.

    .venv/bin/python scripts/bench/maniskill_ppo.py [--task PushCube-v1] [--seeds 0,1,2] [--arms maniskill,ours]
    .venv/bin/python scripts/bench/maniskill_ppo.py --task PickCube-v1 --seeds 0 --every 50000 --most 1000000 --curves
    .venv/bin/python scripts/bench/maniskill_ppo.py --rounds 5 --most 12800    # how fast, in rounds; no evaluations

Each arm of each seed is a process of its own, one after the other, with one thread and no worker processes. The peer is
`ManiSkillPPO` below, written from the hyper-parameters and the recipe that ManiSkill publishes for its `ppo.py` (Tao et
al. 2024, after CleanRL). Both play the same environments (states, pd_joint_delta_pos, dense reward, 50 actions), both
are evaluated on the same held-out start states (--prompts of them, likeliest actions) every --every environment steps,
by the same simulator code. Seconds are of the processor and leave evaluations out. A run ends at the success rate
--until, or after --most environment steps. Prints a Markdown table of the environment steps and seconds until held-out
success first reached 0.8 and 0.9, and with --curves one of every evaluation; the curves go to --out as JSON.

With --rounds the arms only run to --most environment steps, in turns: how long a start takes, and the environment steps
of a second of the processor after the first update, as the median of the rounds and their extremes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmrl.build import build_engine, build_policy, build_task
from mmrl.config import load, to_yaml
from mmrl.report.run import Run
from mmrl.rollouts import Rollouts
from mmrl.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
CONTROL = "pd_joint_delta_pos"
MARKS = (0.8, 0.9)
Curve = list[dict[str, float]]  # environment steps, seconds of the processor, held-out success


@dataclass(frozen=True)
class Compared:
    """What the arms need to know of a task.

    recipe: mmrl's, in configs/vla. length: actions of each of the peer's environments in an update. ManiSkill publishes
    2048 environments of 20 actions for PushCube, 1024 of 50 for PickCube, and 32 minibatches for both. On a CPU both
    updates are smaller by the same factor, 12.8, in 8 minibatches.
    """

    recipe: str
    length: int


TASKS = {
    "PushCube-v1": Compared("manipulation_maniskill_pushcube", 200),
    "PickCube-v1": Compared("manipulation_maniskill_pickcube_states", 250),
}


def main() -> None:
    options = parser().parse_args()
    if options.out is None:
        options.out = ROOT / "build/maniskill_ppo" / options.task
    if options.one is not None:
        arm, seed = options.one.split(",")
        ARMS[arm](int(seed), options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    print(rates(options) if options.rounds else learning(options))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="PushCube-v1")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--arms", default="maniskill,ours")
    parser.add_argument("--until", type=float, default=0.9, help="a run ends at this held-out success rate")
    parser.add_argument("--most", type=int, default=260_000, help="or after this number of environment steps")
    parser.add_argument("--every", type=int, default=12_800, help="environment steps between two evaluations")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--curves", action="store_true", help="also print success and seconds at each evaluation")
    parser.add_argument(
        "--rounds", type=int, default=0, help="number of rounds that measure speed; 0: measure learning"
    )
    parser.add_argument("--out", type=Path, help="default: build/maniskill_ppo/TASK")
    parser.add_argument("--one", help="NAME,SEED: run this one in this process")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE: overrides of mmrl's recipe")
    return parser


def learning(options: argparse.Namespace) -> str:
    """Returns a table of the steps and seconds to each mark; with --curves also a table of evaluations for each seed.
    Runs what --out has no curve of yet."""
    marks = " | ".join(f"steps to {mark} | seconds to {mark}" for mark in MARKS)
    lines = [f"| arm | seed | {marks} | best | last | steps a second |", "|" + " --- |" * (5 + 2 * len(MARKS))]
    evaluations = list[str]()
    for seed in options.seeds.split(","):
        curves = dict[str, Curve]()
        for arm in options.arms.split(","):
            curves[arm] = known_curve(arm, seed, options)
            if not ended(curves[arm], options):
                run(arm, seed)
                curves[arm] = known_curve(arm, seed, options)
            lines.append(row(arm, seed, curves[arm]))
        evaluations += ["", f"Seed {seed}:", "", curve_table(curves)]
    return "\n".join(lines + evaluations if options.curves else lines)


def known_curve(arm: str, seed: str, options: argparse.Namespace) -> Curve:
    """Returns the curve in --out up to the evaluation that ends a run with these options. A run that was killed, or had
    a lower --most, left a curve that does not end."""
    file = options.out / f"{arm}-{seed}.json"
    points = json.loads(file.read_text()) if file.is_file() else []
    ends = [i for i in range(len(points)) if ended(points[: i + 1], options)]
    return points[: ends[0] + 1] if ends else points


def ended(curve: Curve, options: argparse.Namespace) -> bool:
    return bool(curve) and (curve[-1]["success"] >= options.until or curve[-1]["steps"] >= options.most)


def curve_table(curves: dict[str, Curve]) -> str:
    """Returns a table with a row for each evaluation, "-" after an arm's last one."""
    heads = " | ".join(f"steps of {arm} | success | seconds" for arm in curves)
    lines = [f"| evaluation | {heads} |", "|" + " --- |" * (1 + 3 * len(curves))]
    for i in range(max(map(len, curves.values()))):
        cells = [str(i + 1)]
        for curve in curves.values():
            if i < len(curve):
                cells += [f"{curve[i]['steps']:,.0f}", f"{curve[i]['success']:.2f}", f"{curve[i]['seconds']:.0f}"]
            else:
                cells += ["-"] * 3
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(arm: str, seed: str) -> None:
    again = [sys.executable, *sys.orig_argv[1:], "--one", f"{arm},{seed}"]
    subprocess.run(again, check=True, stdout=sys.stderr, env=os.environ | {"OMP_NUM_THREADS": "1"})


def rates(options: argparse.Namespace) -> str:
    """A table of the arms' speed; every round has a seed of its own."""
    arms = options.arms.split(",")
    started: dict[str, list[float]] = {arm: [] for arm in arms}
    speed: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(options.rounds):
        for arm in arms:
            run(arm, str(turn))
            first, *_, last = json.loads((options.out / f"{arm}-{turn}.json").read_text())
            speed[arm].append((last["steps"] - first["steps"]) / (last["seconds"] - first["seconds"]))
            started[arm].append(first["seconds"] - first["steps"] / speed[arm][-1])
    lines = ["| arm | steps a second | times the first arm | seconds of the start |", "| --- | --- | --- | --- |"]
    for arm in arms:
        ratios = [own / other for own, other in zip(speed[arm], speed[arms[0]], strict=True)]
        cells = [spread(speed[arm], 0), spread(ratios, 2), spread(started[arm], 1)]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float], digits: int) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} .. {most:.{digits}f})"


def row(arm: str, seed: str, curve: Curve) -> str:
    cells = [arm, seed]
    for mark in MARKS:
        first = next((point for point in curve if point["success"] >= mark), None)
        cells += ["-", "-"] if first is None else [f"{first['steps']:,.0f}", f"{first['seconds']:.0f}"]
    last, best = curve[-1], max(point["success"] for point in curve)
    cells += [f"{best:.2f}", f"{last['success']:.2f}", f"{last['steps'] / last['seconds']:.0f}"]
    return "| " + " | ".join(cells) + " |"


class Curves:
    """Held-out success over environment steps, written as it grows."""

    def __init__(self, arm: str, seed: int, options: argparse.Namespace) -> None:
        self.file, self.options = options.out / f"{arm}-{seed}.json", options
        self.points: Curve = []
        self.outside, self.started = 0.0, time.process_time()  # seconds that do not count

    @property
    def seconds(self) -> float:
        return time.process_time() - self.started - self.outside

    def due(self, steps: int) -> bool:
        return steps >= self.options.every * (len(self.points) + 1)

    def add(self, steps: int, seconds: float, success: float) -> bool:
        """Whether the arm is done."""
        self.points.append({"steps": float(steps), "seconds": seconds, "success": success})
        print(f"{self.file.stem}: {steps} steps, {seconds:.0f} s, held-out success {success:.2f}", flush=True)
        self.file.write_text(json.dumps(self.points, indent=2))
        return ended(self.points, self.options)


class Pace(Curves):
    """Seconds over environment steps, noted after each update; success is not looked at."""

    def due(self, steps: int) -> bool:
        self.points.append({"steps": float(steps), "seconds": self.seconds})
        return steps >= self.options.most

    def add(self, steps: int, seconds: float, success: float) -> bool:
        self.file.write_text(json.dumps(self.points, indent=2))
        return True


def observed(arm: str, seed: int, options: argparse.Namespace) -> Curves:
    return (Pace if options.rounds else Curves)(arm, seed, options)


# --- ManiSkill's own recipe ---


class ActorCritic(nn.Module):
    """Two separate networks of three tanh layers of 256, orthogonal weights; the actor's last layer starts near 0, and
    the spread is one learned number an action."""

    def __init__(self, state: int, action: int) -> None:
        super().__init__()
        self.critic, self.actor = tower(state, 1, math.sqrt(2)), tower(state, action, 0.01 * math.sqrt(2))
        self.log_std = nn.Parameter(torch.full((action,), -0.5))

    def distribution(self, state: Tensor) -> torch.distributions.Normal:
        mean = self.actor(state)
        return torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean))

    def value(self, state: Tensor) -> Tensor:
        return self.critic(state).squeeze(-1)


def tower(state: int, out: int, last_gain: float) -> nn.Sequential:
    sizes, layers = [state, 256, 256, 256], list[nn.Module]()
    for a, b in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [orthogonal(nn.Linear(a, b), math.sqrt(2)), nn.Tanh()]
    return nn.Sequential(*layers, orthogonal(nn.Linear(256, out), last_gain))


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ManiSkillPPO:
    """An update is 16 environments of 200 or 250 actions, 8 epochs of 8 minibatches of single actions; Adam at 3e-4,
    gamma 0.8, lambda 0.9, clip 0.2, no entropy bonus, gradients clipped at 0.5, an end once the KL estimate of a
    minibatch is above 0.1, advantages standardised in each minibatch. An environment starts anew where an episode ends,
    solved or not, and the critic's word stands for what would have followed."""

    envs, epochs, minibatches = 16, 8, 8
    gamma, lam, clip, target_kl, value_weight = 0.8, 0.9, 0.2, 0.1, 0.5

    def __init__(self, task: str, seed: int) -> None:
        import gymnasium as gym
        import mani_skill.envs  # noqa: F401
        from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

        from mmrl.sims.maniskill.driver import choose_device

        choose_device()
        self.length = TASKS[task].length

        def make() -> Any:
            made = gym.make(
                task,
                obs_mode="state",
                control_mode=CONTROL,
                reward_mode="normalized_dense",
                sim_backend="physx_cpu",
                render_backend="none",
            )
            return CPUGymWrapper(made, ignore_terminations=False, record_metrics=False)

        self.sim = gym.vector.SyncVectorEnv(
            [make for _ in range(self.envs)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
        )
        torch.manual_seed(seed)
        state, _ = self.sim.reset(seed=[(1 << 20) + 1000 * seed + i for i in range(self.envs)])
        self.state = torch.from_numpy(np.asarray(state, np.float32))
        space: Any = self.sim.single_action_space
        self.low, self.high = space.low, space.high
        self.net = ActorCritic(self.state.shape[1], len(self.low))
        self.optim = torch.optim.Adam(self.net.parameters(), lr=3e-4, eps=1e-5)
        self.steps = 0

    def update(self) -> None:
        played = self.play()
        advantages, returns = self.estimate(played)
        flat = {name: values.flatten(0, 1) for name, values in played.items()}
        self.learn(flat["state"], flat["action"], flat["logp"], advantages.flatten(), returns.flatten())

    @torch.no_grad()
    def play(self) -> dict[str, Tensor]:
        """[time, environment, ...]; `next`: the value of what followed, of an episode's last observation where one
        ended; `ended`."""
        kept: dict[str, list[Tensor]] = {
            name: [] for name in ("state", "action", "logp", "reward", "value", "next", "ended")
        }
        for _ in range(self.length):
            distribution = self.net.distribution(self.state)
            action = distribution.sample()
            value = self.net.value(self.state)
            shown, reward, terminated, truncated, info = self.sim.step(np.clip(action.numpy(), self.low, self.high))
            ended = terminated | truncated
            followed = np.asarray(shown, np.float32).copy()
            for row in np.flatnonzero(ended):
                followed[row] = info["final_obs"][row]
            now = {
                "state": self.state,
                "action": action,
                "logp": distribution.log_prob(action).sum(-1),
                "reward": torch.from_numpy(np.asarray(reward, np.float32)),
                "value": value,
                "next": self.net.value(torch.from_numpy(followed)),
                "ended": torch.from_numpy(ended),
            }
            for name, values in now.items():
                kept[name].append(values)
            self.state = torch.from_numpy(np.asarray(shown, np.float32))
            self.steps += self.envs
        return {name: torch.stack(values) for name, values in kept.items()}

    def estimate(self, played: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Finite-horizon GAE: the mean of the n-step advantages up to the end of what was seen, weighted by lam^n and
        divided by the sum of these weights."""
        weight = earned = valued = torch.zeros(self.envs)
        found = []
        for t in reversed(range(self.length)):
            on = (~played["ended"][t]).float() if t + 1 < self.length else torch.zeros(self.envs)
            weight = 1 + self.lam * weight * on
            earned = weight * played["reward"][t] + self.lam * self.gamma * earned * on
            valued = self.gamma * played["next"][t] + self.lam * self.gamma * valued * on
            found.append((earned + valued) / weight - played["value"][t])
        advantages = torch.stack(found[::-1])
        return advantages, advantages + played["value"]

    def learn(self, state: Tensor, action: Tensor, before: Tensor, advantages: Tensor, returns: Tensor) -> None:
        for _ in range(self.epochs):
            for rows in torch.randperm(len(state)).chunk(self.minibatches):
                distribution = self.net.distribution(state[rows])
                log_ratio = distribution.log_prob(action[rows]).sum(-1) - before[rows]
                ratio = log_ratio.exp()
                if float((ratio - 1 - log_ratio).detach().mean()) > self.target_kl:
                    return
                a = advantages[rows]
                a = (a - a.mean()) / (a.std() + 1e-8)
                surrogate = torch.maximum(-a * ratio, -a * ratio.clamp(1 - self.clip, 1 + self.clip)).mean()
                error = 0.5 * (self.net.value(state[rows]) - returns[rows]).square().mean()
                self.optim.zero_grad()
                (surrogate + self.value_weight * error).backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
                self.optim.step()

    @torch.no_grad()
    def act(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.net.actor(torch.from_numpy(state)).clamp(-1, 1).numpy()


def maniskill(seed: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    curves = observed("maniskill", seed, options)
    peer, task = ManiSkillPPO(options.task, seed), held_out(options.task, options.prompts)
    while True:
        peer.update()
        if curves.due(peer.steps):
            seconds, started = curves.seconds, time.process_time()
            success = 0.0 if options.rounds else task(peer.act)
            curves.outside += time.process_time() - started
            if curves.add(peer.steps, seconds, success):
                return


def held_out(name: str, count: int) -> Callable[[Callable[[NDArray[np.float32]], NDArray[np.float32]]], float]:
    """Success of a policy of states on the start states that our recipe for the task `name` holds out."""
    from mmrl.sims.vector.episodes import run_episodes

    task: Any = build_task(recipe(name, 0, []))
    rows = 20
    sim = task.make_simulator(rows)  # its environments are made when they are first used, in an evaluation
    starts = [task.evaluation[i].metadata for i in range(count)]

    def success(act: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> float:
        solved = []
        for first in range(0, count, rows):
            part = starts[first : first + rows]
            won, _ = run_episodes(
                sim, [s["seed"] for s in part], [s["task"] for s in part], lambda shown, _: act(shown.state)[:, None]
            )
            solved.append(won[: len(part)])
        return float(np.concatenate(solved).mean())

    return success


# --- ours ---


def recipe(task: str, seed: int, overrides: list[str]) -> Any:
    one_core = ["task.workers=0", "task.turns=1", "threads=1", f"seed={seed}"]
    return load(ROOT / "configs/vla" / f"{TASKS[task].recipe}.yaml", [*one_core, *overrides])


def ours(seed: int, options: argparse.Namespace) -> None:
    folder = options.out / f"run-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    curves = observed("ours", seed, options)
    own = ["steps=1000000", "evaluation.every=1", "evaluation.before=false", f"evaluation.prompts={options.prompts}"]
    config = recipe(options.task, seed, [*own, "checkpoint.every=0", "checkpoint.best=false", *options.overrides])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = build_task(config)
    policy = build_policy(config, task)
    engine = build_engine(config, policy)
    run = Run(folder, to_yaml(config), writes=True)
    CountedTrainer(config, policy, task, engine, run, curves).train()
    run.close()
    engine.close()


class CountedTrainer(Trainer):
    """Evaluates where `Curves` asks for it, and ends with it."""

    def __init__(self, config: Any, policy: Any, task: Any, engine: Any, run: Any, curves: Curves) -> None:
        super().__init__(config, policy, task, engine, run)
        self.curves, self.steps = curves, 0

    def log(self, rollouts: Rollouts, metrics: Any) -> None:
        super().log(rollouts, metrics)
        self.steps += sum(sample.episode.length for sample in rollouts.samples if sample.episode is not None)

    def evaluate(self) -> dict[str, float]:
        if not self.curves.due(self.steps):
            return {}
        seconds, started = self.curves.seconds, time.process_time()
        result = {"evaluation/accuracy": 0.0} if isinstance(self.curves, Pace) else super().evaluate()
        self.curves.outside += time.process_time() - started
        if self.curves.add(self.steps, seconds, result["evaluation/accuracy"]):
            self.interruption.signum = signal.SIGTERM
        return result


ARMS: dict[str, Callable[[int, argparse.Namespace], None]] = {"maniskill": maniskill, "ours": ours}

if __name__ == "__main__":
    main()
