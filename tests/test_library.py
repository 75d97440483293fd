"""`from mmrl import ...`, as a notebook uses it."""

import json
import os
import subprocess
import sys

import pytest
import torch

import mmrl
from mmrl import Job, UserError, configure, load, read_run
from mmrl.job import use_deterministic_kernels
from tests.helpers.pages import ROOT, files

PAGE = ROOT / "mmrl" / "library.md"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    for name, text in files(PAGE).items():
        (folder / name).write_text(text)
    return folder


def python(folder, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env=environment)


def test_importing_the_package_is_quick_and_brings_nothing():
    code = "import sys, time; t = time.perf_counter(); import mmrl; print(time.perf_counter() - t, len(sys.modules))"
    code += "\nprint('torch' in sys.modules, 'pydantic' in sys.modules, sorted(mmrl.__all__))"
    code += "\nfrom mmrl import load, configure, read_run, UserError; print('torch' in sys.modules)"
    done = python(ROOT, "-c", code)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert float(first.split()[0]) < 0.5 and second.startswith("False False ['Config', 'Job', 'RunRecord'")
    assert third == "False"


def test_every_public_name_is_on_the_page_and_there():
    text = PAGE.read_text()
    for name in mmrl.__all__:
        assert getattr(mmrl, name).__name__ == name
        assert f"`{name}" in text, name
    with pytest.raises(ImportError, match="Nothing"):
        from mmrl import Nothing  # noqa: F401
    assert (ROOT / "mmrl" / "py.typed").is_file()


def test_a_program_trains_evaluates_samples_and_reads_its_run(shop):
    """The files of the page. What the callback printed are the numbers of metrics.jsonl."""
    done = python(shop, "notebook.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (shop / "runs/library/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/exact_match"] for row in rows if "loss" in row]
    lines = done.stdout.splitlines()
    told = [tuple(line.split()) for line in lines if line[:1].isdigit() and len(line.split()) == 2]
    evaluated = [(str(row["step"]), "None") for row in rows if "loss" not in row]
    assert [t for t in told if t[1] != "None"] == [(str(i + 1), str(r)) for i, r in enumerate(rewards)]
    assert [t for t in told if t[1] == "None"] == evaluated and len(evaluated) == 3
    assert str(rows[-1]["evaluation/accuracy"]) in lines  # job.evaluate(), of the same weights and prompts
    assert sum(" -> " in line for line in lines) == 3
    assert lines[-1] == f"It reached its end, step 4. {rewards}"
    assert "step 4/4" in done.stdout  # progress
    done = python(shop, "finished.py")
    assert done.returncode == 0, done.stderr
    assert (
        "configuration: unknown key stepz; did you mean steps?" in done.stdout and "'evaluation/n': 10.0" in done.stdout
    )


@pytest.mark.slow
def test_cells_of_a_notebook(shop):
    """As cells, with a loop that runs already: a job is left and another one built in the same process."""
    code = """if True:
        import asyncio
        async def cells():
            from mmrl import Job, configure, load, read_run
            seen = []
            config = load("library.yaml", ["steps=2", "run_dir=runs/cells", "evaluation.before=false"])
            with Job(config) as job:
                record = job.train(lambda step, metrics: seen.append((step, "loss" in metrics)))
                assert record.step == 2 and record.ending.state == "finished"
                before = job.evaluate(8)
            assert seen == [(1, True), (2, True), (2, False)], seen
            try:
                Job(config).__enter__()
            except Exception as error:
                assert "holds this run and it is complete" in str(error)
            else:
                raise AssertionError("it started again")
            with Job.from_weights("runs/cells") as job:
                assert job.evaluate(8)["evaluation/accuracy"] == before["evaluation/accuracy"]
                assert len(job.sample(3)) == 3
                try:
                    job.train()
                except Exception as error:
                    assert "this job cannot train" in str(error)
            tree = {"run_dir": "runs/more", "threads": 1, "model": {"build": "mmrl.tasks.visual_qa.tiny.model:build"},
                    "task": {"data": {"type": "digits", "cells": 2, "train_size": 100}}, "steps": 1,
                    "rollout": {"prompts": 4, "group_size": 4, "max_response_length": 4},
                    "evaluation": {"before": False, "prompts": 4}}
            def fails(step, metrics):
                raise KeyError("mine")
            try:
                with Job(configure(tree, ["seed=3"])) as job:
                    job.train(fails)
            except KeyError:
                print("failed as it should:", read_run("runs/more").ending.sentence)
        asyncio.run(cells())
    """
    done = python(shop, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed as it should: It ended at step 1 of 1 with an error: KeyError: 'mine'" in done.stdout


def test_what_is_made_in_python_is_what_a_file_says(shop):
    import yaml

    tree = yaml.safe_load((shop / "library.yaml").read_text())
    assert configure(tree, ["seed=3"]) == load(shop / "library.yaml", ["seed=3"])
    with pytest.raises(UserError, match=r"^configuration: unknown key rollout\.promts; did you mean rollout\.prompts"):
        configure(tree | {"rollout": {"promts": 3}})
    with pytest.raises(UserError, match="override 'seed' is not of the form"):
        configure(tree, ["seed"])


def test_weights_without_a_configuration_are_refused(tmp_path):
    with pytest.raises(UserError, match=rf"^{tmp_path}/none: there is no such folder; for a model of the hub give a"):
        Job.from_weights(tmp_path / "none")
    with pytest.raises(UserError, match=rf"^{tmp_path} has no configuration of its own; give one, as in: mmrl eval"):
        Job.from_weights(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="has not reached its end"):
        Job.from_weights(tmp_path)
    assert read_run(tmp_path).ending.state in ("empty", "unknown")


def test_deterministic_kernels_refuse_what_has_none(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    use_deterministic_kernels()
    try:
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(3, dtype=torch.long).put_(torch.tensor([0, 0]), torch.tensor([1, 2]), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert configure({"run_dir": "x", "engine": {"deterministic": True}}).engine.deterministic
