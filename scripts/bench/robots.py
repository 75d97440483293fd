"""Environment steps a second of the tabletop, and how often its experts succeed; side by side in one run.

    .venv/bin/python scripts/bench/robots.py [--parts environment,experts,policy,replay] [--rounds 5] [--json PATH]

environment: 16 environments under random actions, episodes restarting as they end, for each image size and number
    of threads. A step is one action executed in one environment. With a chunk of 1 every step is rendered, with a chunk
    of 8 every eighth. The arms take turns, round after round, so that a busy machine burdens all of them; figures are
    the median (least .. greatest) over the rounds. `CPU ms` is processor time for one step, all threads together.
experts: success over seeds and the mean number of steps to it, per task.
policy: actions a second with a small policy in the loop, 64 environments at once; half of them are made to end after
    their first chunk, as solved ones do. Only environments that are still on go through simulator and policy, against
    all of them through the policy.
replay: forward and backward over 128 looks. A flow head over a frozen Qwen3-VL that keeps what the backbone said,
    against reading again; and the likelihood of 20 action tokens from hidden states, the 256 action columns of a
    vocabulary of 151,936 against all of them (time, and the growth of peak memory, each in a process of its own).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.kernels import hidden_logprob
from mmrl.policies.vla.heads.head import ActionSampling
from mmrl.policies.vla.loading import open_policy
from mmrl.policies.vla.policy import VisionLanguageActionPolicy, to_robot_units
from mmrl.policies.vla.settings import ActionChain, ActionHead, Actions, FlowActions, TokenActions
from mmrl.policies.vla.settings import VisionLanguageActionModel as Model
from mmrl.rollouts import Prompt
from mmrl.samplers.settings import RandomStart
from mmrl.schedules.schedule import constant
from mmrl.sims import VectorSim, build, run_episodes
from mmrl.sims.mujoco import TASKS
from mmrl.tasks.manipulation import tiny_model

COUNT = 16
SIZES, THREADS, CHUNKS = (64, 128), (1, 2), (1, 8)
TASK = "pick_and_place"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="environment,experts,policy,replay")
    parser.add_argument("--tokens", choices=["columns", "all"], help=argparse.SUPPRESS)  # one measurement of `replay`
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each measurement")
    parser.add_argument("--seeds", type=int, default=100, help="number of episodes of each expert")
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tokens:
        print(json.dumps(tokens(options.tokens, options.rounds)))
        return
    results: dict[str, Any] = {"load_average": os.getloadavg(), "processors": len(os.sched_getaffinity(0))}
    parts = {
        "environment": lambda: environment(options.rounds, options.seconds),
        "experts": lambda: experts(options.seeds),
        "policy": lambda: in_the_loop(options.rounds),
        "replay": lambda: replay(options.rounds),
    }
    for part in options.parts.split(","):
        results[part] = parts[part]()
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


def environment(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Prints the table of steps a second and returns its rows."""
    sims = {(size, threads): make(size, threads) for size in SIZES for threads in THREADS}
    arms = [(*arm, chunk) for arm in sims for chunk in CHUNKS]
    taken: dict[tuple[int, int, int], list[tuple[float, float]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for size, threads, chunk in arms:
            taken[size, threads, chunk].append(measure(sims[size, threads], chunk, seconds))
    for sim in sims.values():
        sim.close()
    print("| pixels | threads | chunk | steps/s | CPU ms | against 1 thread |\n| --- | --- | --- | --- | --- | --- |")
    rows = []
    for size, threads, chunk in arms:
        speed, cost = zip(*taken[size, threads, chunk], strict=True)
        ratio = [mine / base for mine, (base, _) in zip(speed, taken[size, 1, chunk], strict=True)]
        rows.append({"pixels": size, "threads": threads, "chunk": chunk, "steps_per_s": speed, "cpu_ms": cost})
        cells = (summary(speed, ".0f"), summary(cost, ".2f"), summary(ratio, ".2f"))
        print(f"| {size} | {threads} | {chunk} | {' | '.join(cells)} |")
    return rows


def make(size: int, threads: int) -> VectorSim:
    options = {"image_size": size, "threads": threads, "end_on_success": False}
    sim = build("tabletop", COUNT, options)
    sim.reset(range(COUNT), [TASK] * COUNT)
    measure(sim, 1, 0.2)
    return sim


def measure(sim: VectorSim, chunk: int, seconds: float) -> tuple[float, float]:
    """Steps a second and milliseconds of processor time a step."""
    rng, steps = np.random.default_rng(0), 0
    start, processor = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        steps += int(sim.step(rng.uniform(-1, 1, (COUNT, chunk, 4))).valid.sum())
        if len(ended := np.flatnonzero(~sim.running)):
            sim.restart(ended.tolist(), [sim.seeds[row] + COUNT for row in ended], [TASK] * len(ended))
    return steps / (time.perf_counter() - start), 1000 * (time.process_time() - processor) / steps


def summary(values: Any, form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


def experts(seeds: int) -> list[dict[str, Any]]:
    """Prints the table of the experts' success and returns its rows."""
    print(f"\n| task | success over {seeds} seeds | mean steps | limit |\n| --- | --- | --- | --- |")
    rows = []
    with build("tabletop", seeds, {"image_size": 8}) as sim:
        for name, task in TASKS.items():
            success, length = run_episodes(
                sim, range(seeds), [name] * seeds, lambda _, active: sim.expert(active, length=8)
            )
            steps = float(length[success].mean()) if success.any() else float("nan")
            rows.append({"task": name, "success": float(success.mean()), "steps": steps})
            print(f"| {name} | {success.mean():.3f} | {steps:.1f} | {task.max_steps} |")
    return rows


def policy_of(make_model: Any, sim: VectorSim, head: ActionHead, model: Model) -> VisionLanguageActionPolicy:
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, seed=0)
        return open_policy(
            folder,
            model,
            Actions(head=head),
            sim,
            critic=None,
            seed=0,
            max_prompt_length=1024,
            temperature=constant(1.0),
            evaluation_temperature=0.0,
        )


def in_the_loop(rounds: int, rows: int = 64) -> dict[str, Any]:
    """Prints actions a second with and without leaving ended episodes out, and returns them."""
    sim = build("tabletop", rows, {"image_size": 64})
    policy = policy_of(tiny_model.build_small, sim, TokenActions(bins=32), Model())
    taken: dict[str, list[float]] = {"running only": [], "all rows": []}
    for _ in range(rounds):
        for arm, speeds in taken.items():
            observation = sim.reset(range(rows), ["reach"] * rows)
            start, moved, look = time.perf_counter(), 0, 0
            while (running := sim.running).any():
                active = np.flatnonzero(running if arm == "running only" else np.ones(rows, bool)).tolist()
                shown = observation.select(active)
                with torch.no_grad():
                    reading = policy.module.encode(policy.collate(policy.prepare(shown)))
                    state = torch.from_numpy(shown.state)
                    drawn = ActionSampling([look * rows + row for row in active])
                    chosen = policy.module.head.act(reading, state, drawn)
                actions = np.zeros((len(sim), *chosen["actions"].shape[1:]))
                actions[active] = to_robot_units(chosen["actions"], policy.normalizer)
                step = sim.step(actions)
                moved, look, observation = moved + int(step.valid.sum()), look + 1, step.observation
                if look == 1:
                    sim._running[: rows // 2] = False  # as if solved
            speeds.append(moved / (time.perf_counter() - start))
    sim.close()
    ratio = [mine / all_ for mine, all_ in zip(taken["running only"], taken["all rows"], strict=True)]
    print("\n| rows that the policy looks at | actions/s |\n| --- | --- |")
    for arm, speeds in taken.items():
        print(f"| {arm} | {summary(speeds, '.0f')} |")
    print(f"\nratio {summary(ratio, '.2f')}")
    return taken


def replay(rounds: int) -> dict[str, Any]:
    """Prints the table of the two comparisons and returns its numbers."""
    sim = build("tabletop", 32, {"image_size": 64})
    window = ActionChain(window=RandomStart(size=1))
    head = FlowActions(width=64, depth=2, steps=5, evaluation_steps=5, likelihood=window)
    frozen = Model(freeze=["vision", "connector", "language"])
    policies = {"kept": policy_of(tiny_model.build, sim, head, frozen)}
    policies["read again"] = policy_of(tiny_model.build, sim, head, frozen)
    policies["read again"].caches_prefixes = False
    starts = [Prompt(str(i), "", metadata={"task": "reach", "seed": i}) for i in range(32)]
    played = {arm: policy.rollout(starts, 1, list(range(32))) for arm, policy in policies.items()}
    taken: dict[str, list[float]] = {arm: [] for arm in policies}
    for _ in range(rounds):
        for arm, policy in policies.items():
            start = time.perf_counter()
            policy.replay(played[arm], policy.module).logp.sum().backward()
            taken[arm].append(time.perf_counter() - start)
    sim.close()
    ratio = [again / kept for kept, again in zip(taken["kept"], taken["read again"], strict=True)]
    looks = sum(map(len, played["kept"].inputs))
    print(f"\n| replay of {looks} looks, forward and backward | seconds |\n| --- | --- |")
    for arm, seconds in taken.items():
        print(f"| flow head, frozen backbone, {arm} | {summary(seconds, '.3f')} |")
    print(f"\nratio {summary(ratio, '.2f')}\n\n| 128 x 20 action tokens | seconds | extra MiB |\n| --- | --- | --- |")
    found: dict[str, Any] = {"prefix": taken}
    for arm in ("columns", "all"):
        command = [sys.executable, __file__, "--tokens", arm, "--rounds", str(rounds)]
        found[arm] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"| {arm} | {summary(found[arm]['seconds'], '.3f')} | {found[arm]['mib']:.0f} |")
    return found


def tokens(arm: str, rounds: int, width: int = 256, vocabulary: int = 151_936) -> dict[str, Any]:
    """Seconds and growth of peak memory of the likelihood of 128 x 20 action tokens, forward and backward."""
    weight = torch.randn(vocabulary, width, requires_grad=True)
    hidden = torch.randn(128 * 20, width, requires_grad=True)
    targets = torch.randint(vocabulary - 256, vocabulary, (128 * 20,))
    weight.grad = torch.zeros_like(weight)
    before, taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(rounds):
        start = time.perf_counter()
        columns = (vocabulary - 256, vocabulary) if arm == "columns" else None
        hidden_logprob(hidden, weight, targets, columns=columns, chunk=512).logp.sum().backward()
        taken.append(time.perf_counter() - start)
    return {"seconds": taken, "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


if __name__ == "__main__":
    main()
