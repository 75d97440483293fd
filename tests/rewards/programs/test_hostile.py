"""Programs of a response that are hostile: each costs its own sample, and nothing else."""

import os
import socket
import threading

import pytest

from mmrl.children.confinement import confinable
from mmrl.rewards.programs.unit_tests import UnitTests
from mmrl.rollouts import Prompt, Sample
from tests.helpers.processes import family, gone
from tests.rewards.programs.hostile import HOSTILE

pytestmark = pytest.mark.skipif(not confinable(), reason="needs Landlock")
TESTS = {"inputs": [""], "outputs": ["42"]}
QUICK = (
    "exits after its output",
    "kills its parent",
    "overwrites a file",
    "reads the answer's file",
    "connects",
    "looks for the answer in memory",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A file, a server that must not be called, and a reward."""
    victim = tmp_path_factory.mktemp("data") / "answers.json"
    victim.write_text("42")
    called = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server, called), daemon=True).start()
        reward = UnitTests(memory_gib=0.5)
        yield victim, server.getsockname()[1], called, reward
    reward.runner.close()


def accept(server, called):
    try:
        server.accept()
    except OSError:
        return
    called.set()


def of(source):
    return Sample(Prompt("p", "q", answer=TESTS), f"```python\n{source}\n```", 5, False, 100)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE]
)
def test_a_hostile_program_costs_its_sample_only(world, name):
    victim, port, called, reward = world
    source = HOSTILE[name]
    if "{VICTIM" in source or "{PORT" in source or "{PID" in source or "{{" in source:
        source = source.format(VICTIM=str(victim), PORT=port, PID=os.getpid())
    reward.runner.deadline_s = 1.5
    assert reward.score([of(source)] * 2) == [0.0, 0.0]
    reward.runner.deadline_s = 30.0  # of honest programs, on a busy machine
    assert reward.score([of("print(6 * 7)"), of("print(41)")]) == [1.0, 0.0]
    assert victim.read_text() == "42" and os.listdir(victim.parent) == [victim.name] and not called.is_set()
    forker = reward.runner._fork_server._running.process.pid  # other tests of this process may have theirs
    assert gone(family(forker)[1:])
    assert os.listdir(reward.runner._folder.name) == []


def test_there_are_forty_of_them():
    assert len(HOSTILE) >= 40
