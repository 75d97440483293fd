"""Signals that end a run in order."""

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from mmrl.engine import Interruption, interruption
from tests.whole_runs.parts import TINY, command, errors_told, spread, start, wait

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_is_noted_and_does_no_harm_when_it_comes_again(handlers, number):
    with Interruption() as interruption:
        os.kill(os.getpid(), number)
    assert interruption.signum == number
    os.kill(os.getpid(), number)  # while the process ends; by default this would change how it ends
    assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]


def test_without_a_signal_all_is_as_before(handlers):
    with Interruption() as interruption:
        assert signal.getsignal(signal.SIGUSR1) == interruption._record
    assert {number: signal.getsignal(number) for number in NUMBERS} == handlers


ENDING_IN_C = """
import ctypes, runpy, sys
Interruption = runpy.run_path(sys.argv[1])["Interruption"]
def score():
    ctypes.CDLL(None).exit(int(sys.argv[3]))
for _ in range(2):
    with Interruption():
        if sys.argv[2] == "in C":
            score()
        if sys.argv[2] == "in Python":
            sys.exit(int(sys.argv[3]))
if sys.argv[2] == "afterwards":
    score()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a signal in real time is Linux's")
@pytest.mark.parametrize(
    ("place", "status", "ends"),
    [("in C", 0, -45), ("in C", 3, -45), ("in Python", 3, 3), ("afterwards", 0, 0), ("afterwards", 4, 4), ("no", 0, 0)],
)
def test_an_exit_in_c_does_not_look_like_success_and_is_named(place, status, ends):
    command = [sys.executable, "-c", ENDING_IN_C, interruption.__file__, place, str(status)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == ends
    assert ("in score" in ended.stderr) == (place == "in C")


def leaves_in_c(sample):
    """A reward that ends the process of rank 1 as a library in C might."""
    if os.environ["RANK"] == "1":
        ctypes.CDLL(None).exit(0)
    return spread(sample)


def leaves_in_python(sample):
    if os.environ["RANK"] == "1":
        os._exit(0)
    return spread(sample)


def ended(folder, reward):
    """The exit codes of two ranks whose reward is this one, and what they print."""
    rewards = f"task.rewards=[{{name: 'tests.engine.test_interruption:{reward}'}}]"
    log = folder / "run.log"
    processes = start(command, "train", str(TINY), rewards, "steps=2", f"run_dir={folder / 'run'}", log=log, ranks=2)
    return processes, wait(processes, log), log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="a signal in real time is Linux's")
def test_a_rank_that_a_reward_ends_in_c_is_no_success_and_is_named_by_the_other(tmp_path):
    processes, codes, said = ended(tmp_path, "leaves_in_c")
    assert codes == [2, -45] and "in leaves_in_c" in said
    (line,) = errors_told(said)
    assert f"rank 1 (process {processes[1].pid} on" in line and "has ended" in line
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.slow
def test_a_rank_whose_reward_exits_in_python_goes_on(tmp_path):
    _, codes, said = ended(tmp_path, "leaves_in_python")
    assert codes == [0, 0] and "os._exit(0) was called in the training process" in said
