"""The ways to generate beside chains: two ranks under ZeRO 3 train as one without, and what is resumed goes on exactly.
One that fills masks in, and one that writes and then draws, on every run; the others with `-m slow`."""

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mmrl.tasks.image_generation.tiny import image_tokens, rewriter
from mmrl.tasks.image_generation.tiny import model as digits
from mmrl.tasks.text_sums import tiny_model as sums
from tests.whole_runs.parts import call, distance, make, metrics, release, timeless, train

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
        "model": {"type": "discrete_diffusion"},
        "task": {"type": "text_sums", "rewards": [{"name": "tests.whole_runs.parts:spread"}]},
        "rollout": {"response_length": 4},
        "unmasking": {"likelihood": {"type": "elbo", "draws": 2}},
        "algorithm": {"level": "sequence", "terms": [{"type": "kl", "coefficient": 0.1}]},
    },
    "rewritten": {
        "model": {"type": "prompt_rewriting", "writer": {"template": "{}", "originals": 1}},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "rollout": {"max_response_length": 5},
        "denoising": {"steps": 3, "evaluation_steps": 3},
        "algorithm": {"surrogate": {"type": "by_part", "image": {"type": "clip", "low": 1e-3, "high": 1e-3}}},
    },
}
FURTHER = {
    "codes": {
        "model": {"type": "autoregressive_image"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "drawing": {"guidance": 1.5},
    },
    "pairs": {
        "model": {"type": "diffusion"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "denoising": {"steps": 3, "evaluation_steps": 3, "likelihood": "matching"},
        "algorithm": {"type": "stepwise_preference"},
    },
    "steps": {
        "model": {"type": "diffusion"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "denoising": {"steps": 3, "evaluation_steps": 3},
        "algorithm": {"shaping": [{"type": "step_gains"}], "surrogate": {"low": 1e-3, "high": 1e-3}},
    },
    "few_step": {
        "model": {"type": "few_step_diffusion", "sampler": {"steps": 2, "share": 0.5}},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "denoising": {"steps": 4, "evaluation_steps": 4, "likelihood": "contrast"},
        "algorithm": {"type": "contrast", "terms": [{"type": "sampler_distillation"}]},
    },
    "reasoning": {
        "model": {"type": "autoregressive_image"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "rollout": {"reasoning_length": 4},
        "algorithm": {"shaping": [{"type": "part_credit", "text": 0.5}], "surrogate": {"type": "by_part"}},
    },
    "inverse": {
        "model": {"type": "autoregressive_image"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "algorithm": {"transforms": ["inverse_likelihood"]},
    },
    "candidates": {
        "model": {"type": "diffusion"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "denoising": {"steps": 4, "evaluation_steps": 4, "likelihood": {"shared_states": True}},
        "algorithm": {"type": "candidate_preference"},
    },
    "values": {
        "model": {"type": "diffusion"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "denoising": {"steps": 3, "evaluation_steps": 3},
        "algorithm": {"shaping": [{"type": "latent_values", "warm_up": 1, "outcome": 1.0}]},
    },
    "gradient": {
        "model": {"type": "diffusion"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "rollout": {"group_size": None},
        "denoising": {"steps": 3, "evaluation_steps": 3, "likelihood": {"type": "last_steps"}},
        "algorithm": {"type": "reward_gradient", "reward": {"name": "tests.joints.test_reward_gradient:Bright"}},
    },
    "uniform": {
        "model": {"type": "uniform_diffusion"},
        "task": {"type": "text_sums", "rewards": [{"name": "tests.whole_runs.parts:spread"}]},
        "rollout": {"response_length": 4},
        "noising": {"steps": 2},
    },
    "distribution": {
        "model": {"type": "discrete_diffusion"},
        "task": {"type": "text_sums", "rewards": [{"name": "tests.whole_runs.parts:spread"}]},
        "rollout": {"response_length": 4},
        "unmasking": {"likelihood": {"type": "elbo", "draws": 2}},
        "algorithm": {"type": "distribution_matching"},
    },
    "tilt": {
        "model": {"type": "discrete_diffusion"},
        "task": {"type": "text_sums", "rewards": [{"name": "tests.whole_runs.parts:spread"}]},
        "rollout": {"response_length": 4},
        "unmasking": {"likelihood": {"type": "elbo", "draws": 2}},
        "algorithm": {"type": "tilt_matching", "epochs": 2},
    },
    "critic": {
        "model": {"type": "discrete_diffusion"},
        "task": {"type": "text_sums", "rewards": [{"name": "tests.whole_runs.parts:spread"}]},
        "rollout": {"response_length": 4, "prompts": 16, "group_size": 1},
        "unmasking": {"steps": 3, "order": "random", "likelihood": "trace"},
        "algorithm": {"type": "ppo", "epochs": 2, "critic": {"width": 8}},
        "optim": {"lr": 1e-3, "eps": 1e-4, "groups": {"critic": {"lr": 1e-2}}},
    },
    "unified": {
        "model": {"type": "discrete_diffusion"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "rollout": {"response_length": 16, "reasoning_length": 4},
        "unmasking": {"steps": 4, "reasoning_steps": 2, "likelihood": "spread"},
        "algorithm": {"surrogate": {"type": "by_part"}},
    },
    "branches": {
        "model": {"type": "diffusion"},
        "task": {"type": "tests.whole_runs.parts:Images"},
        "denoising": {
            "steps": 3,
            "evaluation_steps": 3,
            "likelihood": {"shared_states": True, "trunk": "ode", "step_weight": "std"},
        },
        "algorithm": {"shaping": [{"type": "branch_credit"}], "surrogate": {"low": 1e-3, "high": 1e-3}},
    },
}
EVERY = JOBS | FURTHER


def write(folder, name):
    """A recipe and its model: the library writes models in the first process of a group alone."""
    model = folder / f"model-{name}"
    job = EVERY[name]
    kind = job["model"]["type"]
    if name == "unified":
        image_tokens.build_masked(str(model), 0)
    elif kind in ("discrete_diffusion", "uniform_diffusion"):
        sums.build(str(model), 0, width=32, layers=1)
    elif kind == "autoregressive_image":
        image_tokens.build_autoregressive(str(model), 0)
    else:
        digits.build_digits(str(model), 0)
    tree = COMMON | job | {"rollout": COMMON["rollout"] | job.get("rollout", {})}
    tree["model"] = job["model"] | {"path": str(model)}
    if kind == "prompt_rewriting":
        rewriter.build(str(folder / "writer"), 0)
        tree["model"]["writer"] = job["model"]["writer"] | {"path": str(folder / "writer")}
    recipe(folder, name).write_text(yaml.safe_dump(tree))


def recipe(folder, name):
    return folder / f"{name}.yaml"


def whole(folder, names, label, stage):
    for name in names:
        train(folder / f"{label}-{name}", f"engine.zero_stage={stage}", base=recipe(folder, name))


def half(folder, names):
    for name in names:
        trainer = make(folder / f"half-{name}", "engine.zero_stage=0", "checkpoint.every=2", base=recipe(folder, name))
        trainer.config = trainer.config.model_copy(update={"steps": 2})
        trainer.save_weights = lambda name: None  # the run has not reached its end
        trainer.train()
        release(trainer)


def rest(folder, names):
    for name in names:
        torch.rand(7)  # the random state comes from the checkpoint
        train(
            folder / f"half-{name}", "engine.zero_stage=0", "checkpoint.every=2", base=recipe(folder, name), resume=True
        )


def run_all(folder, names):
    for name in names:
        write(folder, name)
    call(whole, folder, names, "one", 0, log=folder / "one.log", timeout=280)
    call(whole, folder, names, "two", 3, log=folder / "two.log", ranks=2, timeout=280)
    call(half, folder, names, log=folder / "half.log", timeout=280)
    call(rest, folder, names, log=folder / "rest.log", timeout=280)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("runs"), list(JOBS))


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("further"), list(FURTHER))


def weights(folder):
    """All that a run left, by file and name."""
    final = folder / "final"
    files = sorted(final.rglob("*.safetensors"))
    return {f"{file.relative_to(final)}:{key}": value for file in files for key, value in load_file(file).items()}


def trains_as_one(runs, name):
    assert distance(weights(runs / f"one-{name}"), weights(runs / f"two-{name}")) < 1e-5
    norms = [
        [row["grad_norm"] for row in metrics(runs / f"{label}-{name}") if "loss" in row] for label in ("one", "two")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and min(norms[0]) > 1e-6


def goes_on_exactly(runs, name):
    one, other = weights(runs / f"one-{name}"), weights(runs / f"half-{name}")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    rows = [timeless(metrics(runs / f"{label}-{name}")) for label in ("one", "half")]
    losses = [[row["loss"] for row in part if "loss" in row] for part in rows]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.slow
def test_two_ranks_under_zero_3_train_as_one_without(runs, name):
    trains_as_one(runs, name)


@pytest.mark.parametrize("name", JOBS)
def test_what_is_resumed_goes_on_exactly(runs, name):
    goes_on_exactly(runs, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_two_ranks_under_zero_3_train_further_jobs_as_one_without(further, name):
    trains_as_one(further, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_further_jobs_that_are_resumed_go_on_exactly(further, name):
    goes_on_exactly(further, name)
