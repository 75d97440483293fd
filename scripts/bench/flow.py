"""Network evaluations an image and seconds a step of the ways to train a flow model, side by side in one run.

    .venv/bin/python scripts/bench/flow.py [--rounds 5] [--prompts 4] [--group 8] [--model PATH] [--json PATH]

Every arm trains the same model on the same prompts: draw prompts x group images, replay them with gradient, step
AdamW. Rewards cost nothing here (advantages are drawn), so this is the price of the algorithm alone.

    full + CFG     Flow-GRPO: all steps of the chain stochastic and trained, classifier-free guidance
    full           the same without guidance
    window + CFG   two stochastic, trained steps a group, guidance
    window         the same without guidance
    contrast       DiffusionNFT: an ODE chain, then `draws` noise levels of the final image
    matching       AWM: the same with the matching likelihood

An evaluation is one image-sized pass through the network: forward in sampling, forward in replay (also the guided
half, which has no gradient), and backward, which costs about two. The arms take turns, round after round; seconds are
the median (least .. greatest). Then the replay of all steps in one pass against one pass a step: same rollouts, same
loss, same gradient, forward and backward.

The default model is the small perceptron of the shapes task; --model takes a diffusers pipeline, or a small model.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmrl.core.contrast import contrast, implicit_errors
from mmrl.core.surrogates import surrogate
from mmrl.policies.diffusion.family import Family
from mmrl.policies.diffusion.loading import load
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.settings import (
    Denoising,
    DiffusionModel,
    ImageChain,
    ImageContrast,
    ImageMatching,
)
from mmrl.rollouts import Prompt, Rollouts
from mmrl.samplers.settings import RandomStart
from mmrl.tasks.image_generation.tiny import model as tiny_model

WINDOW = ImageChain(window=RandomStart(size=2, last=6))
ARMS = {
    "full + CFG": Denoising(guidance=4.5),
    "full": Denoising(),
    "window + CFG": Denoising(likelihood=WINDOW, guidance=4.5),
    "window": Denoising(likelihood=WINDOW),
    "contrast": Denoising(likelihood=ImageContrast()),
    "matching": Denoising(likelihood=ImageMatching()),
}


class Counter:
    """Rows that went through the network, by phase and by whether a gradient will come back."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.rows = {"sampling": 0, "replay": 0, "backward": 0}
        self.phase = "sampling"
        module.register_forward_hook(self._count)

    def _count(self, module: Any, arguments: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        self.rows[self.phase] += len(tensor)
        if tensor.requires_grad:
            self.rows["backward"] += len(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            tiny_model.build_shapes(folder, seed=0)
        family = load(options.model or folder, DiffusionModel())
    family.module.to(options.device)
    prompts = [Prompt(str(i), f"{n} red circles") for i, n in enumerate(("two", "three", "four", "two"))]
    prompts = [prompts[i % 4] for i in range(options.prompts)]
    arms = {name: step_of(family, settings, prompts, options.group) for name, settings in ARMS.items()}
    found = measure(arms, options.rounds)
    report: dict[str, Any] = {
        "device": device(options.device),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    print(" ".join(f"{k} {v}" for k, v in report.items()))
    print("\n| arm | sampling | replay | backward | seconds a step | against full + CFG |")
    print("| --- | --- | --- | --- | --- | --- |")
    base = statistics.median(found["full + CFG"]["seconds"])
    for name, result in found.items():
        each = [f"{rows / (options.prompts * options.group):.1f}" for rows in result["rows"].values()]
        print(f"| {name} | {' | '.join(each)} | {spread(result['seconds'])} | {base / median(result):.2f}x faster |")
    replays = {
        "one pass for all steps": replay_of(family, prompts, options.group, batched=True),
        "one pass a step": replay_of(family, prompts, options.group, batched=False),
    }
    timed = measure(replays, options.rounds)
    gap = max(float((a - b).abs().max()) for a, b in zip(*(r["result"] for r in timed.values()), strict=True))
    print("\n| replay of 9 steps, forward and backward | seconds | \n| --- | --- |")
    for name, result in timed.items():
        print(f"| {name} | {spread(result['seconds'])} |")
    print(f"\nlargest difference between their gradients: {gap:.1e}")
    if options.json:
        Path(options.json).write_text(
            json.dumps({**report, "arms": found, "replay": {k: v["seconds"] for k, v in timed.items()}})
        )


def step_of(family: Family, settings: Denoising, prompts: list[Prompt], group: int) -> Callable[[], dict[str, int]]:
    mine = copy.deepcopy(family)
    policy, counter = DiffusionPolicy(mine, settings), Counter(mine.module)
    optimizer = torch.optim.AdamW(mine.module.parameters(), lr=1e-4)
    advantages = torch.randn(len(prompts) * group, generator=torch.Generator().manual_seed(0)).to(policy.device)

    def step() -> dict[str, int]:
        counter.rows = dict.fromkeys(counter.rows, 0)
        counter.phase = "sampling"
        rollouts = policy.rollout(prompts, group, list(range(len(prompts) * group)))
        counter.phase = "replay"
        replay = policy.replay(rollouts, mine.module)
        if isinstance(settings.likelihood, ImageContrast):
            assert replay.extras["matching"] is not None
            values, _ = contrast(*implicit_errors(replay.extras["matching"], 1.0), advantages)
        else:
            assert replay.log_ratio is not None
            values, _ = surrogate(replay.log_ratio, advantages, clip_low=1e-4, clip_high=1e-4)
        optimizer.zero_grad()
        values.mean().backward()
        optimizer.step()
        return counter.rows

    return step


def replay_of(family: Family, prompts: list[Prompt], group: int, *, batched: bool) -> Callable[[], list[torch.Tensor]]:
    """Gradient of the mean logp of fixed rollouts, all steps in one pass or one pass a step."""
    mine = copy.deepcopy(family)
    policy = DiffusionPolicy(mine, Denoising())
    rollouts = policy.rollout(prompts, group, list(range(len(prompts) * group)))
    steps = rollouts.mask.shape[1]
    parts = [rollouts] if batched else [one_step(rollouts, t) for t in range(steps)]

    def run() -> list[torch.Tensor]:
        mine.module.zero_grad()
        for part in parts:
            (policy.replay(part, mine.module).logp.sum() / rollouts.mask.sum()).backward()
        return [p.grad for p in mine.module.parameters() if p.grad is not None]

    return run


def one_step(rollouts: Rollouts, t: int) -> Rollouts:
    inputs = [
        replace(d, points=d.points[t : t + 1], x=d.x[t : t + 1], x_next=d.x_next[t : t + 1]) for d in rollouts.inputs
    ]
    return Rollouts(rollouts.samples, inputs, rollouts.group, rollouts.mask[:, t : t + 1])


def measure(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            started = time.perf_counter()
            result = arm()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number > 0:  # the first round warms up
                found[name]["seconds"].append(time.perf_counter() - started)
            found[name]["rows" if isinstance(result, dict) else "result"] = result
    return found


def median(result: dict[str, Any]) -> float:
    return statistics.median(result["seconds"])


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} .. {max(seconds):.3f})"


def device(name: str) -> str:
    return torch.cuda.get_device_name() if name == "cuda" else f"CPU {platform.machine()}"


if __name__ == "__main__":
    main()
