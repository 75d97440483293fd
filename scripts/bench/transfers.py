"""Seconds to send new weights to vLLM servers, through a folder and by broadcast.

    .venv/bin/python scripts/bench/transfers.py [--rounds 7] [--servers 2] [--width 512] [--layers 8] [--exchange X]

Each way has servers of its own on this host, and both are measured in turns with the same weights. A round sends all
tensors of the trained model to all servers, which empty their caches. Checksums and probes, which are the same for
both, are not included. Prints medians (smallest .. greatest) over the rounds after the first, in which servers start.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mmrl.build import build_generator, build_policy, build_task
from mmrl.config import load
from mmrl.engine import Ranks
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.policies.vlm.tiny_qwen import Sizes, write
from mmrl.tasks.visual_qa.data.digits import CELL
from mmrl.tasks.visual_qa.tiny.model import build_tokenizer

CONFIG = Path(__file__).resolve().parents[2] / "configs/warm_starts/vlm/visual_qa_digits_warm_start.yaml"
WAYS = ("folder", "broadcast")


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    ranks = Ranks()
    with tempfile.TemporaryDirectory(prefix="mmrl-transfers-") as name:
        folder = Path(name)
        write(
            folder / "model", build_tokenizer(), Sizes(patch=CELL, width=options.width, layers=options.layers), seed=0
        )
        made: dict[str, Any] = {}
        try:
            configs = {way: load(CONFIG, overrides(folder, way, options)) for way in WAYS}
            task = build_task(configs["folder"])
            policy = build_policy(configs["folder"], task)
            assert isinstance(policy, VisionLanguagePolicy)
            for way, config in configs.items():
                made[way] = build_generator(config, policy, task, ranks)
            size = sum(len(p.view(-1)) * p.element_size() for p in policy.module.parameters()) / 1e6
            print(f"{size:.0f} MB of weights, {options.servers} servers, {options.threads} threads of training")
            print(table(measured(made, policy, options.rounds)))
        finally:
            for generator in made.values():
                generator.close()
            ranks.close()


def measured(made: dict[str, Any], policy: VisionLanguagePolicy, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round after the first."""
    found: dict[str, list[float]] = {way: [] for way in made}
    for number in range(rounds + 1):
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.mul_(1.001)
        for way, generator in made.items():
            seconds = generator.sync_weights()["time/synchronise"]
            if number > 0:
                found[way].append(seconds)
    return found


def overrides(folder: Path, way: str, options: argparse.Namespace) -> list[str]:
    given = [
        f"run_dir={folder}/{way}",
        "algorithm.type=grpo",
        f"model.path={folder}/model",
        "model.build=null",
        "rollout.generator.type=vllm_server",
        f"rollout.generator.servers={options.servers}",
        f"rollout.generator.transfer={way}",
        "rollout.generator.cache_gib=0.1",
    ]
    return [*given, *([f"rollout.generator.exchange={options.exchange}/{way}"] if options.exchange else [])]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="New weights for vLLM's servers through a folder and broadcast.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--exchange", help="where files of weights lie; default: a temporary folder; /dev/shm is memory"
    )
    return parser.parse_args()


def table(found: dict[str, list[float]]) -> str:
    return "\n".join(
        f"{way:<12}{median(values):.3f} s ({min(values):.3f} .. {max(values):.3f})" for way, values in found.items()
    )


if __name__ == "__main__":
    main()
