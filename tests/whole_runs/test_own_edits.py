"""A step on a tiny FLUX.1-Kontext with rows that name the image to edit, from the file to the reward and the update."""

import json
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from mmrl.tasks.image_generation.tiny import pipeline
from mmrl.training.metrics import Metrics
from tests.rewards.http_servers import scripted
from tests.rewards.test_judges import completion, levels
from tests.whole_runs.parts import make, release

pytestmark = pytest.mark.usefixtures("alone")


def by_source(handler, body):
    """A judge that says yes with the brightness of the first image, the source."""
    source, _ = levels(body)
    return 200, json.dumps(completion(yes=source, no=1 - source)).encode()


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield stack


def test_each_rows_image_reaches_the_pipeline_and_the_rewards(tmp_path, servers):
    pipeline.build_edits(tmp_path / "model", 0)
    rows = [{"prompt": "make the bar blue", "image": name} for name in ("dark.png", "light.png")]
    for row, level in zip(rows, (40, 220), strict=True):
        Image.fromarray(np.full((16, 16, 3), level, np.uint8)).save(tmp_path / row["image"])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"type": "prompts", "train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "rows.jsonl")}
    similar = {"name": "source_similarity"}
    server = servers.enter_context(scripted(by_source))
    judged = {"name": "edit_judge", "options": {"base_url": server.url, "model": "j"}, "weight": 0.5}
    tree = {
        "run_dir": "unset",
        "steps": 1,
        "model": {"type": "diffusion", "path": str(tmp_path / "model")},
        "task": {
            "type": "image_generation",
            "data": data | {"image_field": "image"},
            "rewards": [similar, judged],
            "accuracy": similar,
        },
        "rollout": {"prompts": 2, "group_size": 2},
        "denoising": {"resolution": 16, "steps": 3, "evaluation_steps": 3, "likelihood": {"transition": "flow_sde"}},
        "evaluation": {"every": 0, "prompts": 2, "before": False},
        "checkpoint": {"best": False},
    }
    (tmp_path / "edits.yaml").write_text(yaml.safe_dump(tree))
    trainer = make(tmp_path / "run", base=tmp_path / "edits.yaml")
    dark, light = trainer.task.train[0], trainer.task.train[1]
    one, again, other = (s.image for s in trainer.policy.respond([dark, dark, light], [5, 5, 5]))
    assert torch.equal(one, again) and (one - other).abs().max() > 1e-3  # the same words and noise
    rollouts = trainer.collector.next(0, Metrics(trainer.engine))
    for sample, (reward, verdict) in zip(rollouts.samples, rollouts.rewards.tolist(), strict=True):
        source = pil_to_tensor(sample.prompt.images[0].convert("RGB")) / 255
        assert verdict == pytest.approx(float(source.mean()), abs=1e-5)
        assert reward == pytest.approx(1 - float((sample.image.clamp(0, 1) - source).abs().mean()), abs=1e-5)
    assert {s.prompt.images[0].getpixel((3, 3))[0] for s in rollouts.samples} == {40, 220}
    before = [p.detach().clone() for p in trainer.policy.module.parameters()]
    trainer.train()
    after = trainer.policy.module.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    release(trainer)
