"""Faults planted in vLLM itself, on a CPU: what the first synchronisation after an update says of each."""

import json
import re

import pytest

from tests.faults import vllm_faults
from tests.whole_runs.parts import call
from tests.whole_runs.vllm_workers import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted")
    call(vllm_faults.planted, path, log=path / "log", timeout=280)
    return json.loads((path / "planted.json").read_text())


def test_without_a_fault_nothing_is_said(found):
    assert found["healthy"] == [""] * 5


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("encoder cache", "has all tensors as they were sent, so its cache of encoded images is stale"),
        ("every cache", "has all tensors as they were sent, so its key-value cache is stale"),
        ("left out", r"\S*layers.0.mlp.up_proj.weight are trained, but it does not load them"),
        ("renamed", r"vLLM does not take the trained weights \(There is no module or parameter named '\S*o_proj"),
        ("two streams", r"1 of the 69 tensors in it are not as they were sent: \S*norm.weight;"),
        ("out of step", r"vLLM encodes prompt 1 as \d+ tokens and the trainer as \d+ different"),
    ],
)
def test_a_fault_is_named(found, fault, words):
    assert re.search(words, found[fault]) and "\n" not in found[fault]
