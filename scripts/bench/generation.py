"""Tokens a second of transformers' generate and of vLLM, and what it costs to give vLLM new weights.

    .venv/bin/python scripts/bench/generation.py [--rounds 5] [--prompts 16] [--group 8] [--length 32] [--width 512]

    one by one     transformers' generate, one row a response
    groups         mmrl's loop over the transformers model, which reads each prompt once for all of its responses
    vllm           the engine beside the model (--placement server: in processes of its own), its caches emptied before
                   every round

The same in all arms: model and weights, prompts and images, sampling at temperature 1 with suppressed tokens, a seed
a response, and exactly `length` tokens a response (end tokens are suppressed too). fp32 unless --dtype says otherwise.
The arms take turns in one process; tokens a second are the median (least .. greatest) over rounds, counted with the
encoding of prompts and images, which is part of generation. Below: seconds of a synchronisation (all weights through
vLLM's update path, caches emptied) and of the probe that follows it.

The default model is the tiny one of the digits task; --width makes a larger one, --model takes a folder or a hub name.
"""

from __future__ import annotations

import argparse
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

from mmrl.build import build_generator, build_policy, build_task
from mmrl.config import Config, load
from mmrl.engine import Ranks
from mmrl.errors import UserError
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.responses import runner
from mmrl.policies.vlm.tiny_qwen import Sizes, write
from mmrl.tasks.visual_qa.data.digits import CELL
from mmrl.tasks.visual_qa.tiny.model import build_tokenizer

CONFIG = Path(__file__).resolve().parents[2] / "configs/warm_starts/vlm/visual_qa_digits_warm_start.yaml"


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.width:
        options.model = tempfile.mkdtemp(prefix="mmrl-generation-")
        write(options.model, build_tokenizer(), Sizes(patch=CELL, width=options.width, layers=options.layers), seed=0)
    config = configuration(options)
    ranks = Ranks()
    try:
        task = build_task(config)
        policy = build_policy(config, task)
        assert isinstance(policy, VisionLanguagePolicy) and task.train is not None
        policy.module.to(ranks.device)
        endless(policy)
        generator = build_generator(config, policy, task, ranks)
        assert generator is not None
        prompts = [task.train[i] for i in range(options.prompts)]
        result = measure(policy, generator, prompts, options)
        generator.close()
    except UserError as error:
        raise SystemExit(f"generation.py: {error}") from None
    finally:
        ranks.close()
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def configuration(options: argparse.Namespace) -> Config:
    """Of a GRPO job whose prompts, policy and engines are measured; nothing is trained."""
    overrides = [
        f"run_dir={tempfile.gettempdir()}/mmrl-generation",
        f"model.dtype={options.dtype}",
        "algorithm.type=grpo",
        f"rollout.max_response_length={options.length}",
        f"rollout.generator.type=vllm_{options.placement}",
        f"rollout.generator.max_sequences={options.prompts * options.group}",
    ]
    if options.model:
        overrides += [f"model.path={options.model}", "model.build=null"]
    if options.dtype == "bfloat16":
        overrides.append("engine.zero_stage=1")
    return load(CONFIG, overrides)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="transformers' generate and vLLM on the same prompts.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--placement", default="colocated", choices=["colocated", "server"])
    parser.add_argument("--model")
    parser.add_argument("--width", type=int, help="measure a model of this width, with --layers layers")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", help="file for the numbers")
    return parser.parse_args(given)


def endless(policy: VisionLanguagePolicy) -> None:
    """End tokens are never sampled."""
    suppressed = (*policy.tokens.suppressed, *policy.eos)
    policy.drafter.sampling = policy.module.sampling = replace(policy.drafter.sampling, suppressed=suppressed)
    policy.module.suppressed = torch.tensor(suppressed, device=policy.runner.device)


def measure(policy: VisionLanguagePolicy, generator: Any, prompts: list[Any], options: Any) -> dict[str, Any]:
    engine, sharing = policy.engine, runner.FAMILIES
    servers = generator.engine.servers if options.placement == "server" else [generator.engine]
    count = options.prompts * options.group

    def arm(*, with_engine: bool, shared: bool) -> Callable[[int], float]:
        def run(number: int) -> float:
            policy.engine = engine if with_engine else None
            runner.FAMILIES = sharing if shared else set()
            if with_engine:
                for own in servers:
                    own.empty_caches()
            started = time.perf_counter()
            made = policy.rollout(prompts, options.group, range(number * count, (number + 1) * count))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            assert int(made.mask.sum()) == count * options.length
            return count * options.length / seconds

        return run

    arms = {
        "one by one": arm(with_engine=False, shared=False),
        "groups": arm(with_engine=False, shared=True),
        "vllm": arm(with_engine=True, shared=True),
    }
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    costs: dict[str, list[float]] = {"synchronise": [], "probe": []}
    gaps = []
    for number in range(options.rounds + 1):  # the first one warms up
        policy.engine, runner.FAMILIES = engine, sharing
        with generator.generation() as measured:
            found = {name: run(number) for name, run in arms.items()}
        if number > 0:
            for name, speed in found.items():
                speeds[name].append(speed)
            for name in costs:
                costs[name].append(measured[f"time/{name}"])
            gaps.append(measured["generation/probe_gap"])
    return {
        "tokens_per_second": {name: spread(values) for name, values in speeds.items()},
        "times_one_by_one": {
            name: spread([a / b for a, b in zip(values, speeds["one by one"], strict=True)])
            for name, values in speeds.items()
        },
        "seconds": {name: spread(values) for name, values in costs.items()},
        "probe_gap": max(gaps),
        "protocol": {k: v for k, v in vars(options).items() if k != "json"},
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }


def spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':<12}{'tokens a second':<34}times one by one"]
    for name, values in result["tokens_per_second"].items():
        ratio = result["times_one_by_one"][name]
        lines.append(
            f"{name:<12}{f'{values[0]:.0f} ({values[1]:.0f} .. {values[2]:.0f})':<34}"
            f"{ratio[0]:.2f} ({ratio[1]:.2f} .. {ratio[2]:.2f})"
        )
    for name, values in result["seconds"].items():
        lines.append(f"{name:<12}{values[0]:.3f} s ({values[1]:.3f} .. {values[2]:.3f})")
    return "\n".join([*lines, f"largest difference of log-probabilities in a probe: {result['probe_gap']:.2g}"])


if __name__ == "__main__":
    main()
