"""Rollouts per second of conversations with slow environments: stepped while other responses are generated, or not.

    python scripts/bench/turns.py [--rollouts 32] [--turns 4] [--mean 0.2] [--repeats 3]
    python scripts/bench/turns.py --learning [--recipe zoom] [--seeds 3] [--rows zoom,no_tool] [--runs FOLDER]
        [KEY=VALUE ...]

Environments sleep for random times (exponentially distributed, determined by the prompt). Both ways are measured in
turns in one process, on the same prompts and seeds; their conversations are compared, and medians are printed. It also
counts the prompt tokens that an engine with a prefix cache need not read again. --learning measures instead what
recipes with several turns learn, with their controls; see turns_learning.py. --seeds: the number of seeds, or the
seeds: 1,2. KEY=VALUE: further overrides of every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.config import validate
from mmrl.policies.vlm import turns
from mmrl.rollouts import Message, Prompt
from mmrl.settings import option
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings, TurnLimits
from mmrl.tasks.visual_games.tiny_model import build

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import turns_learning  # noqa: E402


class Slow(Environment):
    """Sleeps before each answer."""

    def __init__(self, count: int, mean: float) -> None:
        self.left, self.mean = count, mean

    def start(self, prompt: Prompt) -> list[Message]:
        self.random = np.random.default_rng(prompt.metadata["seed"])
        return [Message("user", (prompt.text,))]

    def step(self, response: str) -> Reply:
        time.sleep(float(self.random.exponential(self.mean)))
        self.left -= 1
        return Reply([Message("user", ("go on",))], end=self.left == 0)


class SlowSettings(EnvironmentSettings):
    """As `type: scripts.bench.turns:SlowSettings`."""

    type: str = "slow"
    count: int = option(4, "turns")
    mean: float = option(0.2, "time of an answer", unit="s")

    def make(self) -> Environment:
        return Slow(self.count, self.mean)


class LockStep(turns.ThreadedSteps):
    """None goes on before all have been answered."""

    def results(self, *, block: bool) -> list[Any]:
        while self.pending and any(not future.done() for _, future in self.pending.values()):
            time.sleep(1e-3)
        return super().results(block=False)


def measured(policy: Any, prompts: list[Prompt], steps: type[turns.ThreadedSteps]) -> tuple[float, Any]:
    policy.drafter.conversations.stepping = lambda: steps(policy.drafter.conversations.at_once)
    started = time.perf_counter()
    rollouts = policy.rollout(prompts, 1, range(len(prompts)))
    return len(prompts) / (time.perf_counter() - started), rollouts


def read_again(rollouts: Any) -> tuple[int, int]:
    """Tokens that turns read without and with a cache of what they have in common with the turn before."""
    whole = new = 0
    for tokens in rollouts.inputs:
        starts = [0, *((~tokens.decision_mask[:-1] & tokens.decision_mask[1:]).nonzero().flatten() + 1).tolist()]
        lengths = [len(tokens.prompt) + start for start in starts]
        whole, new = whole + sum(lengths), new + lengths[-1]
    return whole, new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--mean", type=float, default=0.2, help="mean seconds until an environment replies")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--recipe", choices=list(turns_learning.RECIPES), default="zoom")
    parser.add_argument("--seeds", default="3", help="number of seeds, or the seeds themselves: 1,2")
    parser.add_argument("--rows", help="rows of the table, comma-separated; default: all of --recipe")
    parser.add_argument("--runs", type=Path, default=turns_learning.ROOT / "build" / "turns")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    if asked.learning:
        rows = list(turns_learning.RECIPES[asked.recipe]) if asked.rows is None else asked.rows.split(",")
        seeds = [int(s) for s in asked.seeds.split(",") if s] if "," in asked.seeds else list(range(int(asked.seeds)))
        turns_learning.table(asked.recipe, rows, seeds, asked.runs, asked.overrides)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        build(Path(name))
        tree = {"run_dir": "unset", "model": {"path": name}, "rollout": {"max_response_length": 400}}
        config = validate(tree, "turns.py")
        policy: Any = config.model.load(config, None, name)
    limits = TurnLimits(max_turns=asked.turns + 1, turn_tokens=8)
    settings = SlowSettings(count=asked.turns, mean=asked.mean, limits=limits)
    policy.drafter.converse(settings)
    policy.drafter.conversations.at_once = asked.rollouts  # threads alone: the environments only sleep
    policy.drafter.conversations.make = settings.make
    policy.module.model.get_output_embeddings().register_forward_hook(ending(policy.eos))
    prompts = [Prompt(str(i), "Match the count.", metadata={"seed": i}) for i in range(asked.rollouts)]
    speeds: dict[str, list[float]] = {"while others generate": [], "in lock-step": []}
    ways = dict(zip(speeds, (turns.ThreadedSteps, LockStep), strict=True))
    said = {}
    for _ in range(asked.repeats):
        for way, steps in ways.items():
            speed, rollouts = measured(policy, prompts, steps)
            speeds[way].append(speed)
            said[way] = [tokens.response.tolist() for tokens in rollouts.inputs]
    first, second = (statistics.median(values) for values in speeds.values())
    whole, new = read_again(rollouts)
    print(json.dumps({
        "rollouts_per_second": {way: round(statistics.median(values), 2) for way, values in speeds.items()},
        "ratio": round(first / second, 2),
        "same_conversations": len({json.dumps(rows) for rows in said.values()}) == 1,
        "tokens_read": {"every turn anew": whole, "with a cache of prefixes": new},
    }, indent=2))  # fmt: skip


def ending(eos: tuple[int, ...]) -> Any:
    """A hook by which a random model ends its responses after a few tokens."""

    def hook(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(out.shape[-1])
        bias[list(eos)] = 5.0
        return out + bias

    return hook


if __name__ == "__main__":
    main()
