"""Recomputes log-probabilities of responses of unequal lengths: packed or padded, sorted by length or not.

    .venv/bin/python scripts/bench/packing.py [--rounds 3] [--rows 64] [--micro 8] [--threads 1]

Prompts have 600 tokens; lengths of responses are log-normal, 380 on average and at most 1024. Each layout uses the same
rows and the same tiny Qwen2.5-VL (text only; 4 layers, width 256), with the policy's own `replay`, forward and
backward, micro-batches of --micro rows, and activation checkpointing. Each runs in a process of its own, in turns.
Prints CPU seconds (the least of the rounds) and the growth of peak memory over what the process had before.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ARMS = ("packed, as drawn", "packed, longest first", "padded, longest first", "padded, as drawn")
FIRST = ARMS[0]  # with which the others are compared
PROMPT, MEAN, CAP, SPREAD = 600, 380.0, 1024, 0.8  # tokens; the logarithm's standard deviation


def lengths(rows: int) -> list[int]:
    """Returns lengths of responses, log-normal of mean MEAN before those above CAP are cut."""
    draw = random.Random(0)
    centre = math.log(MEAN) - SPREAD**2 / 2
    return [min(CAP, max(1, round(draw.lognormvariate(centre, SPREAD)))) for _ in range(rows)]


def measure(arm: str, rows: int, micro: int, threads: int) -> dict[str, float]:
    """Returns processor seconds and MiB of one pass over all rows."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mmrl.policies.vlm.loading import recompute_activations
    from mmrl.policies.vlm.policy import VisionLanguagePolicy
    from mmrl.policies.vlm.prompts import RolloutTokens
    from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write
    from mmrl.rollouts import Prompt

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        write(folder, train_tokenizer(["0 1 2 3 4 5 6 7 8 9"] * 10, 300), Sizes(width=256, layers=4), 0)
        model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    recompute_activations(model)
    policy = VisionLanguagePolicy(
        model, processor, max_prompt_length=PROMPT, max_response_length=CAP, packing=arm.startswith("packed")
    )
    token = policy.tokens.tokenizer.convert_tokens_to_ids("1")
    drawn = lengths(rows)
    order = range(rows) if arm.endswith("as drawn") else sorted(range(rows), key=drawn.__getitem__, reverse=True)
    parts = []
    for start in range(0, rows, micro):
        prompts = [Prompt(str(i), "1") for i in list(order)[start : start + micro]]
        tokens = [
            RolloutTokens(torch.full((PROMPT,), token), torch.full((drawn[int(prompt.id)],), token), {}, {})
            for prompt in prompts
        ]
        parts.append(policy.tokens.rollouts(prompts, tokens, 1))
    policy.replay(parts[-1].select(torch.tensor([0])), policy.module).logp.sum().backward()  # kernels are loaded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    total = 0.0
    for part in parts:
        logp = policy.replay(part, policy.module).logp.sum()
        logp.backward()
        total += float(logp.detach())
    spent = time.process_time() - begun
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": spent, "mib": grown / 1024, "logp": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arm", choices=ARMS, help="measure this layout only, in this process")
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options.arm, options.rows, options.micro, options.threads)))
        return
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    sizes = ["--rows", str(options.rows), "--micro", str(options.micro), "--threads", str(options.threads)]
    for _ in range(options.rounds):
        for arm in ARMS:
            command = [sys.executable, str(Path(__file__)), "--arm", arm, *sizes]
            found[arm].append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
    drawn = lengths(options.rows)
    print(f"{options.rows} responses of {statistics.mean(drawn):.0f} tokens on average, {options.micro} at once")
    print("| replay | processor s | of the first | MiB at the peak | of the first | sum of logp |")
    print("| --- | --- | --- | --- | --- | --- |")
    least = {arm: min(one["seconds"] for one in rounds) for arm, rounds in found.items()}
    mib = {arm: statistics.median(one["mib"] for one in rounds) for arm, rounds in found.items()}
    for arm in ARMS:
        seconds, memory = least[arm] / least[FIRST], mib[arm] / mib[FIRST]
        logp = found[arm][0]["logp"]
        print(f"| {arm} | {least[arm]:.1f} | {seconds:.2f} | {mib[arm]:.0f} | {memory:.2f} | {logp:.2f} |")


if __name__ == "__main__":
    main()
