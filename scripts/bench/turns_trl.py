"""Rollouts a second of GRPO over turns with the zoom tool: mmrl, and TRL's `environment_factory`, from the same base.

    .venv/bin/python scripts/bench/turns_trl.py [--steps 12] [--rounds 2] [--base FOLDER] [--threads 1]

Both arms train the model of `configs/vlm/visual_qa_zoom.yaml` in processes of their own, in turns: 16 prompts x 8
rollouts a step of at most 3 responses, the same questions in the same order, the tool's own code, exact match, AdamW,
one update a step on one micro-batch, fp32. --base: the warm start's weights, by default made under build/turns. TRL has
its own environment, that of visual_qa.py. The first two steps are not timed. Prints a Markdown table, medians of the
rounds; `tool` is the share of rollouts that called the tool in the last quarter of the steps.

What differs: random numbers, hence the rollouts. TRL limits all of a conversation's tokens and not those of one
response; it samples what stands for pixels unless told otherwise, as it is here; a call is read from a response's text
by a function of this script, since TRL's own readers know the templates of released models; its masks and its loss
(`dapo`, of all tokens alike) are the nearest to mmrl's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import visual_qa  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CONFIG, BASE = "configs/vlm/visual_qa_zoom.yaml", "configs/warm_starts/vlm/visual_qa_zoom_warm_start.yaml"
PROMPTS, GROUP, LENGTH, TURNS, WARM_UP = 16, 8, 48, 3, 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ 'user' if message['role'] == 'tool' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }}("
    "{% for key, value in call['function']['arguments'].items() %}{{ key }}={{ value }},{% endfor %}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # the model's own, with calls and results of tools, which mmrl shows as the user's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--base", type=Path)
    for name in ("--arm", "--out", "--seed"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # of a child
    options = parser.parse_args()
    if options.arm is not None:
        return child(options)
    visual_qa.make_environment()
    base = options.base or made_base()
    found: dict[str, list[dict[str, float]]] = {"mmrl": [], "trl": []}
    for number in range(options.rounds):
        for arm in found:
            found[arm].append(measured(arm, base, number, options))
            print(arm, found[arm][-1], file=sys.stderr, flush=True)
    heads = list(found["mmrl"][0])
    print(f"| arm | {' | '.join(heads)} |\n|{' --- |' * (len(heads) + 1)}")
    for arm, rounds in found.items():
        print(f"| {arm} | {' | '.join(f'{statistics.median(r[h] for r in rounds):.2f}' for h in heads)} |")
    return None


def made_base() -> Path:
    run = ROOT / "build/turns/trl-base"
    if not (run / "final").is_dir():
        command = [sys.executable, "-m", "mmrl", "train", BASE, f"run_dir={run}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return run / "final"


def measured(arm: str, base: Path, seed: int, options: argparse.Namespace) -> dict[str, float]:
    out = ROOT / "build/turns/trl" / arm
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    python = visual_qa.BUILD / "venv/bin/python" if arm == "trl" else sys.executable
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": str(options.threads), "TRL_EXPERIMENTAL_SILENCE": "1"}
    same = [f"--steps={options.steps}", f"--threads={options.threads}", f"--base={base}", f"--seed={seed}"]
    visual_qa.run([python, __file__, *same, f"--arm={arm}", f"--out={out}"], environment, out / "log.txt")
    return json.loads((out / "result.json").read_text())


def child(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(options.threads)
    ends, rewards, tools = {"mmrl": train_mmrl, "trl": train_trl}[options.arm](options)
    rollouts, quarter = PROMPTS * GROUP * (options.steps - WARM_UP), max(1, options.steps // 4)
    result = {
        "rollouts a second": rollouts / (ends[-1][0] - ends[WARM_UP - 1][0]),
        "rollouts a CPU second": rollouts / (ends[-1][1] - ends[WARM_UP - 1][1]),
        "peak MiB": visual_qa.peak_mib(),
        "right, first quarter": statistics.mean(rewards[:quarter]),
        "right, last quarter": statistics.mean(rewards[-quarter:]),
        "tool": statistics.mean(tools[-quarter:]),
    }
    (Path(options.out) / "result.json").write_text(json.dumps(result))


Outcome = tuple[list[tuple[float, float]], list[float], list[float]]


def overrides(options: argparse.Namespace) -> list[str]:
    given = {
        "run_dir": options.out,
        "seed": options.seed,
        "steps": options.steps,
        "threads": options.threads,
        "model.warm_start": "null",
        "model.path": options.base,
        "optim.warmup_steps": 0,
        "optim.schedule": "constant",
        "engine.micro_batch": PROMPTS * GROUP,
        "evaluation.before": "false",
        "evaluation.every": 0,
        "evaluation.prompts": 1,  # the one evaluation after the last step is not timed
        "checkpoint.every": 0,
        "checkpoint.best": "false",
        "log.samples_every": 0,
    }
    return [f"{key}={value}" for key, value in given.items()]


def train_mmrl(options: argparse.Namespace) -> Outcome:
    import mmrl.trainer
    from mmrl import config
    from mmrl.cli.training import train

    ends: list[tuple[float, float]] = []
    usual = mmrl.trainer.Trainer

    class Timed(usual):  # type: ignore[misc, valid-type]
        def log(self, *given: Any) -> None:
            super().log(*given)
            ends.append(visual_qa.now())

    mmrl.trainer.Trainer = Timed  # type: ignore[misc]
    train(config.load(ROOT / CONFIG, overrides(options)))
    lines = [json.loads(line) for line in (Path(options.out) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    return ends[: len(steps)], [line["accuracy"] for line in steps], [line["turns/tool_share"] for line in steps]


def train_trl(options: argparse.Namespace) -> Outcome:
    import datasets
    import trl.trainer.grpo_trainer as trainers
    import yaml
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from mmrl.prompts.sampler import Permutation
    from mmrl.rollouts import Message, Sample
    from mmrl.settings import make
    from mmrl.sims.turns.settings import ToolsSettings
    from mmrl.sims.turns.tools import ToolError, fitted, python_call
    from mmrl.tasks.visual_qa.settings import VisualQASettings

    ends: list[tuple[float, float]] = []
    rewards: list[float] = []
    tools: list[float] = []
    settings = make(VisualQASettings, yaml.safe_load((ROOT / CONFIG).read_text())["task"])  # TRL's has no omegaconf
    task = settings.build(int(options.seed))
    assert task.train is not None and isinstance(settings.environment, ToolsSettings)
    source, world, pixels = task.train, settings.environment, settings.environment.shown_pixels
    assert pixels is not None
    order = Permutation()
    order.start(len(source), int(options.seed))
    prompts = [source[index] for index in order.draw(options.steps * PROMPTS)]
    model, processor, suppressed = visual_qa.load_model(str(options.base))
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
    processor.tokenizer.response_schema = {"type": "object", "properties": {}}  # asked whether there is one

    def parsed(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        try:
            call = python_call(text)
        except ToolError:
            call = None
        if call is None or call.name != "zoom":
            return {"role": "assistant", "content": text}
        box = dict(zip(("left", "top", "right", "bottom"), call.positional, strict=False)) | call.named
        called = [{"type": "function", "function": {"name": "zoom", "arguments": box}}]
        return {"role": "assistant", "content": text, "tool_calls": called}

    trainers.parse_response = parsed

    class Zooming:
        """mmrl's own environment behind TRL's."""

        def reset(self, number: int, **_: Any) -> None:
            prompt = prompts[number]
            self._world = world.make()
            self._world.start(visual_prompt(prompt, Message))

        def zoom(self, left: float, top: float, right: float, bottom: float) -> list[Any]:
            """Shows the part of an image that lies in a box.

            Args:
                left: x of the box's left side
                top: y of its upper side
                right: x of its right side
                bottom: y of its lower side
            """
            (message,) = self._world.step(f"zoom({left},{top},{right},{bottom})").messages
            shown = [{"type": "image", "image": image} for image in message.images]
            return shown + ([{"type": "text", "text": message.text}] if message.text else [])

    def exact_match(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        said = [[m["content"] for m in c if m["role"] == "assistant"][-1] for c in completions]
        pairs = zip(number, said, strict=True)
        values = task.accuracy([Sample(prompts[n], s, 0, False, LENGTH) for n, s in pairs]).tolist()
        rewards.append(statistics.mean(values))
        tools.append(statistics.mean(float(any(m["role"] == "tool" for m in c)) for c in completions))
        return values

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(visual_qa.now())

    rows = [
        {"prompt": [{"role": "user", "content": p.text}], "image": fitted(p.images[0], pixels), "number": n}
        for n, p in enumerate(prompts)
    ]
    config = GRPOConfig(
        output_dir=str(options.out),
        seed=int(options.seed),
        max_steps=options.steps,
        per_device_train_batch_size=PROMPTS * GROUP,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        max_tool_calling_iterations=TURNS - 1,
        temperature=1.0,
        generation_kwargs={"suppress_tokens": suppressed},
        shuffle_dataset=False,
        beta=0.0,
        num_iterations=1,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    GRPOTrainer(
        model,
        exact_match,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
        callbacks=[Clock()],
        environment_factory=Zooming,
    ).train()
    return ends, rewards, tools


def visual_prompt(prompt: Any, message: Any) -> Any:
    """The prompt as messages, which environments begin with."""
    from dataclasses import replace

    return replace(prompt, messages=(message("user", (*prompt.images, prompt.text)),))


if __name__ == "__main__":
    main()
