"""Rewards that fail, through the command line: samples are lost and the run goes on, unless none is scored at all."""

import json

import pytest

from mmrl.errors import UserError
from mmrl.training.metrics import UnscoredMonitor, step_line
from tests.helpers.command_line import TINY, WARM_START, mmrl

GRPO = ["algorithm.type=grpo", "rollout.group_size=4", "evaluation.before=false", "evaluation.prompts=2"]


def run(tmp_path, reward, *arguments):
    rewards = f"task.rewards=[{{name: 'tests.rewards.hostile:{reward}', label: own}}]"
    result = mmrl(tmp_path, "train", WARM_START, *TINY, *GRPO, rewards, f"run_dir={tmp_path / 'run'}", *arguments)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "loss" in row]
    return result, steps


def test_a_reward_that_raises_now_and_then_costs_those_samples(tmp_path):
    result, steps = run(tmp_path, "raises_on_odd_prompts")
    assert result.code == 0 and "Traceback" not in result.out + result.err
    assert len(steps) == 2 and all(0 < row["unscored"] == row["unscored/own"] < 1 for row in steps)
    assert (result.out + result.err).count("reward own failed on prompt digits-train-0-") == 2  # the 1st and the 10th
    assert f"unscored {steps[0]['unscored']:.0%}" in result.out


def test_a_run_in_which_nothing_is_scored_ends_by_name(tmp_path):
    result, steps = run(tmp_path, "leaves", "steps=5", "rollout.max_unscored_steps=2")
    assert result.code == 2 and len(steps) == 2
    (line,) = [line for line in result.err.splitlines() if line.startswith("mmrl: ")]
    assert "step 2: no rollout could be scored in 2 steps in a row (unscored by reward: own 100%)" in line
    assert "SystemExit: 3" in result.out + result.err


def test_only_steps_in_a_row_count():
    silence = UnscoredMonitor(2)
    for step, share in enumerate([1.0, 0.99, 1.0, 0.0, 1.0]):
        silence.judge(step, {"unscored": share})
    silence.judge(5, {"loss": 1.0})  # demonstrations have no reward
    with pytest.raises(UserError, match="step 6"):
        silence.judge(6, {"unscored": 1.0, "unscored/a": 1.0, "unscored/b": 0.0})


def test_the_line_of_a_step_tells_what_was_not_scored():
    values = {"throughput/rollouts_per_second": 1.0, "time/step": 1.0}
    assert "unscored 25%" in step_line(1, 2, values | {"unscored": 0.25})
    assert "unscored" not in step_line(1, 2, values | {"unscored": 0.0})
