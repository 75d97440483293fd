"""Compares updates that torch.compile compiles (engine.compile) with plain ones, side by side.

    .venv/bin/python scripts/bench/compiled.py [--rounds 5] [--only text,images] [--threads 1]

text: a Qwen2.5-VL of four layers and width 256 with activation checkpointing, 8 rollouts of a prompt with an image and
about 200 tokens of response. images: a DiT of six blocks and width 256, 8 images of 64 patches, 4 denoising steps each.
Both engines learn from the same rollouts in one process, in turns: a round is an update of each, with old
log-probabilities, a backward pass and an optimizer step. Prints processor seconds of an update (the median of the
rounds, after one that is not counted), and the seconds that the first, compiling update took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

Update = Callable[[], float]
BACKENDS = ("none", "inductor")


def updates(policy: Any, engine: Any, rollouts: Any) -> Update:
    """Returns a function that makes one update and returns the mean log-probability before it."""

    def update() -> float:
        with torch.no_grad():
            old = policy.replay(rollouts, engine).logp
        logp = policy.replay(rollouts, engine).logp
        ratio = (logp - old).exp()
        loss = -(ratio[rollouts.mask] * torch.linspace(-1, 1, int(rollouts.mask.sum()))).mean()
        engine.backward(loss)
        engine.step()
        return float(logp.detach()[rollouts.mask].mean())

    return update


def text(backend: str) -> Update:
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mmrl.engine import Engine
    from mmrl.engine.settings import AdamW, EngineSettings
    from mmrl.policies.vlm.loading import pack_images, recompute_activations
    from mmrl.policies.vlm.policy import VisionLanguagePolicy
    from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write
    from mmrl.rollouts import Prompt

    with tempfile.TemporaryDirectory() as folder:
        write(folder, train_tokenizer(["0 1 2 3 4 5 6 7 8 9"] * 10, 300), Sizes(width=256, layers=4), 0)
        model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    pack_images(model)
    recompute_activations(model)
    policy = VisionLanguagePolicy(model, processor, max_prompt_length=128, max_response_length=256)
    prompts = [Prompt(str(row), "<image>1 2 3", (Image.new("RGB", (64, 64)),)) for row in range(8)]
    token = policy.tokens.tokenizer.convert_tokens_to_ids("1")
    read = enumerate(policy.tokens.encode(prompts))
    rows = [replace(one, response=torch.full((180 + 5 * row,), token)) for row, one in read]
    engine = Engine(policy.module, AdamW(lr=1e-3), EngineSettings(compile=backend))
    return updates(policy, engine, policy.tokens.rollouts(prompts, rows, 1))


def images(backend: str) -> Update:
    from mmrl.engine import Engine
    from mmrl.engine.settings import AdamW, EngineSettings
    from mmrl.policies.diffusion import small
    from mmrl.policies.diffusion.policy import DiffusionPolicy
    from mmrl.policies.diffusion.settings import Denoising
    from mmrl.rollouts import Prompt

    config = small.SmallDiffusionConfig(words=("one", "two"), size=16, network="transformer", width=256, depth=6)
    with tempfile.TemporaryDirectory() as folder:
        small.create(Path(folder), config, 0)
        policy = DiffusionPolicy(small.load(Path(folder), dtype="float32"), Denoising(steps=4, evaluation_steps=4))
    rollouts = policy.rollout([Prompt("0", "one"), Prompt("1", "two")], 4, range(8))
    return updates(policy, Engine(policy.module, AdamW(lr=1e-3), EngineSettings(compile=backend)), rollouts)


JOBS: dict[str, Callable[[str], Update]] = {"text": text, "images": images}


def measure(job: str, rounds: int) -> dict[str, Any]:
    """Returns processor seconds of updates by backend, and what the first compiled one took in seconds."""
    update = {backend: JOBS[job](backend) for backend in BACKENDS}
    first = {}
    for backend, one in update.items():
        begun = time.perf_counter()
        one()
        first[backend] = time.perf_counter() - begun
        one()
    spent: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    means: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(rounds):
        for backend, one in update.items():
            begun = time.process_time()
            means[backend].append(one())
            spent[backend].append(time.process_time() - begun)
    gap = max(abs(a - b) for a, b in zip(*means.values(), strict=True))
    return {"job": job, "first": first, "spent": spent, "gap": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = []
    print("| update | plain, processor s | compiled | ratio | first compiled update, s | largest gap of mean logp |")
    print("| --- | --- | --- | --- | --- | --- |")
    for job in options.only.split(","):
        one = measure(job, options.rounds)
        found.append(one)
        plain, compiled = (statistics.median(one["spent"][backend]) for backend in BACKENDS)
        ratio, first = compiled / plain, one["first"]["inductor"]
        print(f"| {job} | {plain:.3f} | {compiled:.3f} | {ratio:.2f} | {first:.0f} | {one['gap']:.1e} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
