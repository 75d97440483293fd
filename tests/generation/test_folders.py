"""The folder through which weights go, who may talk to a server, and what a server is told in which order."""

import asyncio
import signal
import subprocess
import sys
import time

import pytest
import requests
import torch

from mmrl.errors import UserError
from mmrl.generation.settings import VLLMServer
from mmrl.generation.vllm import client
from mmrl.generation.vllm.api_key import KEY, Keyed
from mmrl.generation.vllm.client import ATTEMPTS, EngineWeights, Failed, Server
from mmrl.generation.vllm.engine import EngineOptions
from mmrl.generation.vllm.servers import Servers
from mmrl.generation.weight_sync.folders import Exchange, remove_abandoned
from tests.rewards.http_servers import DRIPS, dripping
from tests.whole_runs.stand_in_server import serving

HOLDS = """
import sys, time, pathlib
from mmrl.generation.weight_sync.folders import Exchange
made = Exchange(pathlib.Path(sys.argv[1]), "other")
made.claim()
(made.path / "weights-1").mkdir()
print("claimed", flush=True)
time.sleep(600)
"""


def test_a_folder_that_a_killed_run_left_is_removed_and_that_of_a_living_one_stays(tmp_path):
    (tmp_path / "run-nobodys").mkdir()  # has no owner: it is not ours
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"claimed\n"
    assert remove_abandoned(tmp_path) == [] and (tmp_path / "run-other/weights-1").is_dir()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert remove_abandoned(tmp_path) == [tmp_path / "run-other"]
    assert [path.name for path in tmp_path.iterdir()] == ["run-nobodys"]


def test_the_folder_is_there_from_claim_to_clear(tmp_path):
    made = Exchange(tmp_path / "new", "me")
    made.claim()
    made.claim()
    assert made.path.is_dir() and remove_abandoned(tmp_path / "new") == []
    made.clear()
    assert list((tmp_path / "new").iterdir()) == []


def servers(folder, address, said=None):
    return Servers(
        folder,
        EngineOptions(context=16, settings=VLLMServer(addresses=[address], timeout=2.0)),
        describe=lambda path: None,
        gather=lambda value: [value],
        say=(said if said is not None else []).append,
    )


def test_weights_of_now_lie_there_alone_and_nothing_after_the_end(tmp_path):
    with serving() as server:
        made = servers(tmp_path, f"http://127.0.0.1:{server.server_port}")
        for number in (1, 2):
            made.load([("a", torch.full((2,), float(number)))])
            assert [path.name for path in made.exchange.path.glob("weights-*")] == [f"weights-{number}"]
        made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_start_leaves_no_weights(tmp_path):
    with pytest.raises(UserError, match="did not answer within rollout.generator.timeout=2 s"):
        servers(tmp_path, "http://127.0.0.1:9").load([("a", torch.ones(2))])
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_says_what_it_removed(tmp_path):
    (tmp_path / "run-old").mkdir()
    (tmp_path / "run-old/owner").touch()
    told = []
    servers(tmp_path, "http://127.0.0.1:9", told)
    assert told == [f"removed {tmp_path / 'run-old'}: weights of a run that has ended"]


# --- the key ---


def test_a_server_is_asked_with_the_key_of_the_environment(tmp_path, monkeypatch):
    with serving(key="secret") as server:
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(UserError, match=f"asks for an API key; set the environment variable {KEY}"):
            servers(tmp_path, address).load([("a", torch.ones(2))])
        monkeypatch.setenv(KEY, "secret")
        made = servers(tmp_path, address)
        made.load([("a", torch.ones(2))])
        assert made.arrived()[0].tensors.keys() == {"a"}
        made.close()


@pytest.mark.parametrize(
    ("given", "answered"),
    [(b"Bearer secret", True), (b"Bearer other", False), (b"secret", False), (b"", False), (None, False)],
)
@pytest.mark.parametrize("path", ["/weight_info", "/collective_rpc", "/v1/models", "/docs", "/"])
def test_no_path_is_answered_without_the_key(monkeypatch, given, answered, path):
    monkeypatch.setenv(KEY, "secret")
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope["path"])

    async def send(message):
        sent.append(message)

    headers = [] if given is None else [(b"authorization", given)]
    scope = {"type": "http", "path": path, "headers": headers, "method": "OPTIONS"}
    asyncio.run(Keyed(app)(scope, None, send))
    assert reached == ([path] if answered else [])
    assert [message.get("status") for message in sent[:1]] == ([] if answered else [401])


def test_a_websocket_without_the_key_is_closed(monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Keyed(None)({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- limits ---


class Told(Server):
    """What each path answers: a value, or an exception."""

    def __init__(self, **answers):
        super().__init__(lambda: "http://told", 1.0)
        self.answers, self.asked = answers, []

    def _exchange(self, method, path, body=None):
        self.asked.append(path)
        answer = self.answers.get(path.split("/")[-1], {})
        if isinstance(answer, Exception):
            raise answer
        return answer


def read_there(server, weights):
    server.call("receive_folder", folder=str(weights.folder))


@pytest.fixture
def weights(tmp_path):
    return EngineWeights("run-2", tmp_path / "weights-2", tmp_path / "adapter-1")


OLD = {"weight_info": {"weight_version": "run-1"}}


@pytest.mark.parametrize(
    ("path", "doing"),
    [
        ("collective_rpc", "take the weights"),
        ("load_lora_adapter", "take the LoRA"),
        ("reset_mm_cache", "empty its caches"),
        ("update_weight_version", "name its weights"),
    ],
)
@pytest.mark.quick("load_lora_adapter-take the LoRA")
def test_a_wait_names_the_server_and_what_it_was_to_do(weights, path, doing, monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.1)
    lost = Told(**OLD | {path: requests.ConnectionError("gone")})
    with pytest.raises(UserError, match=f"server at http://told did not {doing} within rollout.generator.timeout=1 s"):
        lost.refresh(weights, read_there)
    failing = Told(**OLD | {path: Failed("500 no room")})
    with pytest.raises(UserError, match=rf"failed 3 times to {doing} \(500 no room\)"):
        failing.refresh(weights, read_there)
    assert failing.asked.count("weight_info") == ATTEMPTS


def test_one_that_ends_is_not_waited_for(weights):
    alive = iter([True, False, False, False])
    with pytest.raises(UserError, match="ended before it could answer"):
        Told(weight_info=requests.ConnectionError("refused")).refresh(weights, read_there, lambda: next(alive))


def test_a_server_that_was_started_again_gets_the_weights_before_it_is_asked_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.1)
    with serving() as server:
        made = servers(tmp_path, f"http://127.0.0.1:{server.server_port}")
        made.load([("a", torch.ones(2))])
        call, lost = made.servers[0].call, [1, 2]

        def once(method, **arguments):
            if method == "arrived" and lost:
                server.version, server.folder = "none", lost.pop() and None
                raise requests.ConnectionError("gone")
            return call(method, **arguments)

        made.servers[0].call = once
        assert made.arrived()[0].tensors.keys() == {"a"} and not lost
        made.servers[0].call = lambda method, **arguments: {}
        with pytest.raises(UserError, match="does not report which weights it has .*results"):
            made.arrived()
        made.close()


def test_what_a_server_is_told_from_version_to_version(weights):
    for old, paths in {
        "run-2.adapter-1": [],
        "run-2": ["load_lora_adapter", *3 * ["cache"], "update_weight_version"],
        "run-2.adapter-0": ["load_lora_adapter", "unload_lora_adapter", *3 * ["cache"], "update_weight_version"],
        "run-1": ["collective_rpc", "load_lora_adapter", *3 * ["cache"], "update_weight_version"],
    }.items():
        server = Told(weight_info={"weight_version": old})
        server.refresh(weights, read_there)
        found = [path.split("/")[-1] for path in server.asked[1:]]
        assert [("cache" if path.startswith("reset_") else path) for path in found] == paths


def test_a_server_rests_longer_each_time_that_it_fails(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    server, rests = Told(), []
    for _ in range(6):
        server.failed(runs=True)
        server.failed(runs=True)  # sent at the same time
        rests.append(server.retry_at - now[0])
        now[0] = server.retry_at
        assert server.suspect and not server.is_paused()
    assert rests == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize("part", DRIPS)
def test_the_time_limit_bounds_the_whole_of_a_request(part):
    """Bytes come in time, one after the other, and never end."""
    with dripping(part) as url:
        started = time.monotonic()
        with pytest.raises(requests.Timeout, match="not complete after 0.3 s"):
            Server(lambda: url, 0.3).post("inference/v1/generate", {"token_ids": [1]})
    assert time.monotonic() - started < 5


def test_an_answer_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(client, "MAX_ANSWER", 1000)
    with serving() as server:
        one = Server(lambda: f"http://127.0.0.1:{server.server_port}", 5.0)
        with pytest.raises(Failed, match="longer than 1000 bytes"):
            one.post("inference/v1/generate", {"token_ids": [1], "sampling_params": {"seed": 0, "n": 50}})
