"""Memory, disk space and time of the replay buffer of robot episodes (rollout.extras=[stored_steps]).

    .venv/bin/python scripts/bench/stored_steps.py [--steps 100000] [--size 64] [--folder FOLDER]

Writes episodes of 20 steps with images of --size x --size pixels, 100 episodes in each training step, until the buffer
has --steps, and samples 64 of them after each training step. Prints the resident memory before and after, in a process
of its own, the disk space of the buffer, and the milliseconds of writing and sampling in a training step.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from mmrl.collection.stored_steps.ring import StepRing
from mmrl.protocols.trajectory import Trajectory

LENGTH, EPISODES, DRAWN = 20, 100, 64
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=64, help="side of an image")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(StepRing(Path(folder), size=options.steps, chosen="all", checkpoints=2), options)


def measure(ring: StepRing, options: argparse.Namespace) -> None:
    rng, chance, process = np.random.default_rng(0), random.Random(0), psutil.Process()
    episodes = [episode(rng, options.size) for _ in range(EPISODES)]  # the same each time: what is measured is the ring
    before, most = process.memory_info().rss, 0
    writing, drawing = [], []
    for _ in range(-(-options.steps // (LENGTH * EPISODES)) + 2):  # two more, so that the oldest leave
        started = time.perf_counter()
        ring.add(episodes, [1.0] * EPISODES)
        written = time.perf_counter()
        ring.draw(chance.choices(range(ring.eligible), k=DRAWN))
        writing.append(written - started)
        drawing.append(time.perf_counter() - written)
        most = max(most, process.memory_info().rss)
    disk = sum(path.stat().st_size for path in ring.folder.iterdir())
    print(f"{ring.eligible} steps, images of {options.size} x {options.size}")
    print(f"resident memory {before / MIB:.0f} MiB before, at most {most / MIB:.0f} MiB; disk {disk / MIB:.0f} MiB")
    middle = (1000 * sorted(times)[len(times) // 2] for times in (writing, drawing))
    print("median of a training step: {:.0f} ms to write, {:.0f} ms to draw".format(*middle))


def episode(rng: np.random.Generator, size: int) -> Trajectory:
    return Trajectory(
        instruction="lift the green cube",
        cameras=("camera",),
        images=rng.integers(0, 256, (LENGTH + 1, size, size, 3), np.uint8),
        state=rng.standard_normal((LENGTH + 1, 20)).astype(np.float32),
        actions=rng.standard_normal((LENGTH, 5, 4)).astype(np.float32),
        valid=np.ones((LENGTH, 5), bool),
        rewards=np.ones(LENGTH, np.float32),
        terminated=True,
        success=True,
    )


if __name__ == "__main__":
    main()
