"""Two hosts on one machine: each has its own network, processes and temporary folder of Ray, and a cable joins them."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.generation.settings import VLLMColocated
from mmrl.generation.vllm.api_key import KEY
from mmrl.generation.vllm.engine import EngineOptions
from mmrl.generation.vllm.processes import Process
from tests.whole_runs import vllm_workers
from tests.whole_runs.parts import HERE, MODEL, TINY, metrics, model_folder

UNSHARED = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
SERVER = [*vllm_workers.SERVER, "rollout.generator.timeout=240", "steps=2"]
HOSTS = ["10.77.0.1", "10.77.0.2"]
SECRET = "known to both hosts"


def possible() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    return tools and subprocess.run([*UNSHARED, "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    vllm_workers.needs_vllm,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"),
]


class Hosts:
    def __init__(self, folder: Path):
        self.inside, self.outside = [], []
        os.makedirs("/tmp/ray", exist_ok=True)
        for i in range(2):
            own = folder / f"host-{i}"
            own.mkdir()
            there = ["sh", "-c", f"mount --bind {own} /tmp/ray && echo ready && exec sleep infinity"]
            self.outside.append(subprocess.Popen([*UNSHARED, *there], stdout=subprocess.PIPE, text=True))
            assert self.outside[i].stdout.readline() == "ready\n"
            pid = self.outside[i].pid
            self.inside.append(Path(f"/proc/{pid}/task/{pid}/children").read_text().strip())
        one, other = self.inside
        self.call("ip", "link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", other)
        for i, address in enumerate(HOSTS):
            up = f"ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up"
            self.call(*self.on(i), "sh", "-c", up)

    def on(self, host: int) -> list[str]:
        return ["nsenter", "-t", self.inside[host], "--net", "--mount", "--pid"]

    def call(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
        assert done.returncode == 0, done.stdout + done.stderr

    def train(self, folder: Path, *overrides: str) -> None:
        """`torchrun --nnodes 2` with a rank on each host."""
        ranks = []
        for i in range(2):
            launch = ["torch.distributed.run", "--nnodes", "2", "--node_rank", str(i), "--nproc_per_node", "1"]
            launch += ["--master_addr", HOSTS[0], "--master_port", "29500", "--module"]
            run = ["mmrl", "train", str(TINY), f"run_dir={folder}", *SERVER, *overrides]
            with (folder.parent / f"{folder.name}-{i}.log").open("w") as log:
                command = [*self.on(i), sys.executable, "-m", *launch, *run]
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment()))
        for i, rank in enumerate(ranks):
            code = rank.wait(timeout=500)
            assert code == 0, (folder.parent / f"{folder.name}-{i}.log").read_text()[-3000:]

    def close(self) -> None:
        for host in self.outside:
            host.kill()
            host.wait()


def environment() -> dict[str, str]:
    """As it would be on each host: with the network's name, since none of these has a name that the other knows."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), MODEL: model_folder()}
    return env | {"GLOO_SOCKET_IFNAME": "eth0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "", KEY: SECRET}


@pytest.fixture
def hosts(tmp_path):
    if not possible():
        pytest.skip("hosts of their own need root, unshare, nsenter and ip")
    made = Hosts(tmp_path)
    yield made
    made.close()


def test_ranks_on_two_hosts_share_an_engine_that_ray_placed(hosts, tmp_path):
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--object-store-memory", str(80 * 2**20)]
    head = ["--head", "--port", "6379", "--include-dashboard", "false", "--num-cpus", "0"]
    hosts.call(*hosts.on(0), *ray, *head, "--node-ip-address", HOSTS[0])
    hosts.call(*hosts.on(1), *ray, "--address", f"{HOSTS[0]}:6379", "--num-cpus", "1", "--node-ip-address", HOSTS[1])
    hosts.train(tmp_path / "run", f"rollout.generator.ray={HOSTS[0]}:6379")
    trained(tmp_path / "run")


def test_ranks_on_two_hosts_share_an_engine_with_an_address(hosts, tmp_path):
    process = Process(EngineOptions(context=512, settings=VLLMColocated(cache_gib=0.1)), SECRET, tmp_path / "log")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    command = [*hosts.on(1), sys.executable, *process.arguments(Path(model_folder()), HOSTS[1], port)]
    with process.log.open("w") as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment() | process.environment(),
            start_new_session=True,  # it ends with all of its group
        )
    try:
        hosts.train(tmp_path / "run", f"rollout.generator.addresses=[http://{HOSTS[1]}:{port}]")
    finally:
        server.kill()
        server.wait()
    trained(tmp_path / "run")


def test_an_engine_whose_host_loses_power_is_lost_within_its_seconds(hosts):
    """No packet says so, while a response is awaited and before the next request."""
    listening = f"import socket, time; s = socket.create_server(('{HOSTS[1]}', 9000)); print(flush=True)"
    accepting = "c = s.accept(); print(flush=True); time.sleep(1000)"
    engine = subprocess.Popen(
        [*hosts.on(1), sys.executable, "-c", f"{listening}; {accepting}"], stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout.readline()
    asking = f"""
import time
from mmrl.generation.vllm import client
client.SILENCE_S = 4
server = client.Server(lambda: "http://{HOSTS[1]}:9000", 100)
for _ in range(2):
    began = time.monotonic()
    try:
        server.post("generate", {{}})
    except client.LOST:
        print(time.monotonic() - began, flush=True)
"""
    command = [*hosts.on(0), sys.executable, "-c", asking]
    asker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert engine.stdout.readline()
    hosts.call(*hosts.on(1), "ip", "addr", "flush", "dev", "eth0")  # it hears, and never answers
    said, _ = asker.communicate(timeout=120)
    engine.kill()
    engine.wait()
    waited = [float(word) for word in said.split()]
    assert len(waited) == 2 and 1 < waited[0] < 20 and waited[1] < 20


def trained(folder: Path) -> None:
    steps = [row for row in metrics(folder) if "loss" in row]
    assert len(steps) == 2 and all(row["generation/probe_gap"] < 1e-3 for row in steps if "generation/probe_gap" in row)
    assert steps[0]["correction/logp_gap_max"] < 1e-3
