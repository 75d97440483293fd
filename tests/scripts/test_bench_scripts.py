"""The scripts of scripts/bench and scripts/readme import, compose only configurations that are valid today, and print
their tables. Nothing is trained: `mmrl train` and `mmrl eval` are composed as the command line would, and leave the
files that a finished run has."""

import argparse
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import imageio.v3
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import mmrl.kernels
from mmrl.cli import control
from mmrl.cli import main as cli
from mmrl.config import load
from mmrl.report.run import write_samples
from mmrl.rollouts import Prompt, Sample
from mmrl.settings import plain
from mmrl.trainer import Trainer
from scripts.bench import (
    end_to_end,
    flow,
    generation,
    image_digits,
    kernels,
    manipulation,
    methods,
    recipes,
    robot_methods,
    turns,
    turns_learning,
    visual_qa,
    vllm_learning,
)
from scripts.readme import answers, before_after, episodes, learning_curve
from tests.helpers.command_line import ROOT

SCRIPTS = [path for folder in ("bench", "readme") for path in sorted((ROOT / "scripts" / folder).glob("*.py"))]
BEFORE = {"step": 0, "evaluation/n": 200.0, "evaluation/accuracy": 0.25} | {
    f"evaluation/guard/{name}": 0.5 for name in image_digits.GUARDS
}
AFTER = BEFORE | {"step": 4, "evaluation/accuracy": 0.75}
TIMES = {f"time/{name}": 2.0 for name in ("step", "rollout", "update", "synchronise")}
GAPS = {1: 0.8, 2: 0.9, 3: 0.4, 4: 0.1}  # the first two steps warm up
STEPS = [{"step": step, "loss": 0.5, "correction/logp_gap": gap, **TIMES} for step, gap in GAPS.items()]


class Composed:
    """Stands where `subprocess.run` was: composes what `mmrl train` and `mmrl eval` were told."""

    def __init__(self):
        self.configs = {}  # by run directory, or by the model that is evaluated

    def __call__(self, command, **_):
        assert command[1:3] == ["-m", "mmrl"], command
        options = cli.parser().parse_args([str(word) for word in command[3:]])
        path, given = cli.config_and_overrides(options) if command[3] == "eval" else (options.config, options.overrides)
        if command[3] == "control":
            given = [*control.overrides(load(path, given), path), *given]
        config = load(path, given)
        if command[3] == "eval":
            self.configs[f"eval {options.model}"] = config
            (Path(options.model) / "evaluation.json").write_text('{"evaluation/accuracy": 0.125}')
        else:
            self.configs[config.run_dir] = config
            finish(Path(config.run_dir))
        return subprocess.CompletedProcess(command, 0)


def finish(run, **more):
    """more: metrics of every step."""
    (run / "final").mkdir(parents=True)
    rows = [BEFORE, *(row | more for row in STEPS), AFTER]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def composed(monkeypatch):
    stand_in = Composed()
    monkeypatch.setattr(subprocess, "run", stand_in)
    return stand_in


@pytest.fixture
def table(monkeypatch, capsys):
    """Runs a script with a command line, and returns the cells of the Markdown rows it prints, without headings."""

    def rows(script, *arguments):
        monkeypatch.setattr("sys.argv", [script.__file__, *map(str, arguments)])
        script.main()
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        heads = [number for number, line in enumerate(lines) if set(line) <= set("|- ")]
        found = [n for n in range(len(lines)) if n not in heads and n + 1 not in heads]
        return [[cell.strip() for cell in lines[number].strip("|").split("|")] for number in found]

    return rows


@pytest.mark.parametrize("path", SCRIPTS, ids=[f"{path.parent.name}/{path.stem}" for path in SCRIPTS])
def test_a_script_imports(path):
    if path.stem in ("robots", "simulators", "episodes"):
        pytest.importorskip("mujoco")  # with gymnasium and imageio, of the same extra
    assert importlib.import_module(f"scripts.{path.parent.name}.{path.stem}").__doc__


def test_each_way_to_generate_is_composed_from_one_base(composed, table, tmp_path):
    rows = table(vllm_learning, "--seeds", 1, "--runs", tmp_path, "--steps", 7, "rollout.prompts=4")
    assert [row[:4] for row in rows] == [[arm, "0", "0.250", "0.750"] for arm in vllm_learning.ARMS]
    assert {row[-1] for row in rows} == {"4.0e-01"}
    arms = {arm: composed.configs[str(tmp_path / f"{arm}-0")] for arm in vllm_learning.ARMS}
    assert {config.model.path for config in arms.values()} == {str(tmp_path / "base-0" / "final")}
    assert {(config.steps, config.rollout.prompts) for config in arms.values()} == {(7, 4)}
    types = ["transformers", "vllm_colocated", "vllm_server", "vllm_server"]
    assert [config.generator.type for config in arms.values()] == types
    assert [config.generator.steps_ahead for config in arms.values()] == [0, 0, 0, 1]


def test_methods_are_compared_with_plain_grpo_of_their_setting(composed, table, tmp_path, monkeypatch):
    def forked(command):
        composed([sys.executable, "-m", "mmrl", *command])
        return 3.0 if "algorithm.minibatches=4" in command else 2.0

    monkeypatch.setattr(methods, "forked", forked)
    arguments = ("--seeds", 2, "--runs", tmp_path, "--steps", 7, "--only", "success_replay|: cispo|: supervised")
    rows = table(methods, *arguments, "rollout.prompts=4")
    assert [row[0] for row in rows] == [
        "plain GRPO",
        "plain GRPO, 4 updates a step",
        "plain GRPO, 256 prompts",
        "random rewards",
        "surrogate: cispo, 4 updates a step",
        "source: success_replay, 256 prompts",
    ]
    assert {row[1] for row in rows} == {"0.750"} and {row[3] for row in rows} == {"1.00"}
    assert [row[2] for row in rows] == [""] * 3 + ["+0.0 (+0.0 .. +0.0)"] * 3
    runs = composed.configs
    assert len(runs) == 1 + 2 * len(rows)  # a base, and two seeds of each
    replay, cispo = (
        runs[str(tmp_path / "digits" / f"{name}-1")]
        for name in ("source_success_replay_256_prompts", "surrogate_cispo_4_updates_a_step")
    )
    assert (replay.seed, replay.steps, replay.rollout.prompts) == (1, 7, 4)
    base = str(tmp_path / "digits" / "base" / "final")
    assert replay.model.path == base and replay.task.data.train_size == 256
    assert cispo.algorithm.minibatches == 4 and cispo.algorithm.surrogate.type == "cispo"
    composed.configs = {}
    table(methods, *arguments, "rollout.prompts=4")
    assert composed.configs == {}  # nothing is repeated
    table(methods, *arguments, "rollout.prompts=8")
    assert len(composed.configs) == 2 * len(rows)  # but for what is another run now


@pytest.mark.slow
def test_a_run_of_its_own_process_says_what_it_took_or_that_it_failed(capfd):
    assert methods.forked(["config", "rollout.temperature"]) > 0
    with pytest.raises(RuntimeError, match=r"mmrl config nosuch ended with 2"):
        methods.forked(["config", "nosuch"])
    assert "nosuch" in capfd.readouterr().err


def test_an_interval_of_student():
    assert methods.interval([1.0, 2.0, 3.0]) == "(-0.5 .. +4.5)"  # 2 -+ 4.303 / sqrt(3)
    assert methods.interval([1.0]) == "(one seed)"


@pytest.mark.parametrize("task", methods.TASKS)
def test_every_method_has_a_run_or_a_reason(task, monkeypatch, capsys):
    """A method of components needs several rewards, of which these tasks have one."""
    monkeypatch.setattr("sys.argv", [methods.__file__, "--list", "--task", task])
    methods.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(methods.catalogue(methods.TASKS[task])) > 75
    assert [line for line in lines if "required" in line and not line.startswith("components")] == []
    said = {tuple(line.split(": ", 2)[:2]): line.split(": ", 2)[2] for line in lines}
    runs = {name for (_, name), words in said.items() if re.match(r"[a-z.]+=\[?\{type: ", words)}
    several = {
        "ppo": {"digits", "zoom", "reach"},
        "turn_returns": {"zoom"},
        "modes": {"digits", "zoom"},
        "greedy": {"digits", "reach"},
    }
    assert {name: task in where for name, where in several.items()} == {name: name in runs for name in several}
    few = methods.TASKS[task].few
    remembering = [arm for arm in methods.catalogue(methods.TASKS[task]) if arm.setting.name]
    assert {arm.setting.overrides for arm in remembering} == {("algorithm.minibatches=4",), (few,)}


def test_end_to_end_trains_with_both_backends(composed, table, tmp_path):
    rows = table(end_to_end, "--runs", tmp_path, "--rounds", 1)
    assert [row[1:] for row in rows] == [["2.000, 2.000", "2.000, 2.000", "0e+00"]] * 3
    assert [row[0].strip("`") for row in rows] == list(end_to_end.SHORT)
    assert len(composed.configs) == 9  # a base and two backends of each
    for name in end_to_end.SHORT:
        backends = [composed.configs[str(tmp_path / f"{name}-{b}")].kernels.backend for b in end_to_end.BACKENDS]
        assert backends == ["cpu", "torch"]


@pytest.mark.parametrize("data", list(image_digits.RECIPES))
def test_every_recipe_for_images_is_composed(data, composed, table, tmp_path):
    rows = table(image_digits, "--data", data, "--seeds", 2, "--runs", tmp_path, "threads=2")
    assert [row[0] for row in rows] == [recipe or data for recipe in image_digits.RECIPES[data]]
    assert {tuple(row[1:3]) for row in rows} == {("0.250", "0.750 (0.750 .. 0.750)")}
    assert {config.seed for config in composed.configs.values()} == {0, 1}
    assert {config.threads for config in composed.configs.values()} == {2}
    assert len(composed.configs) == 2 * len(rows)


def test_every_recipe_for_robots_is_composed(composed, table, tmp_path):
    (tmp_path / "token-0" / "checkpoints").mkdir(parents=True)  # of a run that was interrupted
    rows = table(manipulation, "--seeds", 1, "--runs", tmp_path, "--recipes", ",".join(manipulation.RECIPES), "steps=3")
    assert [row[0] for row in rows] == list(manipulation.RECIPES)
    assert {tuple(row[1:4]) for row in rows} == {("0", "0.250", "0.750")}
    assert [row[5] for row in rows] == ["0.125"] * 15 + [""] * 4
    assert not (tmp_path / "token-0" / "checkpoints").exists()
    assert {config.steps for config in composed.configs.values()} == {3}
    told = [config.task.instructions for run, config in composed.configs.items() if run.startswith("eval")]
    assert told == ["shuffled"] * 15
    flow_base = composed.configs[str(tmp_path / "flow-0")].model.path
    assert flow_base == str(tmp_path / "base-flow-0" / "final")


def test_ways_to_improve_a_robot_policy_start_from_one_base(composed, table, tmp_path, monkeypatch):
    monkeypatch.setattr(robot_methods, "STARTS", 200)  # as many as `finish` writes
    rows = table(robot_methods, "--seeds", 2, "--runs", tmp_path)
    arms = ["ppo", "steered", "ogpo", "rlpd", "recap", "control"]
    assert [row[:2] for row in rows] == [[arm, seed] for seed in "01" for arm in arms]
    assert {row[3] for row in rows} == {"0.75"}
    runs = {run.removeprefix(f"{tmp_path}/push/"): config for run, config in composed.configs.items()}
    base = str(tmp_path / "push" / "gaussian_base_1" / "final")
    assert {runs[f"{arm}_1"].model.path for arm in ("ppo", "ogpo", "rlpd", "control")} == {base}
    assert runs["recap_1/played_0"].model.path == runs["recap_1/learned_1"].model.path == base
    assert runs["recap_1/played_1"].model.path.endswith("recap_1/learned_0/final")
    assert runs["recap_1/learned_1"].task.demonstrations.runs == [
        str(tmp_path / "push" / "recap_1" / f"played_{i}") for i in (0, 1)
    ]
    assert runs["steered_1"].model.path.endswith("flow_base_1/final")
    assert runs["control_1"].task.rewards[0].name == "random" and runs["control_1"].algorithm.simulator_reward == 0
    assert {runs[f"{arm}_1"].seed for arm in arms if arm != "recap"} == {1}
    assert (runs["recap_1/played_0"].seed, runs["recap_1/played_1"].seed) == (1, 1001)
    composed.configs = {}
    assert table(robot_methods, "--seeds", 2, "--runs", tmp_path) == rows and composed.configs == {}


def test_environment_steps_are_counted_by_hand(tmp_path):
    """A base, and three steps of 48 episodes with a mean length of 10, 20 and 30 actions."""
    for name, lines in {
        "gaussian_base_0": [{"loss": 1.0, "time/step": 99.0}, {"evaluation/n": 100, "evaluation/accuracy": 0.25}],
        "ppo_0": [
            {"loss": 1.0, "time/step": 60.0, "episode/length": 10.0},
            {"loss": 1.0, "time/step": 60.0, "episode/length": 20.0},
            {"evaluation/n": 100, "evaluation/accuracy": 0.5},
            {"loss": 1.0, "time/step": 60.0, "episode/length": 30.0},
            {"evaluation/n": 100, "evaluation/accuracy": 0.4},
        ],
    }.items():
        (tmp_path / name / "final").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    points, minutes = robot_methods.curve(tmp_path / "ppo_0", "ppo")
    assert (points, minutes) == ([(0, 0.25), (1440, 0.5), (2880, 0.4)], "3.0")
    assert robot_methods.cells(points, 0.4) == ["0: 0.25, 1,440: 0.50, 2,880: 0.40", "0.40", "1,440"]
    assert robot_methods.cells(points, 0.6)[2] == "not reached"
    assert robot_methods.curve(tmp_path / "rlpd_0", "rlpd") == ([], "")
    assert robot_methods.cells([], 0.4) == ["missing", "", ""]


def test_gains_by_task_are_of_as_many_episodes_each():
    seen = {"evaluation/n": 40.0, "evaluation/accuracy": 0.5}
    both = {f"{manipulation.TASK}open": 0.25, f"{manipulation.TASK}go/unseen": 0.75}
    steps = [seen | both, {"loss": 1.0}, seen | both | {f"{manipulation.TASK}open": 1.0}]
    low, high = manipulation.difference(0.25, 1.0, 20)
    assert manipulation.by_task(steps) == [
        ["go/unseen", "0.750", "0.750", "+0.000 (-0.259 .. +0.259)"],  # Wilson: 0.5313 to 0.8882
        ["open", "0.250", "1.000", f"+0.750 ({low:+.3f} .. {high:+.3f})"],
    ]
    assert low == pytest.approx(0.75 - (0.1611**2 + 0.2187**2) ** 0.5, abs=1e-3)  # Wilson's 0.8389, and 0.4687
    assert manipulation.by_task([seen | {f"{manipulation.TASK}open": 0.25}, seen]) == []


def test_recipes_over_turns_are_composed_with_their_controls(composed, table, tmp_path):
    arguments = ("--learning", "--seeds", "0,2", "--runs", tmp_path, "rollout.prompts=4")
    rows = table(turns, *arguments)
    each, means = rows[:24], rows[24:]
    assert [row[:2] for row in each] == [[name, seed] for seed in "02" for name in turns_learning.RECIPES["zoom"]]
    assert {tuple(row[2:6]) for row in each} == {("25.0", "75.0", "12.5", "12.5")}
    assert {row[-1] for row in means} == {"0.0 (0.0 .. 0.0)"} and len(means) == 12
    runs = composed.configs
    zoom, unrelated, no_tool = (
        runs[str(tmp_path / f"visual_qa_zoom{name}-2")] for name in ("", "_unrelated", "_no_tool")
    )
    base = str(tmp_path / "visual_qa_zoom_warm_start-2" / "final")
    assert zoom.model.path == unrelated.model.path == base and zoom.seed == 2 and zoom.rollout.prompts == 4
    assert no_tool.task.environment.limits.max_turns == 1 and no_tool.algorithm.type == "grpo"
    assert no_tool.steps == zoom.steps and no_tool.model.path.endswith("zoom_no_tool_warm_start-2/final")
    critic, control = (runs[str(tmp_path / f"visual_qa_zoom_{name}-2")] for name in ("ppo", "ppo_control"))
    assert critic.model.path == control.model.path == base and critic.algorithm.type == control.algorithm.type == "ppo"
    assert [reward.name for reward in control.task.rewards] == ["random"] != [r.name for r in critic.task.rewards]
    greedy = runs[f"eval {tmp_path / 'visual_qa_zoom-2' / 'final'}"].evaluation
    assert (zoom.evaluation.temperature, greedy.temperature) == (1.0, 0.0)
    assert (zoom.evaluation.prompts, greedy.prompts) == (500, 500)
    composed.configs = {}
    table(turns, *arguments)
    assert composed.configs == {}  # nothing is repeated


def test_each_run_over_turns_begins_where_its_recipe_does():
    """What the table trains is what `mmrl train` would, base after base."""
    for rows in turns_learning.RECIPES.values():
        for chain in rows.values():
            begins = [load(recipes.file(name)).model.warm_start for name in chain]
            assert [begin and Path(begin).stem for begin in begins] == [*chain[1:], None]


def test_what_a_tool_gains_is_above_the_best_without_it(tmp_path, capsys, monkeypatch):
    shares = {"zoom": (40.0, 90.0, 70.0, 80.0), "no_tool": (20.0, 30.0, 45.0, 35.0)}

    def learned(recipe, row, seed, runs, overrides):
        named = dict(zip(turns_learning.SHARES, (*shares[row], None, 98.0), strict=True))
        return turns_learning.Learned(row, seed, named, 2.0)

    monkeypatch.setattr(turns_learning, "learned", learned)
    turns_learning.table("zoom", ["zoom", "no_tool"], [0, 1], tmp_path, [])
    said = capsys.readouterr().out
    assert "| zoom | 1 | 40.0 | 90.0 | 70.0 | 80.0 | - | 98.0 | 2.0 |" in said
    assert "| 98.0 (98.0 .. 98.0) | 45.0 (45.0 .. 45.0) |" in said  # 90 sampled after, 45 at best without the tool


@pytest.mark.parametrize("placement", ["colocated", "server"])
def test_generation_is_measured_with_the_engine_that_was_asked_for(placement):
    options = generation.arguments([f"--placement={placement}", "--length=5", "--prompts=3", "--group=2"])
    generator = generation.configuration(options).generator
    assert generator.type == f"vllm_{placement}" and generator.max_sequences == 6
    options = generation.arguments(["--model=M", "--dtype=bfloat16"])
    config = generation.configuration(options)
    assert (config.model.path, config.model.build, config.engine.zero_stage) == ("M", None, 1)


@pytest.fixture
def bench_options(tmp_path):
    given = {"arm": "mmrl", "base": "B", "out": tmp_path / "out", "seed": 3, "steps": 4, "threads": 1, "lr": 2e-4}
    asked = {"prompts": 8, "group": 4, "length": 6, "cells": 3, "scale": 2}
    return argparse.Namespace(**given, **asked, held_out=7)


def test_the_arms_of_the_comparison_with_trl_get_the_questions_that_mmrl_draws(bench_options, monkeypatch):
    made = []

    def train(config):
        made.append(config)
        finish(Path(config.run_dir), accuracy=0.5)

    monkeypatch.setattr("mmrl.cli.training.train", train)
    monkeypatch.setattr("mmrl.trainer.Trainer", Trainer)  # puts back what the script replaces
    assert visual_qa.train_mmrl(bench_options)[2] == [0.5] * 4
    config = made[0]
    assert (config.algorithm.type, config.group_size, config.engine.micro_batch) == ("grpo", 4, 32)
    assert (config.rollout.prompts, config.rollout.max_response_length.value) == (8, 6)
    assert (config.task.data.cells, config.task.data.scale) == (3, 2)
    assert config.checkpoint.every == config.log.samples_every == 0  # TRL saves nothing either
    task, prompts = visual_qa.questions(bench_options)
    own, order = config.task.build(config.seed), config.rollout.sampler.model_copy(deep=True)
    order.start(len(own.train), config.seed)
    expected = [own.train[index] for index in order.draw(4 * config.rollout.prompts)]
    assert [p.id for p in prompts] == [p.id for p in expected]
    assert [(p.text, p.answer) for p in prompts] == [(p.text, p.answer) for p in expected]
    assert all(np.array_equal(p.images[0], e.images[0]) for p, e in zip(prompts, expected, strict=True))
    assert visual_qa.score(task, prompts[:2], [prompts[0].answer, "wrong"], 6) == [1.0, 0.0]


def test_the_comparison_with_trl_evaluates_all_arms_on_the_same_questions(
    bench_options, composed, monkeypatch, tmp_path
):
    monkeypatch.setattr(visual_qa, "BUILD", tmp_path)
    base = visual_qa.make_base(5)
    assert base == tmp_path / "base-5" / "final" and composed.configs[str(base.parent)].steps == 5

    def run(command, environment, log):
        if "eval" in command:
            return composed(command)
        (tmp_path / "runs" / "plain" / "final").mkdir()
        return (tmp_path / "runs" / "plain" / "result.json").write_text('{"peak_mib": 1.0}')

    monkeypatch.setattr(visual_qa, "run", run)
    assert visual_qa.measure("plain", base, 3, bench_options) == {"peak_mib": 1.0, "accuracy": 0.125}
    evaluated = composed.configs[f"eval {tmp_path / 'runs' / 'plain' / 'final'}"]
    assert evaluated.evaluation.prompts == 7
    assert plain(evaluated.task)["data"] | visual_qa.data(bench_options) == plain(evaluated.task)["data"]


def test_the_price_of_each_way_to_train_a_flow_model_is_counted(table):
    rows = table(flow, "--rounds", 1, "--prompts", 1, "--group", 1)
    counted = {row[0]: row[1:4] for row in rows[:6]}
    assert counted["full + CFG"] == ["20.0", "18.0", "9.0"]  # ten steps, nine of them trained, twice with guidance
    assert counted["window"] == ["10.0", "2.0", "2.0"]
    assert counted["contrast"] == ["10.0", "4.0", "4.0"]
    assert [row[0] for row in rows[6:]] == ["one pass for all steps", "one pass a step"]


@pytest.fixture
def compiled():
    """Puts back what the script chooses for its process."""
    if not shutil.which("g++"):
        pytest.skip("C++ kernels need g++")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    mmrl.kernels.use("auto")


def test_every_operator_is_timed(table, compiled):
    rows = table(kernels, "--threads", 1, "--rounds", 1, "--scale", 0.01, "--no-compile")
    operators = {re.split(r"[ ,]", row[0])[0] for row in rows}
    assert operators == {
        "denoise_step",
        "denoise_logprob",
        "token_logprob",
        "hidden_logprob",
        "group_advantage",
        "gae",
        "clipped_surrogate",
    }


def test_the_tabletop_of_the_bench_is_one_that_can_be_made():
    pytest.importorskip("mujoco")
    from scripts.bench import simulators

    options = argparse.Namespace(libero_python=None)
    with simulators.make("tabletop", options, 2) as sim:
        sim.reset([0, 1], [simulators.SETTINGS["tabletop"][2]] * 2)
        assert simulators.stepper(sim, np.random.default_rng(0), 1)() == 2


def test_the_first_rows_of_the_last_images_stand_below_those_of_the_first(tmp_path):
    for step, colour in ((0, "red"), (5, "green"), (9, "blue")):
        (tmp_path / "samples").mkdir(exist_ok=True)
        Image.new("RGB", (20, 30), colour).save(tmp_path / "samples" / f"evaluation-{step:06d}.png")
    before_after.main(tmp_path / "sheet.png", [tmp_path], rows=2)
    sheet = Image.open(tmp_path / "sheet.png").convert("RGB")
    assert sheet.size == (20, 20)  # two bands of 2 rows of 2 pixels, 12 apart
    assert [sheet.getpixel((0, y)) for y in (3, 10, 16)] == [(255, 0, 0), (255, 255, 255), (0, 0, 255)]


def test_animations_show_every_evaluation_and_every_frame(tmp_path):
    """Each frame keeps its colors and its time; a video that has ended keeps its last frame."""
    (tmp_path / "samples").mkdir()
    for step, color in ((0, "red"), (4, "lime"), (8, "blue")):
        Image.new("RGB", (200, 60), color).save(tmp_path / "samples" / f"evaluation-{step:06d}.png")
    before_after.animate(tmp_path / "steps.gif", tmp_path, rows=1)
    with Image.open(tmp_path / "steps.gif") as seen:
        assert (seen.size, seen.n_frames) == ((200, 20 + before_after.BAR), 3)
        assert [colors(seen, time, (5, 30)) for time in range(3)] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
        assert seen.info["duration"] == before_after.LAST_MS
    for name, shades in (("short", (0, 80)), ("long", (0, 80, 240))):
        imageio.v3.imwrite(tmp_path / f"{name}.gif", [np.full((32, 32, 3), shade, np.uint8) for shade in shades])
    episodes.animate(tmp_path / "arm.gif", [tmp_path / "short.gif"], [tmp_path / "long.gif"])
    with Image.open(tmp_path / "arm.gif") as seen:
        assert (seen.size, seen.n_frames) == ((32, 2 * (32 + episodes.LABEL)), 3)
        below = 32 + 2 * episodes.LABEL + 16
        assert [colors(seen, 2, (16, y))[0] for y in (episodes.LABEL + 16, below)] == pytest.approx([80, 240], abs=9)


def test_an_animation_of_answers_has_a_card_for_each_prompt_in_its_colour(tmp_path):
    """A question whose answer becomes right, and beside it one whose answer stays wrong; an image of a sentence."""
    red, blue = (Image.new("RGB", (20, 10), color) for color in ("red", "blue"))
    for step, (said, right) in enumerate((("4", 0.0), ("seven", 1.0))):
        asked = [Sample(Prompt(name, "how many?", (red,), answer="seven"), said) for name in "ab"]
        write_samples(tmp_path / "samples" / f"evaluation-{step:06d}.html", asked, {"accuracy": [right, 0.0]})
    answers.animate(tmp_path / "answers.gif", tmp_path, columns=2, rows=1)
    mark, picture = (12, answers.BAR + answers.TILE[1] - 16), (answers.TILE[0] // 2, answers.BAR + 30)
    with Image.open(tmp_path / "answers.gif") as seen:
        assert (seen.size, seen.n_frames) == ((2 * answers.TILE[0], answers.TILE[1] + answers.BAR), 2)
        assert [colors(seen, time, mark) for time in range(2)] == [answers.WRONG, answers.RIGHT]
        assert colors(seen, 1, (answers.TILE[0] + mark[0], mark[1])) == answers.WRONG
        assert colors(seen, 0, picture) == (255, 0, 0)
    drawn = Sample(Prompt("b", "a blue sky"), image=torch.tensor(np.asarray(blue)).permute(2, 0, 1) / 255)
    write_samples(tmp_path / "drawn.html", [drawn], {"accuracy": [1.0]})
    (row,) = answers.read_rows((tmp_path / "drawn.html").read_text())
    assert (row.prompt, row.response, row.right) == ("a blue sky", "", True)
    assert answers.tile(row).getpixel(picture) == (0, 0, 255)


def colors(animation, time, place):
    animation.seek(time)
    return animation.convert("RGB").getpixel(place)


def test_a_learning_curve_is_drawn(tmp_path):
    finish(tmp_path / "run")
    learning_curve.main(str(tmp_path / "curve.png"), [str(tmp_path / "run")])
    assert Image.open(tmp_path / "curve.png").size == (770, 352)


def test_the_quickstart_trains_from_the_base_that_it_makes(tmp_path):
    """The script itself, where nothing is to be set up and `mmrl` prints the configuration instead of training."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("true")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    command = tmp_path / ".venv" / "bin" / "mmrl"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mmrl "$@" --print-config\n')
    command.chmod(0o755)
    script = ["bash", str(tmp_path / "scripts" / "quickstart.sh"), "steps=3", "seed=5"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    base, run = (yaml.safe_load(part) for part in re.split(r"(?=^run_dir:)", printed, flags=re.M)[1:])
    assert (base["seed"], run["seed"], run["steps"]) == (5, 5, 3) and base["steps"] == 200
    assert run["model"]["path"] == f"{base['run_dir']}/final" and run["algorithm"]["type"] == "grpo"
