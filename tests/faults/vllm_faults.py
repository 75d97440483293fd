"""What test_engine_faults.py runs in a process of its own: one engine of vLLM beside a model, and faults planted in it
one after the other. Each is taken out again, and the engine found healthy, before the next."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.policies.vlm.loading import part_of
from mmrl.rollouts import Prompt
from tests.whole_runs.parts import make, release
from tests.whole_runs.vllm_workers import VLLM, LongQuestions


class MixedQuestions(LongQuestions):
    """With an image and without one, in turn."""

    def build(self, seed):
        task = super().build(seed)
        image = Image.effect_mandelbrot((24, 8), (-2, -1, 1, 1), 50).convert("RGB")
        task.train = task.evaluation = [
            Prompt(str(i), "<image>" * (i % 2) + f"Where is the {i}? " * 40, (image,) * (i % 2)) for i in range(8)
        ]
        return task


def planted(folder: Path) -> None:
    trainer = make(folder / "run", *VLLM, "task={type: tests.faults.vllm_faults:MixedQuestions}", "steps=1")
    generator, engine, policy = trainer.generator, trainer.generator.engine, trainer.policy
    runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()
    generator.sync_weights()
    found: dict = {"healthy": []}

    def tell(name: str, *faults, change=lambda name: True) -> None:
        """What the first synchronisation after an update says, with faults in it."""
        updated(policy, change)
        with several(faults):
            found[name] = said(generator)
        found["healthy"].append(said(generator))

    def loads(given):
        return patch.object(engine, "load", lambda weights, load=engine.load: load(given(weights)))

    def forget():
        engine.llm.reset_prefix_cache()
        engine.llm.reset_mm_cache()

    images = patch.object(runner, "reset_encoder_cache", lambda: None)  # vLLM's own reload empties that one too
    tell("encoder cache", patch.object(engine, "empty_caches", forget), images, change=is_vision)
    tell("every cache", patch.object(engine, "empty_caches", lambda: None), images)
    tell("left out", loads(lambda rows: ((n, v) for n, v in rows if "layers.0.mlp.up_proj" not in n)))
    tell("renamed", loads(lambda rows: ((n.replace("o_proj.weight", "o_proj"), v) for n, v in rows)))
    arrived = engine.arrived

    def late():
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if n.endswith("norm.weight")).mul_(1.001)
        return arrived()

    tell("two streams", patch.object(engine, "arrived", late))
    found["out of step"] = out_of_step(policy, engine, trainer.task.train[1])
    (folder / "planted.json").write_text(json.dumps(found))
    release(trainer)


@contextmanager
def several(faults):
    for fault in faults:
        fault.start()
    yield
    for fault in faults:
        fault.stop()


def is_vision(parameter: str) -> bool:
    return part_of(parameter) == "vision"


def updated(policy, change) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if change(name):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def said(generator) -> str:
    try:
        generator.sync_weights()
    except UserError as error:
        return str(error)
    return ""


def out_of_step(policy, engine, prompt: Prompt) -> str:
    """The trainer's own reading of a prompt has one token of its image less."""
    request = policy.draft([prompt], 1, [0])[0].next_request(4)
    try:
        engine.generate([replace(request, ids=request.ids[:-1])], sampling=policy.drafter.sampling, eos=policy.eos)
    except UserError as error:
        return str(error)
    return ""
