"""Conversations with images in training: ranks agree, and so do vLLM and transformers; through partial rollouts and
resumes."""

import json
import shutil
from functools import partial

import pytest

from tests.whole_runs import turn_workers
from tests.whole_runs.parts import call, distance, final, metrics, model_folder, timeless
from tests.whole_runs.vllm_workers import needs_vllm


def steps(folder):
    return [row for row in timeless(metrics(folder)) if "loss" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("turns")
    call(turn_workers.ranks, path, "one", [0], log=path / "one.log", timeout=200)
    call(turn_workers.ranks, path, "two", [2, 3], log=path / "two.log", ranks=2, timeout=280)
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_train_over_turns_as_one_does(folder, stage):
    from safetensors.torch import load_file

    one, two = folder / "one-0", folder / f"two-{stage}"
    assert distance(final(one), final(two)) < 1e-5
    assert distance(load_file(f"{model_folder()}/model.safetensors"), final(one)) > 1e-3
    shown = ("loss", "grad_norm", "entropy", "advantages/reward_mean")
    for a, b in zip(steps(one), steps(two), strict=True):
        assert {k: a[k] for k in shown} == pytest.approx({k: b[k] for k in shown}, rel=1e-4, abs=1e-6)
        assert a["surrogate/ratio_gap_max"] == b["surrogate/ratio_gap_max"] == 0


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_says_of_each_turn_what_transformers_does(tmp_path):
    call(turn_workers.beside, tmp_path, log=tmp_path / "log", timeout=500)
    found = json.loads((tmp_path / "beside.json").read_text())
    assert set(found["turns"]) >= {turn_workers.TURNS} and max(found["images"]) == turn_workers.TURNS - 1
    assert len(found["gaps"]) > 60 and max(found["gaps"]) < 1e-3
    assert found["greedy"] == found["plain"] == found["segments"]
    assert len({tuple(row) for row in found["greedy"]}) > 1


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [[], turn_workers.PARTIAL], ids=["whole", "partial"])
@pytest.mark.parametrize("placement", [turn_workers.COLOCATED, turn_workers.SERVER], ids=["colocated", "server"])
def test_training_over_turns_beside_vllm_is_resumed_exactly(placement, options, tmp_path):
    options = [*placement, *options, "checkpoint.every=2", "checkpoint.keep=2", "steps=4"]
    call(turn_workers.run, tmp_path / "run", *options, log=tmp_path / "start.log", timeout=500)
    whole = steps(tmp_path / "run")
    for row in whole:
        assert row["generation/probe_gap"] < 1e-3 and row["grad_norm"] > 0
        assert row["correction/logp_gap_max"] < 1e-3 or row["generation/staleness_max"] > 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-000004")
    resumed = partial(turn_workers.run, resume=True)
    call(resumed, tmp_path / "run", *options, "checkpoint.resume=true", log=tmp_path / "resume.log", timeout=500)
    again = steps(tmp_path / "run")
    assert [row["step"] for row in again] == [1, 2, 3, 4] and again[:2] == whole[:2]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in again[2:]] == pytest.approx([row[name] for row in whole[2:]], rel=1e-4), name
