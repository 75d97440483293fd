"""Real servers of vLLM that get their weights through a process group: proven, damaged, killed, stopped, and under
ZeRO-3."""

import json
import re

import pytest

from tests.whole_runs import broadcast_workers
from tests.whole_runs.parts import call, metrics
from tests.whole_runs.vllm_workers import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("broadcast")
    call(broadcast_workers.two_servers, path, log=path / "two.log", timeout=1100)
    return path


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "two.json").read_text())


def test_engines_have_the_trained_weights_and_no_file_holds_them(found):
    for when in ("start", "sound", "after"):
        counts = found[when]
        assert counts["generation/probe_gap"] < 1e-3
        assert counts["generation/tensors_held"] + counts["generation/tensors_packed"] == 69
    assert min(found["answered"]) > 0 and found["files"] == []


def test_training_goes_on(folder):
    steps = [row for row in metrics(folder / "run") if "loss" in row]
    assert len(steps) == 2 and steps[0]["correction/logp_gap_max"] < 1e-3


def test_one_bit_that_changes_on_its_way_is_found_by_name(found):
    assert re.search(r"vLLM, 1 of the 69 tensors .* sent: .*layers\.1\.mlp\.down_proj\.weight", found["damaged"])
    assert found["again"] == found["answers"]  # the next synchronisation mends it


def test_an_engine_that_was_killed_gets_what_was_sent_last(found):
    assert found["version"] and found["copy"]["generation/tensors_unused"] == 0
    assert found["after"]["generation/restarts"] == 1


def test_an_engine_that_stops_in_the_middle_is_named_in_time(found):
    assert "did not receive all weights that were broadcast within rollout.generator.timeout=8 s" in found["stopped"]
    assert "\n" not in found["stopped"] and 7 < found["seconds"] < 20


def test_modules_are_gathered_on_all_ranks_while_rank_0_sends(tmp_path):
    call(broadcast_workers.two_ranks, tmp_path, log=tmp_path / "ranks.log", ranks=2, timeout=1100)
    steps = [row for row in metrics(tmp_path / "ranks") if "loss" in row]
    assert len(steps) == 2 and steps[0]["correction/logp_gap_max"] < 1e-3
    assert all(row["generation/probe_gap"] < 1e-3 for row in steps if "generation/probe_gap" in row)
