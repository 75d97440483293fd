"""Which GPU each rank takes and hands on. There is no GPU here: torch.cuda is a stand-in that counts and remembers."""

import json
import os
import subprocess
import sys

import pytest
import torch

from mmrl.engine import select_device
from mmrl.errors import UserError
from mmrl.generation.settings import VLLMServer
from mmrl.generation.vllm.engine import EngineOptions
from mmrl.generation.vllm.processes import Process, devices_of
from mmrl.rewards.types import device_of
from mmrl.runtime import devices
from mmrl.sims.vector.workers import SimulatorWorker, make_launcher

MIG = "MIG-6f3ad1b6-9a7c-5d53-8a76-0c47e5a7b9c1"


@pytest.fixture
def cuda(monkeypatch):
    """A host whose rank 3 of 4 sees four GPUs; the numbers that were set as the current device."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    monkeypatch.setenv(devices.EGL, "")
    monkeypatch.delenv(devices.EGL)
    yield taken
    devices.release_device()


@pytest.mark.parametrize(
    ("visible", "name", "renders"),
    [(None, "3", "3"), ("4,5,6,7", "7", "7"), (f"0,1,2,{MIG}", MIG, None), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-d", None)],
)
def test_a_rank_takes_its_gpu_and_hands_it_on(cuda, monkeypatch, visible, name, renders):
    if visible is not None:
        monkeypatch.setenv(devices.VISIBLE, visible)
    assert devices.child_environment() == {} and devices.device_name("cuda") == "cuda"  # nothing is taken yet
    select_device()
    assert cuda == [3] and devices.device_index() == 3
    assert devices.child_environment() == {"CUDA_VISIBLE_DEVICES": name}
    assert (devices.device_name("cuda"), devices.device_name("physx_cuda")) == ("cuda:3", "physx_cuda:3")
    assert device_of(None) == torch.device("cuda:3") and device_of("cpu") == torch.device("cpu")
    assert os.environ.get(devices.EGL) == renders


def test_a_renderer_that_the_user_names_stays(cuda, monkeypatch):
    monkeypatch.setenv(devices.EGL, "1")
    select_device()
    assert os.environ[devices.EGL] == "1"


def test_more_ranks_than_gpus_are_named_before_anything_is_built(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(devices.VISIBLE, "6")
    with pytest.raises(UserError, match=r"rank 3 of this host finds 1 GPU \(CUDA_VISIBLE_DEVICES=6\); start as many"):
        select_device()
    assert cuda == []


def test_without_a_gpu_nothing_is_taken():
    select_device()
    assert (
        devices.device_index() is None and devices.child_environment() == {} and device_of(None) == torch.device("cpu")
    )


LAUNCHED = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "0",
    "ROLE_NAME": "default",
    "LOCAL_SIZE": "4",
    "MASTER_PORT": "29500",
}


def test_a_simulator_s_worker_sees_the_rank_s_gpu_alone_and_no_launcher(cuda, monkeypatch):
    started = {}
    monkeypatch.setenv(devices.VISIBLE, "4,5,6,7")
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    select_device()
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.update(env))
    SimulatorWorker({"name": "tabletop", "count": 1, "options": {}}, 60.0, make_launcher("tabletop", None, None))
    assert started["CUDA_VISIBLE_DEVICES"] == started["MUJOCO_EGL_DEVICE_ID"] == "7"
    assert not (LAUNCHED.keys() | {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}) & started.keys() and "PATH" in started


TELLS = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"


@pytest.mark.parametrize(("visible", "shown"), [("0,1,2,3,4,5,GPU-x," + MIG, "GPU-x," + MIG), (None, "6,7")])
def test_a_server_gets_its_gpus_through_the_inherited_list_and_no_launcher(cuda, monkeypatch, tmp_path, visible, shown):
    if visible is not None:
        monkeypatch.setenv(devices.VISIBLE, visible)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    settings = VLLMServer(tensor_parallel=2, first_device=4, servers=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    first, second = devices_of(settings, lambda value: [value])
    assert (first, second) == (4, 6)
    log = tmp_path / "log"
    server = Process(EngineOptions(context=16, settings=settings), "key", log, "http://127.0.0.1:1", second)
    monkeypatch.setattr(Process, "arguments", lambda *_: ["-c", TELLS])
    server.start(tmp_path)
    server.running.wait()
    told = json.loads(log.read_text())
    assert told["CUDA_VISIBLE_DEVICES"] == shown
    assert not (LAUNCHED.keys() | {"LOCAL_RANK", "RANK"}) & told.keys()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"first_device": 0}, "first_device=0 is a GPU that a rank trains on; set it to 4 or more"),
        ({"first_device": 4, "servers": 3, "tensor_parallel": 2}, "from rollout.generator.first_device=4 on need 10"),
    ],
)
def test_servers_on_gpus_that_are_taken_or_not_there_are_refused(cuda, monkeypatch, settings, problem):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(UserError, match=problem):
        devices_of(VLLMServer(**settings), lambda value: [value])


def test_a_gpu_that_is_not_shown_is_named(monkeypatch):
    monkeypatch.setenv(devices.VISIBLE, "4,5")
    with pytest.raises(UserError, match="GPU 2 was requested, but CUDA_VISIBLE_DEVICES=4,5 lists 2"):
        devices.visible_devices([1, 2])


def test_torch_is_not_needed_to_know():
    """Workers of simulators run under interpreters without it."""
    code = "import sys, mmrl.runtime.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0
