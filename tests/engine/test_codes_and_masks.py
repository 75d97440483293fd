"""Masked diffusion, pictures as codes, preferences and step rewards: two ranks under ZeRO 3 train as one without, and
what is resumed goes on exactly."""

import pytest
import torch
import yaml
from mmrl.tasks.image_generation import tiny_codes
from mmrl.tasks.image_generation import tiny_model as digits
from mmrl.tasks.text_sums import tiny_model as sums

from tests.engine.parts import call, distance, final, make, metrics, release, timeless, train

COMMON = {
    "run_dir": "unset",
    "steps": 4,
    "threads": 1,
    "rollout": {"prompts": 4, "group_size": 4},
    "optim": {"lr": 1e-3, "eps": 1e-4},
    "engine": {"micro_batch": 8},
    "evaluation": {"every": 0, "prompts": 4, "before": False},
    "checkpoint": {"best": False},
    "log": {"samples_every": 0},
}
JOBS = {
    "masked": {
        "model": {"type": "masked_diffusion"},
        "task": {"type": "text_sums", "rewards": [{"name": "tests.engine.parts:spread"}]},
        "rollout": {"response_length": 4},
        "unmasking": {"likelihood": {"type": "elbo", "draws": 2}},
        "algorithm": {"level": "sequence", "terms": [{"type": "kl", "coefficient": 0.1}]},
    },
    "codes": {
        "model": {"type": "picture_codes"},
        "task": {"type": "tests.engine.parts:Pictures"},
        "drawing": {"guidance": 1.5},
    },
    "pairs": {
        "model": {"type": "diffusion"},
        "task": {"type": "tests.engine.parts:Pictures"},
        "denoising": {"steps": 3, "evaluation_steps": 3, "likelihood": {"type": "matching", "shared": True}},
        "algorithm": {"type": "stepwise_preference"},
    },
    "steps": {
        "model": {"type": "diffusion"},
        "task": {"type": "tests.engine.parts:Pictures"},
        "denoising": {"steps": 3, "evaluation_steps": 3},
        "algorithm": {"shaping": [{"type": "step_gains"}], "surrogate": {"low": 1e-3, "high": 1e-3}},
    },
}


def write(folder, name):
    """A recipe and its model: the library writes models in the first process of a group alone."""
    model = folder / f"model-{name}"
    if name == "masked":
        sums.build(str(model), 0, width=32, layers=1)
    elif name == "codes":
        tiny_codes.build_autoregressive(str(model), 0)
    else:
        digits.build_digits(str(model), 0)
    job = JOBS[name]
    tree = COMMON | job | {"rollout": COMMON["rollout"] | job.get("rollout", {})}
    tree["model"] = job["model"] | {"path": str(model)}
    recipe(folder, name).write_text(yaml.safe_dump(tree))


def recipe(folder, name):
    return folder / f"{name}.yaml"


def whole(folder, label, stage):
    for name in JOBS:
        train(folder / f"{label}-{name}", f"engine.zero_stage={stage}", base=recipe(folder, name))


def half(folder):
    for name in JOBS:
        trainer = make(folder / f"half-{name}", "engine.zero_stage=0", "checkpoint.every=2", base=recipe(folder, name))
        trainer.config = trainer.config.model_copy(update={"steps": 2})
        trainer.save_weights = lambda name: None  # the run has not reached its end
        trainer.train()
        release(trainer)


def rest(folder):
    for name in JOBS:
        torch.rand(7)  # the random state comes from the checkpoint
        train(
            folder / f"half-{name}", "engine.zero_stage=0", "checkpoint.every=2", base=recipe(folder, name), resume=True
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in JOBS:
        write(folder, name)
    call(whole, folder, "one", 0, log=folder / "one.log")
    call(whole, folder, "two", 3, log=folder / "two.log", ranks=2)
    call(half, folder, log=folder / "half.log")
    call(rest, folder, log=folder / "rest.log")
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_under_zero_3_train_as_one_without(runs, name):
    assert distance(final(runs / f"one-{name}"), final(runs / f"two-{name}")) < 1e-5
    norms = [
        [row["grad_norm"] for row in metrics(runs / f"{label}-{name}") if "loss" in row] for label in ("one", "two")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and min(norms[0]) > 1e-6


@pytest.mark.parametrize("name", JOBS)
def test_what_is_resumed_goes_on_exactly(runs, name):
    one, other = final(runs / f"one-{name}"), final(runs / f"half-{name}")
    assert all(torch.equal(one[key], other[key]) for key in one)
    rows = [timeless(metrics(runs / f"{label}-{name}")) for label in ("one", "half")]
    losses = [[row["loss"] for row in part if "loss" in row] for part in rows]
    assert losses[0] == losses[1] and len(losses[0]) == 4
