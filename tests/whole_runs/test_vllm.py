"""Training with vLLM beside the model, through several synchronisations; and what happens when one goes wrong."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
import transformers

from mmrl.generation.vllm import engine
from tests.whole_runs import vllm_workers
from tests.whole_runs.parts import call, metrics

pytestmark = vllm_workers.needs_vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm")
    call(vllm_workers.one_rank, path, log=path / "one.log", timeout=280)
    return path


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "one.json").read_text())


def test_the_engine_follows_the_trained_weights(folder):
    """Fixed prompts after each synchronisation, and every rollout of every step."""
    steps = [row for row in metrics(folder / "one") if "loss" in row]
    assert len(steps) == 4 and steps[-1]["grad_norm"] > 0
    for row in steps:
        assert row["generation/probe_gap"] < 1e-4 < row["generation/probe_limit"] == 1e-3
        assert row["generation/tensors_held"] + row["generation/tensors_packed"] == 69
        assert row["generation/tensors_unused"] == 0
        assert 0 < row["correction/logp_gap"] <= row["correction/logp_gap_max"] < 1e-3
        assert row["correction/effective_sample_size"] == pytest.approx(1, abs=1e-4)
        assert row["correction/clipped"] == 0


def test_greedy_responses_are_those_of_transformers(found):
    assert found["greedy"] == found["plain"]


def test_a_response_depends_on_its_own_seed_alone(found):
    assert found["seeded"] == found["alone"]
    assert len({tuple(row) for row in found["seeded"]}) > 4
    assert found["together"] == found["one_by_one"]  # also where a group is one request


def test_tokens_that_stand_for_pixels_are_never_sampled(found):
    assert len(found["hot"]) > 100  # nearly uniform over the vocabulary
    assert not set(found["hot"]) & set(found["suppressed"])


def test_a_synchronisation_that_does_not_happen_is_caught(found):
    assert "69 of the 69 tensors in it are not as they were sent: " in found["stale_weights"]


def test_caches_of_earlier_weights_are_caught(found):
    assert "it has all tensors as they were sent, so its key-value cache is stale" in found["stale_caches"]
    assert found["healthy"] == ""


def test_a_model_that_vllm_does_not_know_is_refused_in_one_line(found):
    assert found["unknown"].startswith("rollout.generator: vLLM cannot start with a context of")
    assert "NobodysForConditionalGeneration" in found["unknown"] and "\n" not in found["unknown"]
    both = f"vLLM {engine.TESTED}.0 and transformers {transformers.__version__} are installed; check that both support"
    assert both in found["unknown"]


def test_an_untested_version_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(engine, "TESTED", "0.1")
    assert re.search(
        r"vLLM [\d.]+ and transformers [\d.]+ are installed, but mmrl is tested with vLLM 0.1; install",
        engine.describe_versions(),
    )


# --- a LoRA handed over as such, and responses that take several steps ---


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    call(vllm_workers.adapters, path, log=path / "adapters.log", timeout=280)
    return path


@pytest.mark.slow
def test_an_adapter_arrives_after_every_step(adapters):
    steps = [row for row in metrics(adapters / "run") if "loss" in row]
    assert len(steps) == 4 and steps[0]["correction/logp_gap_max"] < 1e-3
    assert all(row["generation/probe_gap"] < 1e-3 and row["grad_norm"] > 0 for row in steps)
    found = json.loads((adapters / "adapters.json").read_text())
    assert found["loaded"] == [5] and found["adapters"] == 5  # one for each step and one for the evaluation
    assert found["moved"] > 1e-2  # by the LoRA, from what the model was


def test_an_adapter_that_does_not_arrive_is_caught(adapters):
    stale = json.loads((adapters / "adapters.json").read_text())["stale"]
    assert re.search(r"tensors in it are not as they were sent: base_model.*lora_A.weight", stale)


def test_responses_that_take_several_steps(adapters):
    found = json.loads((adapters / "adapters.json").read_text())
    assert found["greedy_in_segments"] == found["greedy"]
    assert sorted(found["trained"]) == sorted(2 * list(range(16)))
    steps = [row for row in metrics(adapters / "run") if "loss" in row]
    assert steps[0]["generation/staleness_max"] == 0
    assert max(row["generation/staleness_max"] for row in steps) == 1
    for row in steps:  # old tokens are not as likely as they were
        assert (row["correction/logp_gap_max"] > 1e-3) == (row["generation/staleness_max"] > 0)


# --- trees ---


@pytest.mark.slow
def test_responses_branch(tmp_path):
    """tests/whole_runs/test_branches.py has the same with an engine that is a copy of the model."""
    call(vllm_workers.trees, tmp_path, log=tmp_path / "trees.log", timeout=280)
    found = json.loads((tmp_path / "trees.json").read_text())
    assert found["gap"] < 1e-4  # of the beginnings too
    assert len(found["shared"]) == 6 and min(found["shared"]) >= 1
    assert found["cached"] and len(found["begun"]) >= 6 and min(found["begun"]) >= 1
    steps = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(steps) == 2 and all(row["grad_norm"] > 0 for row in steps)
    assert all(row["correction/logp_gap_max"] < 1e-3 and row["generation/probe_gap"] < 1e-4 for row in steps)


# --- a mixture of experts ---


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's vLLM tells its routing, and keeps experts unpacked")
def test_the_experts_of_a_mixture_arrive(tmp_path):
    call(vllm_workers.experts, tmp_path, log=tmp_path / "log", timeout=280)
    steps = [row for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(steps) == 2 and all(row["grad_norm"] > 0 for row in steps)
    assert all(row["generation/probe_gap"] < 1e-3 and row["correction/logp_gap_max"] < 1e-3 for row in steps)
    refused = (tmp_path / "refused.txt").read_text()  # it was asked
    assert refused.startswith("rollout.generator: vLLM cannot start with a context of")
    assert "AuxOutput Connector requires Model Runner V2" in refused


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "options", [[], [*vllm_workers.LORA, *vllm_workers.PARTIAL]], ids=["plain", "adapters, partial"]
)
@pytest.mark.parametrize("placement", [vllm_workers.VLLM, vllm_workers.SERVER], ids=["colocated", "server"])
def test_zero_3_on_two_ranks_from_start_to_checkpoint_to_resume(placement, options, tmp_path):
    """An engine on every rank, and one that rank 0 starts for both."""
    options = [*placement, *options]
    call(vllm_workers.two_ranks, tmp_path, *options, log=tmp_path / "start.log", ranks=2, timeout=590)
    whole = [row for row in metrics(tmp_path / "two") if "loss" in row]
    shutil.rmtree(tmp_path / "two/checkpoints/step-000004")
    resumed = partial(vllm_workers.two_ranks, resume=True)
    call(resumed, tmp_path, *options, "checkpoint.resume=true", log=tmp_path / "resume.log", ranks=2, timeout=590)
    steps = [row for row in metrics(tmp_path / "two") if "loss" in row]
    assert [row["step"] for row in steps] == [row["step"] for row in whole] == [1, 2, 3, 4]
    assert steps[:2] == whole[:2]
    for row in whole + steps[2:]:
        assert row["generation/probe_gap"] < 1e-3
        assert row["correction/logp_gap_max"] < 1e-3 or row["generation/staleness_max"] > 0
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in steps[2:]] == pytest.approx([row[name] for row in whole[2:]], rel=1e-4), name
