"""A run goes on with another number of ranks, and under another ZeRO stage."""

import re

import pytest

from mmrl.checkpoints.store import dealt
from tests.whole_runs.parts import TINY, command, distance, final, metrics, start, wait

OPTIONS = ["checkpoint.every=2", "optim.weight_decay=0.5", "optim.lr=1e-2", "optim.ema=0.9"]


def go(folder, ranks, *settings):
    log = folder.with_suffix(".log")
    processes = start(command, "train", str(TINY), f"run_dir={folder}", *OPTIONS, *settings, log=log, ranks=ranks)
    assert wait(processes, log) == [0] * ranks, log.read_text()[-3000:]
    return log.read_text()


SGD = [("optim={type: sgd, lr: 1, momentum: 0.5}",), ("optim={type: sgd, lr: 1}",)]


@pytest.mark.parametrize("optimizer", [(), *(pytest.param(sgd, marks=pytest.mark.slow) for sgd in SGD)])
def test_two_ranks_then_one_then_two_and_all_zero_stages(tmp_path, optimizer):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    go(whole, 1, "steps=8", *optimizer)
    go(parts, 2, "steps=2", "engine.zero_stage=2", *optimizer)
    said = go(parts, 1, "steps=4", "engine.zero_stage=3", *optimizer)
    assert "engine.zero_stage changes from 2 to 3" in said
    said = go(parts, 2, "steps=6", "engine.zero_stage=0", *optimizer)
    assert len(re.findall("resumed from", said)) == 2
    go(parts, 1, "steps=8", "engine.zero_stage=1", *optimizer)
    assert distance(final(whole), final(parts)) < 1e-5  # averages of weights, after eight steps that each moved them
    norms = [[(r["step"], r["grad_norm"]) for r in metrics(run) if "loss" in r] for run in (whole, parts)]
    assert [step for step, _ in norms[1]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [norm for _, norm in norms[0]] == pytest.approx([norm for _, norm in norms[1]], rel=1e-3)


def pool(*positions):
    """Groups of two responses; a response says where it belongs."""
    texts = [f"{position}{which}" for position in positions for which in "ab"]
    return {"positions": list(positions), "versions": [p * 10 for p in positions], "responses": texts, "logp": texts}


def test_rollouts_in_the_making_are_dealt_out_by_hand():
    pools = [pool(4, 0), pool(1), pool()]
    assert dealt(pools, 0, 1) == pool(0, 1, 4)
    assert dealt(pools, 0, 2) == pool(0, 4) and dealt(pools, 1, 2) == pool(1)
    assert dealt([pool(7), pool(3)], 2, 4) == pool()
    assert dealt([{}, {}], 0, 1) == {}
