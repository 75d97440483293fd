"""Conversations from the configuration to the result: the zoom recipe and the card game in a few steps."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from mmrl import build
from mmrl.cli.training import train as run
from mmrl.config import load, to_yaml
from mmrl.report.run import Run
from mmrl.trainer import Trainer
from tests.whole_runs.parts import release

ZOOM = [
    "model.warm_start=null",
    "model.build=mmrl.tasks.visual_qa.tiny.zoom:build",
    "rollout.prompts=4",
    "rollout.group_size=4",
    "engine.micro_batch=5",
    "evaluation.before=false",
    "evaluation.every=0",
    "evaluation.prompts=6",
    "optim.schedule=linear",
    "log.samples_every=2",
]
GAMES = [option.replace("visual_qa.tiny_zoom", "visual_games.tiny_model") for option in ZOOM]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def made(folder, *overrides):
    config = load("configs/vlm/visual_qa_zoom.yaml", [f"run_dir={folder}", *ZOOM, *overrides])
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    engine = build.build_engine(config, policy)
    return Trainer(config, policy, task, engine, Run(folder, to_yaml(config), writes=True))


def test_the_card_game_trains_with_credit_by_turn(tmp_path):
    assert run(load("configs/vlm/visual_games.yaml", [f"run_dir={tmp_path}", *GAMES, "steps=2"])) == 0
    steps = [line for line in lines(tmp_path) if "surrogate/ratio_gap_max" in line]
    assert len(steps) == 2 and all(line["surrogate/ratio_gap_max"] == 0 for line in steps)
    assert all(1 <= line["turns/count"] <= 3 for line in steps)
    table = (tmp_path / "samples" / "train-000002.html").read_text()
    assert len(re.findall('class="role">response', table)) >= 8 and "ended by" in table


@pytest.mark.timeout(300)
def test_a_run_over_turns_goes_on_from_its_checkpoint_bit_by_bit(tmp_path):
    whole = made(tmp_path / "whole", "steps=3")
    whole.train()
    assert all(line.get("surrogate/ratio_gap_max", 0) == 0 for line in lines(tmp_path / "whole"))
    release(whole)
    half = made(tmp_path / "half", "steps=3", "checkpoint.every=1")
    save = half.save

    def save_and_stop():
        save()
        half.stop_signal = 15

    half.save = save_and_stop
    half.train()
    assert half.step == 1
    release(half)
    more = [f"run_dir={tmp_path / 'half'}", *ZOOM, "steps=3", "checkpoint.every=1", "checkpoint.resume=true"]
    assert run(load("configs/vlm/visual_qa_zoom.yaml", more)) == 0
    got = load_file(tmp_path / "half" / "final" / "model.safetensors")
    want_file = load_file(tmp_path / "whole" / "final" / "model.safetensors")
    assert got.keys() == want_file.keys()
    assert all(torch.equal(got[name], want_file[name]) for name in got)
