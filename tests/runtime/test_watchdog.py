"""Calls of user code that take for ever and that no thread can end: the process ends, with one line."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmrl.runtime import timed_calls, watchdog
from mmrl.runtime.watchdog import SLOTS, ends_process
from mmrl.sims.vector.transitions import Transition
from mmrl.sims.vector.watch import END_AFTER
from tests.whole_runs.parts import ROBOTS, TINY, command, spread, start, wait

HERE = "tests.runtime.test_watchdog"


def ended(code, *arguments):
    """A process that runs `code`, in which `ends_process` is known; and the lines that it prints to stderr."""
    text = f"import os, sys, time, signal\nfrom mmrl.runtime.watchdog import *\n{code}"
    done = subprocess.run([sys.executable, "-c", text, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines(), done.stdout


def backtracks(sample):
    """A reward whose regular expression takes for ever, and holds the interpreter meanwhile."""
    return float(bool(re.match(r"(a+)+$", "a" * 64 + "b"))) + spread(sample)


class Stuck:
    """A simulator whose third step takes for ever."""

    image_shape, state_dim, action_dim, tasks, max_steps = (16, 16, 3), 2, 2, ("go",), 8

    def __init__(self, count):
        self.count, self.steps = count, 0

    def reset(self, rows, seeds, tasks):
        return Transition.empty(len(rows), 0, self.image_shape, self.state_dim)

    def step(self, rows, chunk):
        self.steps += 1
        while self.steps > 2:
            time.sleep(0.1)
        return Transition.empty(len(rows), chunk.shape[1], self.image_shape, self.state_dim)

    def instruction(self, row):
        return "go"

    def close(self):
        pass


def impatient(*arguments):
    """`mmrl ...` that waits for less than ten seconds after a deadline."""
    timed_calls.GRACE_S = 0.5
    command(*arguments)


@pytest.mark.parametrize(
    ("base", "options", "told"),
    [
        (
            TINY,
            [f"task.rewards=[{{name: '{HERE}:backtracks', deadline_s: 0.5}}]"],
            f"mmrl: reward '{HERE}:backtracks' did not return within 0.5 s and cannot be abandoned, since it holds "
            "Python's interpreter; set isolated: true, which ends hanging calls; the run ends",
        ),
        (
            ROBOTS,
            [f"task.simulator={HERE}:Stuck", "task.options={}", "task.tasks=[go]", "task.deadline_s=0.2"],
            f"mmrl: simulator {HERE}:Stuck: a step takes longer than 2 s, 10 times task.deadline_s; set task.workers "
            "to 1 or more, so that a worker that hangs is replaced; the run ends",
        ),
    ],
    ids=["reward", "simulator"],
)
def test_a_run_that_hangs_ends_in_one_line_that_names_the_key(tmp_path, base, options, told):
    log, run = tmp_path / "log.txt", tmp_path / "run"
    (code,) = wait(start(impatient, "train", str(base), *options, f"run_dir={run}", log=log), log)
    assert code == -signal.SIGKILL
    assert [line for line in log.read_text().splitlines() if line.startswith("mmrl: ")] == [told]
    assert "Traceback" not in log.read_text() and not (run / "final").exists()


def test_a_block_that_takes_too_long_ends_the_process_and_others_do_not():
    code, said, printed = ended(
        "with ends_process(1.0, 'mmrl: short'):\n    time.sleep(0.2)\n"
        "with ends_process(60.0, 'mmrl: long'), ends_process(1.0, 'mmrl: late'):\n"
        "    print('in', flush=True)\n    began = time.monotonic()\n    time.sleep(30)\nprint('out')"
    )
    assert (code, said, printed) == (-signal.SIGKILL, ["mmrl: late"], "in\n")
    assert ended("with ends_process(0.2, 'late'): pass\ntime.sleep(2)") == (0, [], "")


def test_time_in_which_the_process_is_stopped_does_not_count():
    code = "with ends_process(2.0, 'late'):\n    print(os.getpid(), flush=True)\n    sys.stdin.read()\nprint('out')"
    running = subprocess.Popen(
        [sys.executable, "-c", f"import os, sys\nfrom mmrl.runtime.watchdog import *\n{code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdin is not None and running.stdout is not None
    assert int(running.stdout.readline()) == running.pid
    os.kill(running.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(running.pid, signal.SIGCONT)
    said, errors = running.communicate()  # closes its standard input
    assert (running.returncode, said, errors) == (0, "out\n", "")


def test_the_watchdog_ends_with_its_process_also_where_a_fork_lives_on():
    code = (
        "with ends_process(9.0, 'late'):\n    if os.fork() == 0:\n        time.sleep(3)\n        os._exit(0)\n"
        "    from mmrl.runtime import watchdog\n    print(watchdog._WATCHDOGS[0]._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    began = time.monotonic()
    running = subprocess.Popen(
        [sys.executable, "-c", f"import os, signal, time\nfrom mmrl.runtime.watchdog import *\n{code}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    watching = int(running.stdout.readline())
    assert running.wait() == -signal.SIGKILL
    while Path(f"/proc/{watching}").exists() and time.monotonic() < began + 10:
        time.sleep(0.05)
    assert time.monotonic() < began + 2.8  # before the fork
    running.stdout.close()


def test_a_fork_has_a_watchdog_of_its_own():
    code, said, printed = ended(
        "with ends_process(60.0, 'first'):\n    pid = os.fork()\n    if pid == 0:\n"
        "        with ends_process(0.6, 'mmrl: the fork'):\n            time.sleep(30)\n        os._exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert (code, said, printed) == (0, ["mmrl: the fork"], "-9\n")


def test_slots_are_used_again_and_calls_beyond_them_run(monkeypatch):
    monkeypatch.setattr(watchdog, "_WATCHDOGS", [])
    for _ in range(2 * SLOTS):
        with ends_process(60.0, "x"):
            pass
    table = watchdog._WATCHDOGS[0]
    contexts = [table.watch(60.0, "y") for _ in range(SLOTS + 2)]
    for context in contexts:
        context.__enter__()
    assert not table._free
    for context in contexts:
        context.__exit__(None, None, None)
    assert sorted(table._free) == list(range(SLOTS))
    table.close()


def test_times_are_added_up_by_call():
    """By hand: three looks that are 0.5 s apart; a call counts from the first look that sees it."""
    table = bytearray(SLOTS * watchdog.SIZE)
    watchdog._LIMIT.pack_into(table, 8, 0.9, 4)
    table[24:28] = b"late"
    waited = {}
    for number, told in [(5, None), (5, None), (6, None), (6, None), (0, None), (6, None), (6, None), (6, "late")]:
        watchdog._NUMBER.pack_into(table, 0, number)
        assert watchdog.overdue(table, 0.5, waited) == told
    assert waited == {6: 1.0} and END_AFTER == 10
