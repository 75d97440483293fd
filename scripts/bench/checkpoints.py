"""How long training waits for a checkpoint, written in the background or at once. On the CPU, in a minute.

    python scripts/bench/checkpoints.py --parameters 50 --steps 40

The trainer's own `Saver` saves a network of that many million parameters (ZeRO stage 1, AdamW) once. Then follow steps
that only sleep and check whether the checkpoint is complete. In seconds: `save` is the wait of the step that saves,
`look` the longest wait of a later step, and `sum` that of all steps. The checkpoint is written into --folder.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

STEP = 0.25  # seconds of a step that only sleeps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=50, help="millions of parameters of the model")
    parser.add_argument("--steps", type=int, default=40, help="training steps after the one that saves")
    parser.add_argument("--folder", type=Path, help="folder of the run; default: temporary")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="mmrl-checkpoints-"))
    print("| checkpoint.background | GiB | save | look | sum |\n| --- | --- | --- | --- | --- |")
    for background, name in ((False, "false"), (True, "true")):
        size, waits = waited(folder / name, options.parameters, options.steps, background)
        print(f"| {name} | {size:.2f} | {waits[0]:.2f} | {max(waits[1:]):.2f} | {sum(waits):.2f} |", flush=True)
    if options.folder is None:
        shutil.rmtree(folder)


def waited(folder: Path, millions: float, steps: int, background: bool) -> tuple[float, list[float]]:
    """GiB of the checkpoint, and the seconds that each step waited."""
    import torch

    from mmrl.checkpoints import Saver
    from mmrl.checkpoints.settings import Checkpoint
    from mmrl.engine import Engine
    from mmrl.engine.settings import AdamW, EngineSettings

    width = 1000
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(max(1, round(millions * 1e6 / width**2)))]
    engine = Engine(torch.nn.Sequential(*layers), AdamW(lr=1e-6), EngineSettings(zero_stage=1))
    engine.backward(engine(torch.ones(1, width)).sum())
    engine.step()  # moments exist from now on
    saver = Saver(folder, Checkpoint(background=background), engine, lambda line: None)
    waits = []
    for step in range(1 + steps):
        begun = time.perf_counter()
        if step == 0:
            saver.save(1, {}, {})
        else:
            saver.poll()
        waits.append(time.perf_counter() - begun)
        time.sleep(STEP)
    saver.finish()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**30
    engine.release()
    return size, waits


if __name__ == "__main__":
    main()
