"""How long a step waits for its prompts, with and without processes that read ahead. On the CPU, in minutes.

    python scripts/bench/reading.py --readers 2 --steps 6 --rest 4

Each step needs 64 questions with one JPEG of 1024 x 1024 pixels each. They are decoded and processed as for Qwen2.5-VL:
at most --side x --side pixels in patches of 8 x 8. For the rest of a step, --rest seconds, this process is `idle`, as
if a GPU computed, or `busy` with matrix products in one thread, as if it trained on the CPU. `wait` is the time in
which a step waits for its prompts, `step` its whole time, medians without the first two steps, in which processes
start; `ratio` is the time of a step without reading ahead over that with it. Both read the same files, and the results
are compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

PROMPTS, SIDE = 64, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured steps; two more come before them")
    parser.add_argument("--rest", type=float, default=4, help="idle seconds of a step after its prompts were read")
    parser.add_argument("--side", type=int, default=512, help="side in pixels to which images are scaled for the model")
    parser.add_argument("--rests", nargs="*", default=["idle", "busy"], choices=["idle", "busy"])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mmrl-reading-"))
    draw(folder)
    print("| rest of a step | readers | wait, s | step, s | ratio |\n| --- | --- | --- | --- | --- |")
    for rest in options.rests:
        found = {readers: steps(folder, readers, rest == "busy", options) for readers in (0, options.readers)}
        (wait, whole, given), (later, shorter, same) = found.values()
        assert given == same, "prompts that are read ahead are others"
        print(f"| {rest} | 0 | {wait:.2f} | {whole:.2f} | |")
        print(f"| {rest} | {options.readers} | {later:.2f} | {shorter:.2f} | {whole / shorter:.2f} |", flush=True)
    shutil.rmtree(folder)


def draw(folder: Path) -> None:
    """Questions, their images (clouds of colours: JPEGs of about 130 kB), and the model's processor."""
    import numpy as np
    from PIL import Image

    from mmrl.tasks.visual_qa.tiny import model as tiny_model

    rng, lines = np.random.default_rng(0), []
    for number in range(PROMPTS):
        drawn = Image.fromarray(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8))
        drawn.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
        question = {"problem": f"Which digit is {number}?", "answer": "1", "images": [f"{number}.jpg"]}
        lines.append(json.dumps(question) + "\n")
    (folder / "questions.jsonl").write_text("".join(lines))
    tiny_model.build(str(folder / "model"), seed=0)


def steps(folder: Path, readers: int, busy: bool, options: Any) -> tuple[float, float, list[bytes]]:
    """Median seconds that a step waited and took, and what it got at last."""
    import torch
    from transformers import AutoProcessor

    from mmrl.collection.prefetch import ReadAhead
    from mmrl.policies.vlm.prompts import encode
    from mmrl.policies.vlm.responses.fitting import PromptEncoder
    from mmrl.tasks.visual_qa.data.files import FileSource
    from mmrl.tasks.visual_qa.task import InstructedSource

    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(folder / "model")
    processor.image_processor.size = {"shortest_edge": 64, "longest_edge": options.side**2}
    longest = PROMPTS + options.side**2 // 64
    source = InstructedSource(FileSource(folder / "questions.jsonl"), "Answer.", None, readers)
    reader = ReadAhead(source, PromptEncoder(processor, longest)) if readers else None
    waits, took, order = [], [], torch.Generator().manual_seed(0)
    coming = torch.randperm(PROMPTS, generator=order).tolist()
    for _ in range(2 + options.steps):
        begun = time.perf_counter()
        prompts = [(reader or source)[index] for index in coming]
        made = [None if reader is None else reader.encoded(prompt) for prompt in prompts]
        rest = iter(encode(processor, [p for p, m in zip(prompts, made, strict=True) if m is None], longest))
        tokens = [next(rest) if known is None else known for known in made]
        coming = torch.randperm(PROMPTS, generator=order).tolist()
        if reader is not None:
            reader.prefetch(coming)
        waits.append(time.perf_counter() - begun)
        compute(options.rest, busy)
        took.append(time.perf_counter() - begun)
    if reader is not None:
        reader.close()
    seen = [(prompt.images[0], known.images["pixel_values"]) for prompt, known in zip(prompts, tokens, strict=True)]
    given = [image.tobytes() + patches.numpy().tobytes() for image, patches in seen]
    return median(waits[2:]), median(took[2:]), given


def compute(seconds: float, busy: bool) -> None:
    import torch

    end, matrix = time.perf_counter() + seconds, torch.rand(256, 256)
    while busy and time.perf_counter() < end:
        matrix = (matrix @ matrix).softmax(1)
    time.sleep(max(0.0, end - time.perf_counter()))


if __name__ == "__main__":
    main()
