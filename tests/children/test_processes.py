"""Commands that a process of ours runs to their end: they get its signals and end with it."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from mmrl.children import forked, limits
from mmrl.children.processes import PARENT, end_with_starter, stopped_by

ASLEEP = """
import os, sys, time
from mmrl.children.processes import end_with_starter
end_with_starter()
print(os.getpid(), os.getpgid(0), flush=True)
time.sleep(60)
"""
STARTER = f"""
import sys
from mmrl.children.processes import run_command
sys.exit(-run_command([sys.executable, "-c", {ASLEEP!r}]))
"""


@pytest.fixture
def started():
    """A process that runs a command, and the command's process id and group."""
    process = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    pid, group = map(int, process.stdout.readline().split())
    yield process, pid, group
    process.kill()
    process.wait()
    process.stdout.close()


def ended(pid: int) -> bool:
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.01)
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_command_dies_with_the_process_that_runs_it(started):
    process, pid, group = started
    assert group == os.getpgid(process.pid)  # so Ctrl-C reaches both
    process.kill()
    assert ended(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_handed_on(started, number):
    process, pid, _ = started
    process.send_signal(number)
    assert process.wait(10) == number and ended(pid)  # it died by the signal


def test_a_command_whose_starter_has_ended_before_it_asks_does_not_run(monkeypatch):
    code = "from mmrl.children.processes import end_with_starter; end_with_starter(); print('ran')"
    one = subprocess.run([sys.executable, "-c", code], env=os.environ | {PARENT: "1"}, capture_output=True)
    assert (one.returncode, one.stdout) == (1, b"")
    monkeypatch.delenv(PARENT, raising=False)
    end_with_starter()  # of a process that was started otherwise


@pytest.mark.parametrize(
    ("code", "signum"), [(0, 0), (2, 0), (-15, 15), (143, 15), (138, 10), (130, 2), (-9, 0), (137, 0), (-11, 0)]
)
def test_codes_of_a_stop_in_order(code, signum):
    assert stopped_by(code) == signum


@pytest.mark.skipif(not limits.LINUX, reason="limits are Linux's")
def test_time_that_a_process_has_used_before_it_is_limited_does_not_count(monkeypatch):
    """It may use 5 s beyond the 40 s that its start took."""
    found = {}
    monkeypatch.setattr(limits, "_lower", lambda which, limit: found.update({which: limit}))
    monkeypatch.setattr(limits, "_cpu_seconds", lambda: 40.0)
    monkeypatch.setattr(limits.Limits, "_limit_processes", lambda self: None)
    limits.Limits(cpu_s=5.0).apply()
    assert found[resource.RLIMIT_CPU] == 45


def test_a_worker_may_have_as_many_processes_as_its_limit_and_no_more(monkeypatch):
    control, trainer = socket.socketpair()
    workers, ended = {1, 2}, {}
    monkeypatch.setattr(forked, "tasks_below", {1: 2, 2: 3}.get)
    monkeypatch.setattr(forked, "_end", lambda pid, workers: trainer.close())
    with control:
        assert forked._next_order(control, workers, ended, limits.Limits(processes=2)) is None
    assert ended == {2: "it has 3 processes and threads, more than limits.processes=2"}


def test_ending_one_worker_spares_the_others(monkeypatch):
    ended, workers = [], {1, 2, 3}
    monkeypatch.setattr(forked, "end_group", ended.append)
    monkeypatch.setattr(forked, "end_descendants", lambda keep=(): ended.append(set(keep)))
    forked._end(2, workers)
    assert ended == [2, {1, 3}] and workers == {1, 3}
