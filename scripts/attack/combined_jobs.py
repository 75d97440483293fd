"""Jobs that `resume.py` kills besides its simple ones. Each combines several parts that have a state or a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.whole_runs.parts import IMAGES, ROBOTS, TINY

SPREAD = "{name: 'tests.whole_runs.parts:spread'}"


def no_more(run: Path) -> list[str]:
    return []


@dataclass(frozen=True)
class Job:
    """A job that is killed.

    files: writes what the run needs beside its directory, and returns the options that name it. tolerance: of the
    largest difference of a weight from those of an uninterrupted run; 0: equal to the bit, metrics too.
    """

    base: Path
    options: tuple[str, ...] = ()
    ranks: int = 1
    files: Callable[[Path], list[str]] = no_more
    tolerance: float = 0.0


def warm_start(base: Path) -> Callable[[Path], list[str]]:
    """Returns what writes the configuration of a warm start beside a run: four steps of the same job, of another
    seed."""

    def written(run: Path) -> list[str]:
        tree = yaml.safe_load(base.read_text()) | {"run_dir": str(run.with_suffix(".base")), "steps": 4, "seed": 7}
        tree["checkpoint"] = {"every": 1, "best": False}
        path = run.with_suffix(".base.yaml")
        path.write_text(yaml.safe_dump(tree))
        return ["model.build=null", f"model.warm_start={path}"]

    return written


ISOLATED = "task.rewards=[{name: 'tests.whole_runs.parts:spread', isolated: true, workers: 2}]"
AHEAD = "rollout.workers={count: 2, async_steps: 1}"
SAMPLED = "rollout.sampler=success_window"
REPLAYED = "rollout.extras=[{type: self_imitation, count: 2, accuracy: 0.1}]"
TWO_RANKS = ("engine.zero_stage=2", "engine.timeout=60")  # the last for a rank that is killed before it has come up
VLLM = ("rollout.generator=vllm_server", "rollout.generator.cache_gib=0.1", "rollout.generator.servers=1")

JOBS: dict[str, Job] = {
    "visual QA, isolated rewards": Job(TINY, (ISOLATED,)),
    "images, two workers a step ahead": Job(IMAGES, (AHEAD,)),
    "robots, two workers": Job(ROBOTS, ("task.train_size=6", "rollout.workers={count: 2}")),
    "visual QA, sampler, replays and dynamic sampling": Job(
        TINY, (SAMPLED, REPLAYED, f"task.accuracy={SPREAD}", "rollout.dynamic_sampling={max_rounds: 2}")
    ),
    "visual QA on two ranks": Job(TINY, (*TWO_RANKS, REPLAYED, f"task.accuracy={SPREAD}"), 2),
    "images on two ranks": Job(IMAGES, TWO_RANKS, 2),
    "visual QA, a server of vLLM": Job(TINY, VLLM, tolerance=1e-6),  # it sums in the order in which requests arrive
    "visual QA, in and after a warm start": Job(TINY, files=warm_start(TINY)),
    "robots, in and after a warm start": Job(ROBOTS, ("task.train_size=6",), files=warm_start(ROBOTS)),
}
