"""What is printed while work goes on: bars on a terminal, lines in a log."""

import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from mmrl.runtime import progress
from mmrl.runtime.devices import without_launcher
from mmrl.runtime.logging import quieten_environment
from mmrl.runtime.progress import Display, Interval, time_left_text
from mmrl.tasks.manipulation import episodes
from mmrl.tasks.visual_qa.data import rows
from mmrl.tasks.visual_qa.data.files import FileSource
from mmrl.training.metrics import evaluation_line, step_line
from tests.helpers.command_line import ROOT, TINY, WARM_START
from tests.tasks.choosing import build
from tests.whole_runs.parts import make, metrics, release

SPEED = {"time/step": 0.5, "throughput/rollouts_per_second": 32.0}


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def made(clock, **options):
    return Display(Console(file=io.StringIO(), width=100, **options), clock)


def text(display):
    """What was printed, without what moves the cursor and colours."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", display.console.file.getvalue())


def test_an_interval_counts_from_the_last_time_that_it_was_due(clock):
    once, later = Interval(5.0, clock, at_once=True), Interval(5.0, clock)
    found = []
    for clock.seconds in (100.0, 104.0, 105.5, 109.0, 110.4, 110.6):
        found.append((once.due(), later.due()))
    assert [first for first, _ in found] == [True, False, True, False, False, True]
    assert [second for _, second in found] == [False, False, True, False, False, True]
    assert [Interval(0.0, clock).due() for _ in range(2)] == [True, True]


def test_in_a_log_there_is_a_line_every_ten_seconds_with_the_time_left(clock):
    """Ten parts of 4 s: lines after 12, 24 and 36 s, none at the end."""
    display = made(clock)
    with display.work("checking rows", 10) as work:
        for _ in range(10):
            clock.seconds += 4
            work.advance()
    assert text(display).splitlines() == [
        "checking rows: 3 of 10, 28 s left",
        "checking rows: 6 of 10, 16 s left",
        "checking rows: 9 of 10, 4 s left",
    ]
    assert not display.bars.tasks


def test_parts_that_were_done_before_are_no_pace(clock):
    """A run that goes on at step 50 of 60: two steps of 3 s leave eight."""
    with made(clock).work("training", 60, 50) as work:
        assert (work.done, work.left) == (50, None)
        for _ in range(2):
            clock.seconds += 3
            work.advance()
        assert (work.done, work.left) == (52, 24)


@pytest.mark.parametrize("lines", [True, False])
def test_what_has_lines_of_its_own_has_no_others(clock, lines):
    display = made(clock)
    with display.work("training", 3, lines=lines) as work:
        for _ in range(3):
            clock.seconds += 60
            work.advance()
    assert (text(display) != "") == lines


def test_on_a_terminal_bars_stand_below_the_lines_while_they_run(clock):
    display = made(clock, force_terminal=True)
    with display.work("training", 8) as outer:
        clock.seconds += 1
        outer.advance()
        with display.work("evaluation", 40) as inner:
            for _ in range(2):
                clock.seconds += 10
                inner.advance(16)
            assert display.draws and len(display.bars.tasks) == 2
        assert display.draws and [bar.description for bar in display.bars.tasks] == ["training"]
        display.line("a line")
        clock.seconds += 1
        outer.advance()
    assert not display.draws and not display.bars.tasks
    shown = text(display)
    assert re.search(r"training .* 1/8 ", shown) and re.search(r"evaluation .* 32/40 0:00:20 5 s left", shown)
    after = shown[shown.index("a line") :]
    assert "evaluation" not in after and re.search(r"training .* 2/8 0:00:22 2 min 6 s left", after)


def test_an_error_takes_the_bar_away(clock):
    display = made(clock, force_terminal=True)
    with pytest.raises(KeyError), display.work("training", 8):
        raise KeyError("x")
    assert not display.draws and not display.bars.tasks


def test_other_ranks_show_no_progress(clock, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for options in ({}, {"force_terminal": True}):
        display = made(clock, **options)
        with display.work("evaluation", 2) as work:
            clock.seconds += 60
            work.advance()
        assert text(display) == ""


def test_lines_are_printed_as_they_are(capsys):
    line = "pip install -e '.[wandb]' :smile: [/b] " + 150 * "x"
    Display().line(line)
    assert capsys.readouterr().out == line + "\n"


def test_the_line_of_a_step_says_what_is_missing_and_how_long_it_takes():
    whole = {"reward/own": 0.25, "accuracy": 0.5, "loss": 1.0, "grad_norm": 2.0, **SPEED}
    assert step_line(3, 9, whole) == "step 3/9  own 0.250  acc 0.500  loss 1.000  grad 2.000  0.50s  32 rollouts/s"
    less = whole | {"advantages/zero_variance_groups": 0.75, "unscored": 0.125, "simulator/dropped": 2.0}
    line = step_line(3, 9, less, 200.0)
    assert line.endswith("no signal 75%  unscored 12%  2 lost  0.50s  32 rollouts/s  3 min 20 s left")
    assert "lost" not in step_line(3, 9, whole | {"simulator/dropped": 0.0, "advantages/zero_variance_groups": 0.0})
    assert "4 lost" in step_line(3, 9, whole | {"environment/lost": 4.0})
    assert time_left_text(None) == "" and step_line(9, 9, whole, 0.0) == step_line(9, 9, whole)


def test_the_line_of_an_evaluation_has_the_standard_error_and_what_did_not_count():
    values = {"evaluation/unscored": 0.0, "evaluation/n": 64.0}
    known = {"evaluation/accuracy": 0.25, "evaluation/standard_error": 0.0545}
    assert evaluation_line(7, values | known) == "evaluation at step 7: held-out accuracy 0.2500 ± 0.0545 on 64"
    lost = {"evaluation/unscored": 0.25, "evaluation/n": 48.0, "evaluation/simulator/dropped": 16.0}
    assert evaluation_line(7, lost | known).endswith("± 0.0545 on 48 (25.0% could not be scored, 16 lost)")
    nothing = {"evaluation/unscored": 1.0, "evaluation/n": 0.0, "evaluation/standard_error": 0.0}
    assert evaluation_line(0, nothing) == "evaluation at step 0: no held-out accuracy (100.0% could not be scored)"


@pytest.mark.parametrize(("every", "steps"), [("0", [1, 2, 3, 4, 5]), ("1000", [1, 5])])
@pytest.mark.usefixtures("alone")
def test_a_log_has_lines_of_steps_every_so_often(tmp_path, capsys, every, steps):
    trainer = make(tmp_path, "steps=5", f"log.lines_every={every}", "evaluation={every: 0, prompts: 8, before: true}")
    trainer.train()
    release(trainer)
    out = capsys.readouterr().out
    told = [int(found) for found in re.findall(r"^step (\d+)/5 ", out, re.MULTILINE)]
    assert told == steps and out.count("evaluation at step") == 2
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]  # whatever is printed
    first, last = (row for row in rows if "evaluation/accuracy" in row)
    for row in (first, last):
        assert (row["evaluation/accuracy"], row["evaluation/standard_error"]) == (0.0, 0.0)
        line = f"evaluation at step {row['step']}: held-out accuracy 0.0000 (95 % interval 0.00 to 0.32) on 8"
        assert line in out  # 1.96² / (8 + 1.96²) = 0.32
    assert ("no signal" in out) == any(row.get("advantages/zero_variance_groups") for row in rows)


@pytest.mark.parametrize(("given", "bars"), [({}, False), ({"TQDM_DISABLE": ""}, True)])
def test_libraries_show_no_bars_unless_the_user_asks_for_them(given, bars):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQDM")} | given
    code = "import mmrl.cli.main; from tqdm import tqdm; list(tqdm(range(3), desc='Loading weights'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and ("Loading weights" in done.stderr) == bars


def test_what_the_user_has_set_for_a_library_stays(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    monkeypatch.delenv("DIFFUSERS_VERBOSITY", raising=False)
    quieten_environment()
    assert (os.environ["TRANSFORMERS_VERBOSITY"], os.environ.pop("DIFFUSERS_VERBOSITY")) == ("info", "error")


def test_weights_that_are_read_have_a_bar_of_ours_and_those_that_are_written_none(clock, monkeypatch):
    """As transformers asks for its bars: by a factory, with what is gone through and its name."""
    display = made(clock)
    monkeypatch.setattr(progress, "display", display)
    asked = []

    def factory(items, **options):
        asked.append(options)
        return items

    for item in progress.weights_read(factory, ({"a": 1, "b": 2, "c": 3}.items(),), {"desc": "Loading weights"}):
        assert item in {("a", 1), ("b", 2), ("c", 3)} and len(display.bars.tasks) == 1
        clock.seconds += 30
    assert text(display).splitlines() == [
        "loading weights: 1 of 3",  # a pace takes two parts
        "loading weights: 2 of 3, 30 s left",
    ]
    assert not asked and not display.bars.tasks
    assert list(progress.weights_read(factory, ([7],), {"desc": "Writing model shards"})) == [7]
    assert asked == [{"desc": "Writing model shards", "disable": True}]


@pytest.mark.slow
def test_on_a_terminal_training_and_evaluation_have_bars_and_so_have_weights_that_are_read(tmp_path):
    command = [sys.executable, "-m", "mmrl", "train", WARM_START, *TINY, "evaluation.micro_batch=4"]
    ours, theirs = pty.openpty()
    environment = without_launcher(dict(os.environ)) | {"COLUMNS": "100", "TERM": "xterm"}
    weights = tmp_path / "first"
    subprocess.run([*command, f"run_dir={weights}"], cwd=ROOT, env=environment, check=True, capture_output=True)
    second = [*command, "model.build=null", f"model.path={weights / 'final'}", f"run_dir={tmp_path / 'second'}"]
    process = subprocess.Popen(second, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    assert process.wait(60) == 0
    told = shown.decode()
    assert re.search(r"training .*2/2", told) and re.search(r"evaluation .*8/8", told)
    assert "step 2/2" in told and "Loading" not in told
    assert re.search(r"loading weights.*/\d", told)


def parts_of(monkeypatch, module):
    """What work that a module shows is called, and (done, total) after each of its parts."""
    display, told = Display(Console(file=io.StringIO())), []
    usual = progress.Work.advance

    def advance(work, parts=1):
        usual(work, parts)
        (bar,) = display.bars.tasks
        told.append((bar.description, bar.completed, bar.total))

    monkeypatch.setattr(progress.Work, "advance", advance)
    monkeypatch.setattr(module, "display", display)
    return told


def test_the_check_of_rows_is_told(tmp_path, monkeypatch):
    told = parts_of(monkeypatch, rows)
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"problem": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(600)))
    assert len(FileSource(file)) == 600
    assert told == [(f"checking {file.name}", done, 600) for done in (256, 512, 600)]


def test_demonstrations_are_told(monkeypatch):
    told = parts_of(monkeypatch, episodes)
    with build("manipulation", {"simulator": "tests.sims.line_simulator:Line", "tasks": ["go"]}, 0).make_simulator(
        2
    ) as sim:
        starts = [("go", seed) for seed in (20, 60, 70)]
        episodes.record_expert(sim, starts, disturbance=episodes.Disturbance(), successful_only=True, seed=0)
    assert told == [("demonstrations", 2, 3), ("demonstrations", 3, 3)]
