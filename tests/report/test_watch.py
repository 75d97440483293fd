"""What `mmrl watch` shows of a run, and that it follows one until it ends."""

import json
import os
import pty
import subprocess
import sys
import time

from rich.console import Console

from mmrl.report import lock
from mmrl.report.records import Series, read_run
from mmrl.report.watch import screen, sparkline, time_left
from tests.report.made import evaluations, healthy, write_run


def shown(folder):
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(read_run(folder)))
    return console.export_text()


def test_it_shows_the_last_numbers_the_time_left_and_what_is_wrong(tmp_path):
    rows = healthy(10)
    for row in rows:
        row |= {"time": 1000.0 + 3 * row["step"], "loss": 2.0 * row["step"], "reward/exact_match": 0.0}
    text = shown(write_run(tmp_path, rows, evaluations((0, 0.25))))
    lines = {line.split()[1]: line.split()[2:-1] for line in text.splitlines() if len(line.split()) > 4}
    assert lines["loss"][:2] == ["20", "11"] and lines["loss"][2] == "▁▁▂▃▄▅▆▇██"
    assert lines["evaluation/accuracy"][0] == "0.25"
    assert "step 10 of 40, 1 min 30 s left" in text  # 30 steps of 3 s
    assert "reward/exact_match is 0 in all 10 steps" in text and "Try:" in text


def test_the_course_of_a_metric():
    def of(*values):
        return sparkline(Series("x", list(range(len(values))), list(values)))

    assert of(0.0, 1.0, 0.5) == "▁█▅" and of(2.0, 2.0) == "▄▄" and of() == "" and of(float("nan"), 1.0) == "▄"
    assert of(*range(64)) == of(*range(0, 64, 2)) and len(of(*range(1000))) == 32


def test_the_time_left_is_that_of_the_recent_pace(tmp_path):
    rows = healthy(30)
    for row in rows:  # ten slow steps, then quick ones
        row["time"] = 100.0 * row["step"] if row["step"] <= 10 else 1000.0 + 2 * (row["step"] - 10)
    assert time_left(read_run(write_run(tmp_path, rows, []))) == 10 * 2.0


def test_an_empty_folder(tmp_path):
    assert "It has not logged anything." in shown(tmp_path)


def test_without_a_terminal_it_is_shown_once(tmp_path):
    folder = write_run(tmp_path / "run", healthy(5), [])
    (folder / "run.lock").write_text(json.dumps(lock.this_process()))  # it runs, as long as this process
    done = subprocess.run([sys.executable, "-m", "mmrl", "watch", folder], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "It is running" in done.stdout and "grad_norm" in done.stdout


def test_on_a_terminal_it_follows_the_run_until_its_end(tmp_path):
    folder = write_run(tmp_path / "run", healthy(5), [], end=None)
    (folder / "run.lock").write_text(json.dumps(lock.this_process()))
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mmrl", "watch", folder], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    try:
        text = read_until(ours, "step 5 of 40")
        assert "It is running" in text
        write_run(folder, healthy(6), [], end=None)
        assert process.poll() is None
        read_until(ours, "step 6 of 40")
        (folder / "run.lock").write_text("{}")
        write_run(folder, healthy(7), [], end=("stopped", "SIGTERM stopped it."))
        read_until(ours, "SIGTERM stopped it.")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(descriptor, word, seconds=30):
    text, end = "", time.monotonic() + seconds
    while word not in text:
        assert time.monotonic() < end, text
        text += os.read(descriptor, 4096).decode(errors="replace")
    return text
