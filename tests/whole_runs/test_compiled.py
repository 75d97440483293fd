"""Runs whose updates torch.compile compiles learn what the others learn."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.policies.diffusion.small import SmallDiffusionConfig, create
from mmrl.tasks.image_generation.tiny.model import digits
from tests.sims.line_simulator import Line
from tests.whole_runs.parts import IMAGES, ROBOTS, TINY, distance, make, metrics, ratio_gaps, release, train

pytestmark = pytest.mark.usefixtures("alone")
HERE = "tests.whole_runs.test_compiled"
# Two epochs: the first update's log-probabilities are compared with those of a pass before it.
SHARED = ["steps=2", "algorithm.epochs=2", "checkpoint.every=1"]
JOBS = {
    "text": (TINY, ["model.activation_checkpointing=true"]),
    "text with a cache": (TINY, []),  # responses share the keys and values of their prompts
    "images": (IMAGES, [f"model.build={HERE}:build_transformer"]),
    "robots": (ROBOTS, [f"task.simulator={HERE}:Near"]),
}
SLOW = pytest.mark.slow
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def build_transformer(folder, seed):
    config = SmallDiffusionConfig(
        words=tuple(digits.words()), channels=1, size=digits.SIZE, network="transformer", width=32, depth=2
    )
    create(Path(folder), config, seed)


class Near(Line):
    """Starts so near to the end that some episodes succeed and others do not."""

    def reset(self, rows, seeds, tasks):
        return super().reset(rows, [seed % 97 for seed in seeds], tasks)


def saved(folder):
    """All weights of a run's last folder, by file and name."""
    files = sorted((Path(folder) / "final").rglob("*.safetensors"))
    return {f"{file.name}:{name}": value for file in files for name, value in load_file(file).items()}


def learn(folder, job, backend):
    """A run; the gaps of its ratios from 1, and how many graphs were compiled by the end of each step."""
    base, options = JOBS[job]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = make(folder, f"engine.compile={backend}", *SHARED, *options, base=base)
    gaps, graphs, log = ratio_gaps(trainer), [], trainer.log

    def counting(*arguments):
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return log(*arguments)

    trainer.log = counting
    trainer.train()
    release(trainer)
    return gaps, graphs


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folders of runs that are not compiled, by job; each is made once."""
    made = {}

    def folder(job):
        if job not in made:
            made[job] = tmp_path_factory.mktemp("plain")
            learn(made[job], job, "none")
        return made[job]

    return folder


CASES = [
    *(("eager", job) for job in ("images", "robots")),
    *(pytest.param(backend, job, marks=[SLOW, COMPILER]) for backend in ("aot_eager", "inductor") for job in JOBS),
    *(pytest.param("eager", job, marks=SLOW) for job in ("text", "text with a cache")),
]


@pytest.mark.parametrize(("backend", "job"), CASES)
def test_losses_gradients_and_weights_are_those_of_plain_runs(plain, tmp_path, backend, job):
    gaps, graphs = learn(tmp_path, job, backend)
    assert {update: gap for update, gap in gaps.items() if update[1] == 0} == {(0, 0): 0.0, (1, 0): 0.0}
    assert graphs[0] > 0
    ours, theirs = ([row for row in metrics(folder) if "loss" in row] for folder in (tmp_path, plain(job)))
    for one, other in zip(ours, theirs, strict=True):
        assert {name: one[name] for name in ("loss", "grad_norm", "ratio") if name in one} == pytest.approx(
            {name: other[name] for name in ("loss", "grad_norm", "ratio") if name in other}, abs=1e-4
        )
        assert one["grad_norm"] > 1e-4
    weights = saved(tmp_path)
    assert distance(weights, saved(plain(job))) < 1e-4  # names too
    assert not any("_orig_mod" in name for name in weights)


def test_a_compiled_run_resumes_as_it_would_have_gone_on_also_without(tmp_path):
    base, options = JOBS["images"]
    train(tmp_path / "whole", "engine.compile=eager", *SHARED, *options, base=base)
    for name, backend in (("same", "eager"), ("other", "none")):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "final")
        steps = sorted((tmp_path / name / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
        assert steps
        train(tmp_path / name, f"engine.compile={backend}", *SHARED, "steps=3", *options, base=base, resume=True)
    train(tmp_path / "long", "engine.compile=eager", *SHARED, "steps=3", *options, base=base)
    assert distance(saved(tmp_path / "same"), saved(tmp_path / "long")) == 0
    assert distance(saved(tmp_path / "other"), saved(tmp_path / "long")) < 1e-5


def test_stages_and_adapters(tmp_path):
    """Under ZeRO-1 and 2, and with LoRA beside a reference without adapters."""
    base, options = JOBS["images"]
    found = {}
    for stage in (0, 1, 2):
        train(tmp_path / f"{stage}", "engine.compile=eager", f"engine.zero_stage={stage}", *SHARED, *options, base=base)
        found[stage] = saved(tmp_path / f"{stage}")
    assert distance(found[0], found[1]) < 1e-5 and distance(found[0], found[2]) < 1e-5


@pytest.mark.slow
def test_adapters(tmp_path):
    base, options = JOBS["text"]
    lora = ["model.lora={rank: 2, alpha: 4}", "algorithm.terms=[kl]", "steps=1", "algorithm.epochs=2"]
    for backend in ("none", "eager"):
        torch._dynamo.reset()
        train(tmp_path / backend, f"engine.compile={backend}", *options, *lora, base=base)
    one, other = (saved(tmp_path / backend) for backend in ("none", "eager"))
    assert distance(one, other) < 1e-5
    assert json.loads((tmp_path / "eager" / "final" / "adapter_config.json").read_text())["r"] == 2
