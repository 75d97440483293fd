"""Updates of a vision-language model with a frozen vision tower: features of images kept for a step, or computed each
time.

    .venv/bin/python scripts/bench/image_features.py [--rounds 3] [--prompts 8] [--group 8] [--micro 16]

A Qwen2.5-VL whose tower and decoder have four layers each (widths 256), with images of 400 patches. As in a training
step, log-probabilities of all rollouts are computed, then there are two passes of updates over minibatches in random
order, all packed. Each arm runs in a process of its own, in turns. Prints CPU seconds (the least of the rounds) and
the largest difference of a log-probability.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ARMS = ("kept", "computed each time")
SIDE, TOKENS = 160, 60  # pixels of an image; tokens of a response


def measure(arm: str, prompts: int, group: int, micro: int) -> dict[str, Any]:
    """Returns processor seconds of log-probabilities and updates, and the first log-probabilities."""
    import numpy as np
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mmrl.policies.vlm.loading import adapt
    from mmrl.policies.vlm.policy import VisionLanguagePolicy
    from mmrl.policies.vlm.tiny_qwen import Sizes, train_tokenizer, write
    from mmrl.rollouts import Prompt

    torch.set_num_threads(1)
    sizes = Sizes(max_patches=400, width=256, layers=4, vision_width=256, vision_layers=4)
    with tempfile.TemporaryDirectory() as folder:
        write(folder, train_tokenizer(["0 1 2 3 4 5 6 7 8 9"] * 10, 300), sizes, 0)
        model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    adapt(model, "", freeze=["vision", "connector"], lora=None)
    policy = VisionLanguagePolicy(model, processor, max_response_length=TOKENS + 1)
    packed: Any = policy.runner
    packed.should_pack = lambda lengths: True  # responses are equally long, so nothing would be packed
    policy.module.reuses_features = arm == "kept"
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(prompts)]
    questions = [Prompt(str(i), "1", (image,), answer="1" * TOKENS) for i, image in enumerate(images)]
    rollouts = policy.demonstrate([question for question in questions for _ in range(group)])
    first = [row.images for row in rollouts.inputs[::group]]
    for i, row in enumerate(rollouts.inputs):  # as in sampled groups, the rollouts of a prompt share its tensors
        row.images.update(first[i // group])
    begun = time.process_time()
    with torch.no_grad():
        parts = torch.arange(len(rollouts)).split(micro)
        logp = torch.cat([policy.replay(rollouts.select(rows), policy.module).logp for rows in parts])
    for _ in range(2):
        for rows in torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(0)).split(micro):
            policy.replay(rollouts.select(rows), policy.module).logp.sum().backward()
    return {"seconds": time.process_time() - begun, "logp": logp.flatten().tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--micro", type=int, default=16, help="rollouts of a micro-batch")
    parser.add_argument("--arm", choices=ARMS, help="measure this arm only, in this process")
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options.arm, options.prompts, options.group, options.micro)))
        return
    sizes = [f"--{name}={value}" for name, value in vars(options).items() if name in ("prompts", "group", "micro")]
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        for arm in ARMS:
            command = [sys.executable, str(Path(__file__)), "--arm", arm, *sizes]
            found[arm].append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
    least = {arm: min(one["seconds"] for one in rounds) for arm, rounds in found.items()}
    kept, computed = (found[arm][0]["logp"] for arm in ARMS)
    print("| features of images | CPU seconds | of the second row |\n| --- | --- | --- |")
    for arm in ARMS:
        print(f"| {arm} | {least[arm]:.1f} | {least[arm] / least[ARMS[1]]:.2f} |")
    largest = max(abs(a - b) for a, b in zip(kept, computed, strict=True))
    print(f"largest difference of a log-probability: {largest:.1e}")


if __name__ == "__main__":
    main()
