"""Calls of user code that take for ever and that no thread can end: the process ends, with one line. So do ends of the
process that Python does not notice."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmrl.report.records import read_run
from mmrl.rewards import registry
from mmrl.runtime import timed_calls, watchdog
from mmrl.runtime.user_code import END_AFTER
from mmrl.runtime.watchdog import SLOTS, ends_process
from mmrl.sims.vector.transitions import Transition
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


class NeverReady:
    """A reward or simulator whose constructor takes for ever."""

    def __init__(self, count=0):
        time.sleep(1000)

    def score(self, samples):
        return [0.0] * len(samples)


def leaves_in_c(sample):
    """A reward that ends its process as a library in C might, with the exit code of success."""
    ctypes.CDLL(None)._exit(0)


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
    timed_calls.GRACE_S, registry.CONSTRUCTION_S = 0.5, 0.2
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
        (
            TINY,
            [f"task.rewards=[{{name: '{HERE}:NeverReady'}}]"],
            f"mmrl: reward '{HERE}:NeverReady' (task.rewards) is still being constructed after 2 s, 10 times the 0.2 s "
            "that a constructor may take; correct its __init__; the run ends",
        ),
        (
            ROBOTS,
            [f"task.simulator={HERE}:NeverReady", "task.options={}", "task.tasks=[go]", "task.deadline_s=0.2"],
            f"mmrl: simulator '{HERE}:NeverReady' (task.simulator) is still being constructed after 2 s, 10 times "
            "task.deadline_s; correct its __init__, or raise task.deadline_s if it needs longer; the run ends",
        ),
    ],
    ids=["reward", "simulator", "reward's constructor", "simulator's constructor"],
)
def test_a_run_that_hangs_ends_in_one_line_that_names_the_key(tmp_path, base, options, told):
    log, run = tmp_path / "log.txt", tmp_path / "run"
    (code,) = wait(start(impatient, "train", str(base), *options, f"run_dir={run}", log=log), log)
    assert code == -signal.SIGKILL
    assert [line for line in log.read_text().splitlines() if line.startswith("mmrl: ")] == [told]
    assert "Traceback" not in log.read_text() and not (run / "final").exists()


def test_a_run_that_a_c_library_ends_with_0_is_not_silent(tmp_path):
    log, run = tmp_path / "log.txt", tmp_path / "run"
    options = [f"task.rewards=[{{name: '{HERE}:leaves_in_c'}}]", f"run_dir={run}"]
    processes = start(command, "train", str(TINY), *options, log=log)
    assert wait(processes, log) == [0]  # the code of _exit; nothing can change it
    end = time.monotonic() + 10
    while not (lines := [line for line in log.read_text().splitlines() if line.startswith("mmrl: ")]):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert lines == [
        f"mmrl: the training in run_dir={run} is not complete: process {processes[0].pid} was ended by a signal, or by "
        "_exit of a C library (then the exit code may be 0); repeat the command to resume"
    ]
    assert read_run(run).ending.state == "killed" and not (run / "final").exists()


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("ctypes.CDLL(None)._exit(0)", 0, ["mmrl: cut off"]),
        ("ctypes.CDLL(None)._exit(3)", 3, ["mmrl: cut off"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ["mmrl: cut off"]),
        # a fork that lives on, and speaks later
        (
            "os.fork() or (time.sleep(5), print('fork', file=sys.stderr, flush=True)); os._exit(0)",
            0,
            ["mmrl: cut off", "fork"],
        ),
        ("sys.exit(4)", 4, []),
        ("release(); os._exit(5)", 5, []),
        ("pid = os.fork(); pid or os._exit(0); os.waitpid(pid, 0)", 0, []),  # of the fork, not of the process
    ],
)
def test_an_end_that_python_does_not_notice_is_told(ending, code, told):
    text = f"import ctypes\nwith reports_sudden_end('mmrl: cut off'), ends_process(60.0, 'late'):\n    {ending}"
    assert ended(text)[:2] == (code, told)
    assert ended("with reports_sudden_end('mmrl: cut off'):\n    pass\nos._exit(0)")[:2] == (0, [])  # it is over


def test_a_block_that_takes_too_long_ends_the_process_and_others_do_not():
    code, said, printed = ended(
        "with ends_process(1.0, 'mmrl: short'):\n    time.sleep(0.2)\n"
        "with ends_process(60.0, 'mmrl: long'), ends_process(1.0, 'mmrl: late'):\n"
        "    print('in', flush=True)\n    began = time.monotonic()\n    time.sleep(30)\nprint('out')"
    )
    assert (code, said, printed) == (-signal.SIGKILL, ["mmrl: late"], "in\n")
    assert ended("with ends_process(0.2, 'late'): pass\ntime.sleep(2)") == (0, [], "")


def test_a_constructor_has_ten_times_its_limit():
    """It takes two seconds: longer than a limit of one, after which there is a warning, and shorter than ten. With a
    limit of a tenth of a second the process ends after one."""
    code = (
        "from mmrl.runtime.user_code import construction_watched\n"
        "with construction_watched('X', float(sys.argv[1]), 'task.limit', 'make it faster'):\n"
        "    time.sleep(2)\nprint('made')"
    )
    warned, expired = ended(code, "1"), ended(code, "0.1")
    assert warned == (
        0,
        ["X is still being constructed after 1 s; the run ends after 10 s, 10 times task.limit"],
        "made\n",
    )
    last = "mmrl: X is still being constructed after 1 s, 10 times task.limit; make it faster; the run ends"
    assert expired[0] == -signal.SIGKILL and expired[1][-1] == last and expired[2] == ""


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
        "with ends_process(9.0, 'late'):\n    pid = os.fork()\n    if pid == 0:\n"
        "        time.sleep(60)\n        os._exit(0)\n"
        "    from mmrl.runtime import watchdog\n    print(watchdog._WATCHDOGS[0]._process.pid, pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", f"import os, signal, time\nfrom mmrl.runtime.watchdog import *\n{code}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    watching, fork = map(int, running.stdout.readline().split())
    assert running.wait() == -signal.SIGKILL
    end = time.monotonic() + 20
    while Path(f"/proc/{watching}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{watching}").exists()  # before the fork
    os.kill(fork, signal.SIGKILL)
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
