"""Workers in processes of their own: the same numbers to the bit, and what becomes of those that end."""

import os
import signal
import sys
import threading

import pytest

from mmrl.children.child import Lost, OnThisHost
from mmrl.children.frames import decode, encode
from mmrl.errors import UserError
from mmrl.workers.handles import Handle
from tests.helpers.processes import gone, running
from tests.whole_runs.parts import IMAGES, ROBOTS, distance, final, metrics
from tests.workers.runs import COOLING, GUIDED, ONE, PPO, alike, run

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.slow
def test_images_of_a_process_are_those_of_the_trainer(tmp_path):
    """Sampled predictions, guidance, groups that are replaced, and an average that is evaluated: all to the bit."""
    plain = run(tmp_path / "plain", *GUIDED, base=IMAGES)
    apart = run(tmp_path / "apart", *GUIDED, ONE, base=IMAGES)
    alike(plain, apart)
    assert distance(final(tmp_path / "plain"), final(tmp_path / "apart")) == 0
    assert len({row["reward/mark"] for row in apart if "loss" in row}) == 4


def test_episodes_of_a_process_are_those_of_the_trainer(tmp_path):
    """With a critic that spoke while they were played, a temperature that falls, and episodes that break."""
    plain = run(tmp_path / "plain", *PPO, COOLING, base=ROBOTS)
    apart = run(tmp_path / "apart", *PPO, COOLING, ONE, base=ROBOTS)
    alike(plain, apart)
    trained = [row for row in apart if "loss" in row]
    assert max(row["simulator/dropped"] for row in trained) > 0 < max(row["episode/length"] for row in trained)
    assert [row["control/rollout.temperature"] for row in apart if "loss" in row] == [2.0, 1.25, 0.5]
    assert distance(final(tmp_path / "plain"), final(tmp_path / "apart")) == 0


def killed_while_asked(monkeypatch, what):
    """The worker that is asked for `what` the second time is killed before it answers; processes that were asked."""
    pids, asked, killed, ask = [], [], [], Handle.ask

    def dangerous(handle, message, seconds, shared=()):
        pids.append(handle.child.process.pid)
        asked.append(what in decode(message))
        if not killed and asked[-1] and sum(asked) == 2:
            killed.append(handle.child.process.pid)
            os.kill(killed[0], signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (killed[0], signal.SIGKILL)).start()
        return ask(handle, message, seconds, shared)

    monkeypatch.setattr(Handle, "ask", dangerous)
    return pids


def test_a_worker_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path, monkeypatch, capfd):
    plain = run(tmp_path / "plain", "steps=3", base=IMAGES)
    pids = killed_while_asked(monkeypatch, "rollout")
    alike(plain, run(tmp_path / "apart", "steps=3", ONE, base=IMAGES))
    rows = [row for row in metrics(tmp_path / "apart") if "generation/restarts" in row]
    assert sum(row["generation/restarts"] for row in rows) == sum(row["generation/asked_again"] for row in rows) == 1
    assert "rollout worker 0: it ended" in capfd.readouterr().out
    assert len(set(pids)) == 2 and gone(set(pids))


def test_a_worker_that_never_comes_up_is_named_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    handle = Handle(3, tmp_path / "log", OnThisHost(log=tmp_path / "log"))
    handle.child.start()
    with pytest.raises(Lost, match=r"it ended with \d+; .*log says: .+"):
        handle.ask(encode({}), 20)
    handle.stop()


def test_workers_end_with_the_training(tmp_path):
    handle = Handle(0, tmp_path / "log", OnThisHost(log=tmp_path / "log"))
    handle.child.start()
    with pytest.raises(UserError, match="rollout worker 0: KeyError"):
        handle.ask(encode({}), 120)
    pid = handle.child.process.pid
    assert running(pid) and os.getpgid(pid) == pid
    handle.child.process.running.stdin.close()  # as it is when the process that started it has ended, however that was
    assert gone([pid])
    handle.stop()
