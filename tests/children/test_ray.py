"""Processes on the nodes of a real Ray cluster, all of them on this machine."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import mmrl.sims.vector.workers
from mmrl.children import ray as placement
from mmrl.children.frames import decode
from mmrl.children.ray import Cluster, RayProcess
from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.settings import VLLMServer
from mmrl.generation.vllm import processes
from mmrl.generation.vllm import servers as engines
from mmrl.generation.vllm.engine import EngineOptions, Request
from mmrl.sims import build
from mmrl.workers.handles import Handle
from tests.helpers.processes import SOON, environment, family, gone, running
from tests.helpers.threads import together
from tests.sims.alike import assert_alike
from tests.sims.trouble import DIE, HANG
from tests.whole_runs import vllm_workers
from tests.whole_runs.parts import IMAGES, call, metrics
from tests.workers.runs import alike, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"
)
ROOT = Path(__file__).parents[2]
LINE, TROUBLE = "tests.sims.line_simulator:Line", "tests.sims.trouble:Trouble"
SYSTEM = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}


class Nodes:
    """A cluster whose head has no room, and two nodes with room for two processes each."""

    def __init__(self):
        from ray.cluster_utils import Cluster as OfThisMachine

        self.cluster = OfThisMachine(
            initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "_system_config": SYSTEM}
        )
        self.address, self.others = self.cluster.address, []
        self.fill()

    def fill(self):
        """Two nodes, whatever became of earlier ones."""
        self.others = [node for node in self.others if node in self.cluster.worker_nodes]
        while len(self.others) < 2:
            self.others.append(self.cluster.add_node(**NODE))
        self.cluster.wait_for_nodes()

    def of(self, pid):
        """The node that runs a process."""
        words = dict(word.partition("=")[::2] for word in environment(pid))
        raylet = int(words["RAY_RAYLET_PID"])
        alive = [node for node in self.others if node in self.cluster.worker_nodes]
        return next(node for node in alive if node.all_processes["raylet"][0].process.pid == raylet)

    def lose(self, node):
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))  # of what Ray starts, as it has to be on every host
        import ray

        made = Nodes()
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        ray.shutdown()
        made.cluster.shutdown()


@pytest.fixture
def nodes(cluster):
    """Two nodes whose rooms are all free: what an earlier test has ended may give its room back late."""
    import ray

    cluster.fill()
    end = time.monotonic() + SOON
    while ray.is_initialized() and ray.available_resources().get("CPU", 0) < 4 and time.monotonic() < end:
        time.sleep(0.1)
    return cluster


@pytest.fixture
def behind(nodes):
    opened = []

    def make(name, count, workers, options=None, **arguments):
        opened.append(build(name, count, options, workers=workers, ray="auto", **arguments))
        return opened[-1]

    yield make
    for sim in opened:
        sim.close()


def on_two_hosts(nodes, behind, name, count):
    """A simulator of two workers, one on each node."""
    for _ in range(20):  # Ray spreads as well as it can; a host that has just joined is not always known yet
        sim = behind(name, count, 2)
        if len({nodes.of(pid) for pid in sim.simulator.pids}) == 2:
            return sim
        sim.close()
        time.sleep(1)
    pytest.fail("Ray put both workers on one host, twenty times")


def moves(count, amount=0.1):
    return np.full((count, 2, 1), amount)


# --- one process ---


def script(words):
    return ["-c", f"import os, sys, threading, time; from mmrl.children.processes import end_with_parent\n{words}"]


def test_a_process_is_looked_after_from_here(nodes, tmp_path):
    cluster, log = Cluster("auto", "ray"), tmp_path / "log"
    placed = cluster.allocate(log=log)
    placed.run(script("print('this', os.environ['WORD']); sys.exit(3)"), {"WORD": "and that"})
    host, port = placed.await_resources(SOON)
    socket.create_server((host, port)).close()
    assert placed.wait(SOON) == placed.poll() == placed.returncode == 3 and log.read_text() == "this and that\n"
    placed = cluster.allocate(log=log)
    placed.run([], {}, "/nowhere/python")
    assert placed.wait(SOON) == 127 and "/nowhere/python" in log.read_text()


def test_what_a_process_started_ends_with_it(nodes, tmp_path):
    cluster = Cluster("auto", "ray")
    child = "import subprocess; p = subprocess.Popen(['sleep', '1000'])\nopen(sys.argv[1], 'w').write(str(p.pid))\n"
    for end, words in ((True, "time.sleep(1000)"), (False, "")):
        placed, file = cluster.allocate(), tmp_path / f"pid{end}"
        placed.run([*script(child + words), str(file)], {})
        while not file.exists() or not file.read_text():
            time.sleep(0.05)
        assert placed.poll() is None or not end
        if end:
            placed.kill()
        assert placed.wait(SOON) == (-signal.SIGKILL if end else 0) and gone([int(file.read_text())])


@pytest.mark.parametrize("what", ["actor", pytest.param("node", marks=pytest.mark.slow)])
def test_a_lost_actor_ends_its_process_and_what_that_started(nodes, what, tmp_path):
    placed, file = Cluster("auto", "ray").allocate(), tmp_path / "pid"
    words = "threading.Thread(target=end_with_parent, daemon=True).start()\nimport subprocess\n"
    words += "child = subprocess.Popen(['sleep', '1000'])\nprint(child.pid, file=open(sys.argv[1], 'w'), flush=True)\n"
    placed.run([*script(words + "time.sleep(1000)"), str(file)], {})
    while not file.exists() or not file.read_text():
        time.sleep(0.05)
    pids = [*family(placed.pid), int(file.read_text())]
    assert len(pids) == 3 and all(running(pid) for pid in pids)
    if what == "node":
        nodes.lose(nodes.of(placed.pid))
    else:
        actor = int(Path(f"/proc/{placed.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(actor, signal.SIGKILL)
    assert placed.wait(SOON) == -signal.SIGKILL and gone(pids)


def test_no_room_is_one_line(nodes, monkeypatch, caplog):
    monkeypatch.setattr(placement, "NOTICE_S", 0.2)
    placed = Cluster("auto", "rollout.generator.ray").allocate(gpus=2)
    wanted = (
        r"rollout.generator.ray=auto: no host .* has 1 CPU and 2 GPUs free; "
        r"all hosts together have 4 CPUs and 0 GPUs free"
    )
    with pytest.raises(UserError, match=wanted):
        placed.await_resources(0.4)
    assert "waiting for up to 0.4 s" in caplog.text and placed.poll() is not None
    monkeypatch.setattr(mmrl.sims.vector.workers, "START_S", 0.4)
    with pytest.raises(
        UserError, match="'tests.sims.line_simulator:Line': ray=auto: no host .* add hosts, or start fewer"
    ):
        build(LINE, 5, workers=5, ray="auto")


def test_a_cluster_that_can_not_be_joined_is_one_line(nodes, monkeypatch):
    import ray

    Cluster("auto", "ray")
    with pytest.raises(UserError, match="ray=127.0.0.1:9: this process is already in the Ray cluster auto"):
        Cluster("127.0.0.1:9", "ray")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=r"ray=127.0.0.1:9: there is no Ray cluster to join \(.*refused.*ray start"):
        Cluster("127.0.0.1:9", "ray")
    with pytest.raises(UserError, match="ray=there is not an address of a Ray cluster; write HOST:PORT or auto"):
        Cluster("there", "ray")
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(UserError, match="^the environment variable RAY_ADDRESS=nowhere is not an address of a Ray"):
        Cluster("auto", "ray")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"ray=auto needs Ray; install it with: pip install -e '.\[ray\]'"):
        Cluster("auto", "ray")
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(UserError, match="is for workers; set workers to 1 or more"):
        build(LINE, 1, ray="auto")


# --- simulators ---


def test_workers_on_other_hosts_change_nothing(nodes, behind):
    plain, split = build(LINE, 5), on_two_hosts(nodes, behind, LINE, 5)
    assert_alike(plain, split)
    pids = family(*split.simulator.pids)
    split.close()
    assert len(pids) == 4 and gone(pids)


def test_a_lost_host_costs_the_episodes_it_was_playing(nodes, behind):
    sim = on_two_hosts(nodes, behind, TROUBLE, 4)
    healthy, sick = sim.simulator.pids
    sim.reset(range(4), ["go"] * 4)
    staying = nodes.of(healthy)
    with pytest.warns(RuntimeWarning, match="its (process|connection) ended"):
        nodes.lose(nodes.of(sick))
        assert gone([sick])
        step = sim.step(moves(4))
    assert step.dropped.tolist() == [False, False, True, True]
    np.testing.assert_allclose(step.observation.state[:2, 0], [0.2, 0.21], rtol=1e-6)
    sim.reset(range(10, 14), ["go"] * 4)
    assert not sim.step(moves(4)).dropped.any() and sim.counters["dropped_episodes"] == 2
    assert sim.simulator.restarts == 1 and sim.simulator.pids[0] == healthy
    assert nodes.of(sim.simulator.pids[1]) is staying


@pytest.mark.slow
def test_trouble_is_told_from_other_hosts_too(behind):
    sim = behind(TROUBLE, 2, 2, deadline_s=2)
    for trouble, says in ((DIE, "its process ended with 3"), (HANG, "no answer in 2 s")):
        sim.reset([1, 2], ["go", "go"])
        actions, pids = moves(2), sim.simulator.pids
        actions[1, 1] = trouble
        with pytest.warns(RuntimeWarning, match=says):
            assert sim.step(actions).dropped.tolist() == [False, True]
        assert gone(pids[1:]) and sim.simulator.pids[0] == pids[0]
    with pytest.raises(UserError, match="cannot be made: OSError: out of arms"):
        behind(TROUBLE, 1, 1, {"refuse_start": True})
    with pytest.raises(UserError, match="its process ended with 127"):
        behind(LINE, 1, 1, python="/nowhere/python")


@pytest.mark.parametrize(
    ("how", "then"),
    [
        (signal.SIGKILL, "sim.step(actions)"),
        pytest.param(signal.SIGINT, "time.sleep(1000)", marks=pytest.mark.slow),
    ],
)
def test_nobody_is_left_behind(nodes, how, then):
    words = f"""
import signal, time, numpy as np
from mmrl.sims import build
from tests.sims.trouble import HANG
from tests.helpers.processes import family
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script runs in the background
sim = build("tests.sims.trouble:Trouble", 2, workers=2, ray="auto")
sim.reset([1, 2], ["go", "go"])
actions = np.full((2, 1, 1), 0.1)
actions[1] = HANG
print(*family(*sim.simulator.pids), flush=True)
{then}
"""
    trainer = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    orphans = [int(word) for word in trainer.stdout.readline().split()]
    assert len(orphans) == 4 and all(running(pid) for pid in orphans)
    time.sleep(0.5)
    trainer.send_signal(how)
    _, said = trainer.communicate(timeout=SOON)
    assert gone(orphans)  # neither the idle one nor the one that hangs
    assert said == "" if how == signal.SIGKILL else said.rstrip().endswith("KeyboardInterrupt")  # no chatter


# --- policies that sample ---


@pytest.mark.slow
def test_rollout_workers_on_another_host_make_what_training_would(nodes, tmp_path, monkeypatch):
    """Its host is lost in the second step, and it goes on on another one."""
    asked, ask = [], Handle.ask

    def losing(handle, message, seconds, shared=()):
        assert isinstance(handle.child.process, RayProcess)
        if "rollout" in decode(message):
            asked.append(handle.child.process.pid)
            if len(asked) == 2:
                nodes.lose(nodes.of(asked[1]))
                assert gone(asked[1:])
        return ask(handle, message, seconds, shared)

    plain = run(tmp_path / "plain", "steps=3", base=IMAGES)
    monkeypatch.setattr(Handle, "ask", losing)
    alike(plain, run(tmp_path / "placed", "steps=3", "rollout.workers={count: 1, ray: auto}", base=IMAGES))
    assert asked[0] == asked[1] != asked[-1]
    restarts = [row["generation/restarts"] for row in metrics(tmp_path / "placed") if "generation/restarts" in row]
    assert sum(restarts) >= 1


# --- engines ---


class Ranks:
    """Two ranks as threads of this process; what one raises the other does not wait for."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=9 * SOON)  # several processes may have to begin on a busy machine
        self.values = [None, None]

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def both(self, function):
        return together(function, range(2), self.barrier)


@pytest.fixture
def stand_ins(nodes, monkeypatch, tmp_path):
    """Makes `count` engines on each of two ranks."""
    monkeypatch.setattr(engines, "check_installed", lambda: None)
    monkeypatch.setattr(
        engines.PlacedProcess,
        "arguments",
        lambda self, model, host, port: ["-m", "tests.whole_runs.stand_in_server", host, str(port)],
    )
    made = []

    def make(count, address="auto"):
        ranks = Ranks()

        def build(rank):
            return engines.Servers(
                tmp_path,
                EngineOptions(context=16, settings=VLLMServer(servers=count, timeout=150, ray=address, in_flight=2)),
                describe=lambda path: None,
                gather=lambda value: ranks.gather(rank, value),
                rank=rank,
            )

        made.extend(ranks.both(build))
        ranks.both(lambda rank: made[rank].load(iter([("a", torch.ones(2))])))
        return made, ranks

    yield make
    for one in made:
        one.close()


def ask(server, count=40):
    ids = [torch.tensor([i]) for i in range(count)]
    requests = [Request(str(i), [i], (), ids[i], seed=2 * i + k, limit=2) for i in range(count) for k in range(2)]
    return [answer.ids.tolist() for answer in server.generate(requests, sampling=Sampling(), eos=(999,))]


WHOLE = [[i, 2 * i + k] for i in range(40) for k in range(2)]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_when_a_host_is_lost_the_engine_comes_up_on_another_one_and_every_rank_finds_it(nodes, stand_ins, count):
    (first, second), ranks = stand_ins(count)
    before = [server.address for server in first.servers]
    assert before == [server.address for server in second.servers] and len(set(before)) == count
    assert ask(first) == WHOLE
    pids = family(*(process.running.pid for process in first.processes))
    lost = nodes.of(pids[0])
    there = sum(nodes.of(process.running.pid) is lost for process in first.processes)  # Ray may put both on one host

    def lose():
        while sum(second.answered) < 8:
            time.sleep(0.01)
        nodes.lose(lost)

    killer = threading.Thread(target=lose)
    killer.start()
    assert ranks.both(lambda rank: ask((first, second)[rank])) == [WHOLE, WHOLE]
    killer.join()
    ranks.both(lambda rank: (first, second)[rank].load(iter([("a", torch.ones(2))])))
    assert first.measures()["generation/restarts"] == there and second.measures()["generation/asked_again"] > 0
    assert "Ray lost" in first.processes[0].log.read_text()
    assert first.servers[0].address == second.servers[0].address != before[0]
    assert ask(second) == WHOLE and nodes.of(first.processes[0].running.pid) is not lost
    last = family(*(process.running.pid for process in first.processes))
    first.close()
    assert gone([*pids, *last])


@pytest.mark.slow
def test_engines_that_have_nowhere_to_go_end_the_run_with_the_reason(nodes, stand_ins, monkeypatch):
    (first, second), ranks = stand_ins(1)
    with pytest.raises(UserError, match="rollout.generator.ray=127.0.0.1:9: this process is already in"):
        stand_ins(1, "127.0.0.1:9")
    for process in first.processes:
        process.patience = 0.3
    for node in list(nodes.others):
        nodes.lose(node)
    while first._may_recover():
        time.sleep(0.1)
    monkeypatch.setattr(processes, "describe_versions", lambda: "")
    with pytest.raises(
        UserError, match="server-0.log says: Error: rollout.generator.ray=auto: no host of the Ray cluster"
    ):
        ranks.both(lambda rank: (first, second)[rank].load(iter([("a", torch.ones(2))])))


@vllm_workers.needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_vllm_on_another_host_answers_as_here_and_survives_its_host(nodes, tmp_path):
    call(vllm_workers.placed, tmp_path, nodes.address, log=tmp_path / "placed.log", timeout=1100)
    found = json.loads((tmp_path / "placed.json").read_text())
    assert len(found["here"]) == 128 and found["here"] == found["there"] == found["killed"] == found["after"]
    assert found["generation/restarts"] == 1 and found["generation/asked_again"] >= 1
    assert found["generation/probe_gap"] < 1e-3 and found["moved"] and gone(found["pids"])
    assert len([row for row in metrics(tmp_path / "there") if "loss" in row]) == 2
