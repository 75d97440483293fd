"""Memory and seconds of training on a video: all denoising steps are trained, a window of them, a window in parts.

    .venv/bin/python scripts/bench/video.py [--steps 4] [--threads 1] [--set KEY=VALUE]

Each row trains the same tiny Wan model, built here, as `mmrl train` does: one group of four videos of 9 x 32 x 32
pixels and 576 tokens, ten denoising steps, two videos in a micro-batch. Each runs in a process of its own, one after
the other.

all          all denoising steps are stored and trained
window       a window of three steps
in parts     the same window, two of a micro-batch's six steps in one forward pass (engine.steps_at_once)
wide         a window of six steps
wide, parts  the same, two steps in one forward pass

stored_mib is the memory of the rollouts; growth_mib the peak of resident memory in addition to the loaded model;
sample_s and learn_s are CPU seconds of a video. The first step is left out; values are median (smallest .. greatest).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scripts.bench.generation_peers import Meter, spread, table  # noqa: E402

CONFIG = ROOT / "configs/video/video_moving_shapes.yaml"
CLIPS, FRAMES, SIZE, STEPS, WIDTH, LAYERS = 4, 9, 32, 10, 128, 4
WINDOW = "denoising.likelihood.window={type: random, size: %d}"
ARMS = {
    "all": ["denoising.likelihood.window={type: all}"],
    "window": [WINDOW % 3],
    "in parts": [WINDOW % 3, "engine.steps_at_once=2"],
    "wide": [WINDOW % 6],
    "wide, parts": [WINDOW % 6, "engine.steps_at_once=2"],
}
PROMPT = "the square moves up slowly"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="measured steps; one more comes before them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override for every row")
    parser.add_argument("--arm", choices=("build", *ARMS), help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm is not None:
        return child(options)
    with tempfile.TemporaryDirectory(prefix="mmrl-video-") as folder:
        start("build", folder, options)
        found = {name: start(name, folder, options) for name in ARMS}
    print(table({name: {key: spread(values) for key, values in one.items()} for name, one in found.items()}))
    return None


def start(arm: str, folder: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Runs an arm in a process of its own; what it measured."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    command = [sys.executable, __file__, f"--arm={arm}", f"--folder={folder}", f"--steps={options.steps}"]
    command += [f"--threads={options.threads}", *(f"--set={given}" for given in options.set)]
    environment = {**os.environ, **one, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{arm} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    result = Path(folder) / f"{arm}.json"
    return json.loads(result.read_text()) if result.is_file() else {}


# --- the children ---


def child(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(options.threads)
    folder = Path(options.folder)
    if options.arm == "build":
        return build(folder)
    meter = Meter()
    stored = train(folder, options, meter)
    measured = meter.result()
    steps = zip(measured["cpu_s"], measured["sample_s"], strict=True)
    rows = {
        "stored_mib": stored,
        "growth_mib": measured["growth_mib"],
        "sample_s": [sample / CLIPS for sample in measured["sample_s"]],
        "learn_s": [(whole - sample) / CLIPS for whole, sample in steps],
    }
    (folder / f"{options.arm}.json").write_text(json.dumps(rows))
    return None


def build(folder: Path) -> None:
    """A Wan whose VAE halves the sides, with a token for 2 x 2 latents of a frame."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    from mmrl.policies.diffusion import tiny

    tokenizer = tiny.word_tokenizer(sorted(set(PROMPT.split())), max_length=12)
    network = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=WIDTH // 32,
        attention_head_dim=32,
        in_channels=3,
        out_channels=3,
        text_dim=32,
        freq_dim=64,
        ffn_dim=4 * WIDTH,
        num_layers=LAYERS,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    pipe: Any = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=tiny.umt5_text_encoder(tokenizer, 32),
        vae=tiny.halving_wan_vae(3),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=network,
    )
    pipe.save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text(PROMPT + "\n")


def train(folder: Path, options: argparse.Namespace, meter: Meter) -> list[float]:
    """MiB that the rollouts of each counted step hold."""
    from mmrl import config, trainer
    from mmrl.cli import training
    from mmrl.policies.diffusion.decisions.records import ImageRecord

    stored: list[float] = []

    def held(record: ImageRecord) -> float:
        tensors = (record.data, record.x, record.x_next, record.prediction)
        return sum(t.nbytes for t in tensors if t is not None) / 2**20

    class Timed(trainer.Trainer):
        def loop(self) -> None:
            meter.start()
            rollout, play = self.collector.next, self.policy.rollout

            def counted(*given: Any, **more: Any) -> Any:
                made = play(*given, **more)
                stored.append(sum(map(held, made.inputs)))
                return made

            self.policy.rollout = counted  # type: ignore[method-assign]
            self.collector.next = lambda *given: meter.sample(lambda: rollout(*given))  # type: ignore[method-assign]
            super().loop()

        def log(self, *given: Any) -> None:
            super().log(*given)
            meter.end_step()

    trainer.Trainer = Timed  # type: ignore[misc]
    training.train(config.load(CONFIG, [*overrides(folder, options), *ARMS[options.arm], *options.set]))
    return stored[1:]


def overrides(folder: Path, options: argparse.Namespace) -> list[str]:
    same = {
        "run_dir": folder / options.arm,
        "steps": options.steps + 1,
        "threads": options.threads,
        "model.warm_start": "null",
        "model.path": folder / "model",
        "task.data": json.dumps({"type": "prompts", "train": f"{folder}/prompts.txt", "eval": f"{folder}/prompts.txt"}),
        "task.rewards": '[{"name": "random"}]',
        "task.accuracy": '{"name": "random"}',
        "rollout.prompts": 1,
        "rollout.group_size": CLIPS,
        "rollout.micro_batch": 1,
        "denoising.resolution": SIZE,
        "denoising.frames": FRAMES,
        "denoising.steps": STEPS,
        "denoising.evaluation_steps": 1,
        "algorithm.minibatches": 1,
        "engine.micro_batch": 2,
        "evaluation.before": "false",
        "evaluation.every": 0,
        "evaluation.prompts": 1,
        "checkpoint.every": 0,
        "checkpoint.best": "false",
    }
    return [f"{key}={value}" for key, value in same.items()]


if __name__ == "__main__":
    main()
