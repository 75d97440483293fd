"""Steps per second of every simulator: alone, in worker processes, in Gymnasium's AsyncVectorEnv, and in two halves.

    .venv/bin/python scripts/bench/simulators.py [--simulators tabletop,maniskill_state] [--rounds 3] [--json PATH]
    .venv/bin/python scripts/bench/simulators.py --parts leaks

speed: ROWS environments with random actions; episodes restart when they end. A step is one action in one environment;
    with a chunk of 8 an observation is made after every eighth action. `in process` is the simulator in this process,
    `workers` the same environments in worker processes, `gymnasium` one environment in each of as many processes of
    AsyncVectorEnv, which has no chunks. They are measured in turns, round after round, so that other work on the
    machine affects all; values are median (smallest .. greatest).
halves: a policy that waits for --policy-ms milliseconds without using the CPU, as one on a GPU does, plays episodes in
    all environments at once, and in two halves, of which one is simulated while it acts for the other.
leaks: memory and open files of this process and its worker before and after a thousand resets.
LIBERO is measured if --libero-python, or this interpreter, can import it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from mmrl.sims import VectorSim, build, run_episodes
from mmrl.sims.vector.workers import Workers

ROWS, PROCESSES, CHUNK = 4, 2, 8
SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "tabletop": ("tabletop", {"image_size": 64, "threads": 1}, "pick_and_place"),
    "maniskill_state": ("maniskill", {}, "PickCube-v1"),
    "maniskill_rgb": ("maniskill", {"observation": "rgb", "image_size": 64}, "PickCube-v1"),
    "libero": ("libero", {"cameras": ["agentview", "robot0_eye_in_hand"]}, "libero_spatial/0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="speed,halves")
    parser.add_argument("--simulators", default="tabletop,maniskill_state,maniskill_rgb")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each measurement")
    parser.add_argument("--policy-ms", type=float, default=30.0)
    parser.add_argument("--libero-python", help="a Python interpreter that can import LIBERO")
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    results: dict[str, Any] = {"load_average": os.getloadavg(), "processors": len(os.sched_getaffinity(0))}
    parts: dict[str, Callable[[str, argparse.Namespace], Any]] = {"speed": speed, "halves": halves, "leaks": leaks}
    for part in options.parts.split(","):
        results[part] = {name: parts[part](name, options) for name in options.simulators.split(",")}
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


def make(name: str, options: argparse.Namespace, rows: int, workers: int = 0, **arguments: Any) -> VectorSim:
    simulator, settings, _ = SETTINGS[name]
    python = options.libero_python if simulator == "libero" else None
    return build(simulator, rows, settings, workers=max(workers, 1) if python else workers, python=python, **arguments)


class OneRow(gymnasium.Env):
    """A simulator's single row as an ordinary environment, for AsyncVectorEnv."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.sim, self.task, self.seed = make(name, options, 1), SETTINGS[name][2], 0
        simulator = self.sim.simulator
        self.action_space = gymnasium.spaces.Box(-1, 1, (simulator.action_dim,))
        self.observation_space = gymnasium.spaces.Dict(
            {
                "image": gymnasium.spaces.Box(0, 255, simulator.image_shape, np.uint8),
                "state": gymnasium.spaces.Box(-np.inf, np.inf, (simulator.state_dim,)),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seed += 1
        return self._seen(self.sim.reset([self.seed], [self.task])), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        step = self.sim.step(action[None, None])
        seen = self._seen(step.observation)
        return seen, float(step.reward[0, 0]), bool(step.terminated.any()), bool(step.truncated.any()), {}

    def close(self) -> None:
        self.sim.close()

    @staticmethod
    def _seen(observation: Any) -> dict[str, np.ndarray]:
        return {"image": observation.images[0], "state": observation.state[0]}


def speed(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Prints the table of one simulator and returns it."""
    task, rng = SETTINGS[name][2], np.random.default_rng(0)
    arms: dict[str, Callable[[], int]] = {}
    closing: list[Callable[[], None]] = []
    for label, workers in (("in process", 0), (f"{PROCESSES} workers", PROCESSES)):
        if workers == 0 and name == "libero" and options.libero_python:
            continue
        sim = make(name, options, ROWS, workers)
        sim.reset([100 + row for row in range(ROWS)], [task] * ROWS)
        closing.append(sim.close)
        for chunk in (1, CHUNK):
            arms[f"{label}, chunk {chunk}"] = stepper(sim, rng, chunk)
    if name != "libero":
        envs = AsyncVectorEnv([lambda: OneRow(name, options)] * PROCESSES, context="spawn")
        envs.reset()
        closing.append(envs.close)
        arms[f"gymnasium, {PROCESSES} processes"] = lambda: (envs.step(envs.action_space.sample()), PROCESSES)[1]
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(options.rounds):
        for arm, move in arms.items():
            taken[arm].append(rate(move, options.seconds))
    for close in closing:
        close()
    print(f"{name}: steps a second")
    for arm, rates in taken.items():
        print(f"  {arm:<24} {statistics.median(rates):8.1f} ({min(rates):.1f} .. {max(rates):.1f})", flush=True)
    return taken


def stepper(sim: VectorSim, rng: np.random.Generator, chunk: int) -> Callable[[], int]:
    def move() -> int:
        actions = rng.uniform(-1, 1, (len(sim), chunk, sim.simulator.action_dim))
        steps = int(sim.step(actions).valid.sum())
        if len(ended := np.flatnonzero(~sim.running)):
            sim.restart(ended.tolist(), [sim.seeds[row] + ROWS for row in ended], [sim.tasks[row] for row in ended])
        return steps

    return move


def rate(move: Callable[[], int], seconds: float) -> float:
    move()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        steps += move()
    return steps / (time.perf_counter() - began)


def halves(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Prints seconds for episodes of all rows, together and in two halves; returns them."""
    task, seeds = SETTINGS[name][2], [200 + row for row in range(ROWS)]
    sims = {"together": make(name, options, ROWS, 2), "in turns": make(name, options, ROWS, 2, turns=2)}
    action_dim, rng = sims["together"].simulator.action_dim, np.random.default_rng(0)

    def act(seen: Any, active: np.ndarray) -> np.ndarray:
        time.sleep(options.policy_ms / 1e3)
        return rng.uniform(-1, 1, (len(active), CHUNK, action_dim))

    taken: dict[str, list[float]] = {arm: [] for arm in sims}
    for _ in range(options.rounds):
        for arm, sim in sims.items():
            began = time.perf_counter()
            run_episodes(sim, seeds, [task] * ROWS, act)
            taken[arm].append(time.perf_counter() - began)
    for sim in sims.values():
        sim.close()
    best = {arm: statistics.median(seconds) for arm, seconds in taken.items()}
    both = f"together {best['together']:.2f} s, in turns {best['in turns']:.2f} s"
    print(f"{name}: {ROWS} episodes, policy {options.policy_ms:g} ms a call: {both}", flush=True)
    return best


def leaks(name: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Prints MiB and open files of the trainer and its worker over a thousand resets; returns them."""
    task, sim = SETTINGS[name][2], make(name, options, 1, 1)
    assert isinstance(sim.simulator, Workers)
    processes = [os.getpid(), sim.simulator.pids[0]]
    rng, found = np.random.default_rng(0), {}
    for resets in (100, 1000):
        for k in range(resets):
            sim.reset([100 + k], [task])
            sim.step(rng.uniform(-1, 1, (1, 2, sim.simulator.action_dim)))
        pages = [
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") for pid in processes
        ]
        files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes]
        found[f"after {resets} more resets"] = [*(round(size / 2**20, 1) for size in pages), *files]
    sim.close()
    print(f"{name}: MiB of trainer and worker, open files of trainer and worker")
    for when, figures in found.items():
        print(f"  {when:<24} {figures}", flush=True)
    return found


if __name__ == "__main__":
    main()
