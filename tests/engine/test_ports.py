"""The ports that a training opens, from /proc/net: on one host none beyond loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmrl.engine.launcher import ANY_PORT, _rendezvous, store_at
from tests.engine.test_heartbeat import trained
from tests.whole_runs.parts import TINY, command, metrics, start
from tests.whole_runs.test_launchers import DEEPSPEED, TORCHRUN, launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
RANK = """
import json, os, sys
import torch
from mmrl.engine.deepspeed import objects_group, start_distributed
from tests.engine.test_ports import listening

start_distributed(30.0)
group = torch.distributed.new_group(backend="gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total, group=group)
print(json.dumps({"total": total.item(), "addresses": listening()}), flush=True)
torch.distributed.barrier()
"""


def listening(process: int | str = "self") -> list[str]:
    """Returns the local addresses, in hexadecimals of the kernel, at which sockets of a process listen."""
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        if Path(f"/proc/{process}/net/{name}").exists()
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def beyond_loopback(addresses: list[str]) -> list[str]:
    """Addresses of IPv4 are little-endian: 0100007F is 127.0.0.1."""
    loopback = ("0" * 24 + "01000000", "0000000000000000FFFF00000100007F")  # ::1, and 127.0.0.1 as one of IPv6
    return [address for address in addresses if address != "0100007F" and address not in loopback]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_host_opens_no_port_beyond_loopback(world):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    launched = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for rank in range(world)
    ]
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK], env=os.environ | more, stdout=subprocess.PIPE, text=True)
        for more in (launched if world > 1 else [{}])
    ]
    found = [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in processes]
    assert [one["total"] for one in found] == [world] * world
    assert [one["addresses"] for one in found if not one["addresses"]] == []  # gloo's: so the list is read right
    assert [beyond_loopback(one["addresses"]) for one in found] == [[]] * world


@pytest.mark.slow
def test_a_training_of_two_ranks_opens_no_port_beyond_loopback(tmp_path):
    """While it trains, with everything that it has started."""
    run, log = tmp_path / "run", tmp_path / "run.log"
    processes = start(command, "train", str(TINY), "steps=100000", f"run_dir={run}", log=log, ranks=2)
    trained(run, processes, 2)
    family = [pid for process in processes for pid in (process.pid, *descendants(process.pid))]
    addresses = [listening(pid) for pid in family]
    for process in processes:
        process.kill()
    assert all(addresses[family.index(process.pid)] for process in processes)  # gloo's, and the store
    assert [beyond_loopback(one) for one in addresses] == [[]] * len(family)


TORCHRUN_IN_A_FILE = [*TORCHRUN[:-2], "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]
TORCHRUN_IN_A_FILE += ["--rdzv-endpoint", "MEETING", "--local-addr", "127.0.0.1"]
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def addresses_under(launcher: list[str], folder: Path, **environment: str) -> tuple[list[str], list[list[str]]]:
    """Returns where a launcher and where each of its two ranks listens while they train."""
    run, meeting = folder / "run", str(folder / "meeting")
    command = [meeting if part == "MEETING" else part for part in launcher]
    process = launch(command, run, "steps=100000", "checkpoint.every=0", **environment)
    try:
        until = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or not metrics(run):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        first, *others = [process.pid, *descendants(process.pid)]
        return listening(first), [listening(pid) for pid in others]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "environment"), [(DEEPSPEED, {}), (TORCHRUN_IN_A_FILE, UNSHARED)], ids=["deepspeed", "torchrun"]
)
def test_ranks_under_a_launcher_open_no_port_beyond_loopback(tmp_path, launcher, environment):
    """As the page on several GPUs writes it."""
    own, of_ranks = addresses_under(launcher, tmp_path, **environment)
    assert own == [] and sum(1 for addresses in of_ranks if addresses) == 2
    assert [beyond_loopback(addresses) for addresses in of_ranks] == [[]] * len(of_ranks)


@pytest.mark.slow
def test_the_usual_store_of_torchrun_is_open_to_all(tmp_path):
    """Where this fails torch has closed it, and the page need not warn any more."""
    own, of_ranks = addresses_under(TORCHRUN, tmp_path)
    assert beyond_loopback(own) != []
    assert [beyond_loopback(addresses) for addresses in of_ranks] == [[]] * len(of_ranks)


def descendants(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*found, *(one for child in found for one in descendants(child))]


def test_one_process_has_its_store_in_memory(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", ANY_PORT)
    before = listening()
    ((store, rank, world),) = _rendezvous("mmrl://")
    store.set("key", "value")
    assert (store.get("key"), rank, world) == (b"value", 0, 1) and listening() == before


def test_a_port_of_all_interfaces_is_seen():
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):
        assert "00000000" in beyond_loopback(listening()) and "0100007F" in listening()


def test_a_store_listens_at_its_address_alone():
    before = set(listening())
    store = store_at("127.0.0.1")
    store.set("key", "value")
    assert store.get("key") == b"value" and set(listening()) - before <= {"0100007F"} and "0100007F" in listening()
