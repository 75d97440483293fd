"""The http reward against servers that are down, slow, broken or talk nonsense, and against mmrl's own server."""

import base64
import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
import zipfile
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.services import http
from mmrl.rewards.services.http import JSON, NPZ, decode, encode
from mmrl.rewards.services.server import RewardServer
from mmrl.rollouts import Prompt, Sample, Video
from tests.rewards.http_servers import DRIPS, dripping, hangs_up, running, says, scripted, sleeps, trickles

HERE = __name__
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http, "BACKOFF_S", (0.01, 0.02))


def sample(level=0.5, channels=3, **prompt):
    image = torch.full((channels, 4, 6), level)
    image[0, 0, 0] = 1
    return Sample(Prompt(**{"id": "p", "text": "a cat"} | prompt), "meow", 2, True, 8, image)


def remote(url, **options):
    return RewardSet([RewardSpec(name="http", options={"url": url, **options}, label="remote")])


def failure(url, count=1, **options):
    with pytest.raises(UserError) as caught:
        remote(url, **options).score([sample()] * count)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("reward 'remote': ")
    return str(caught.value)


# --- the client ---


def test_scores_come_back_in_order():
    with scripted(says(200, {"scores": [0.25, None, 3]})) as server:
        scores = remote(server.url).score([sample()] * 3)
    assert scores[0] == 0.25 and scores[1].isnan() and scores[2] == 3
    (_, headers, body), *more = server.requests
    assert more == [] and headers["Content-Type"] == JSON
    assert [row["text"] for row in json.loads(body)["samples"]] == ["a cat"] * 3


def test_a_server_that_is_down_stops_the_run():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    message = failure(url, retries=2)
    assert f"server {url} did not answer in 3 tries, 0." in message and "ConnectionError" in message


@pytest.mark.parametrize(
    "fault, words",
    [
        (says(500, {"error": "out of memory"}), "status 500.*out of memory"),
        (says(503, b"busy"), "status 503: busy"),
        (says(429, b"slow down"), "status 429"),
        (hangs_up, "ConnectionError"),
        (sleeps(3.0), "Timeout"),
    ],
)
def test_passing_faults_are_tried_again_and_counted(fault, words):
    options = {"deadline_s": 0.6 if words == "Timeout" else 20}  # short only where it must pass
    with scripted(fault, fault, says(200, {"scores": [7]})) as server:
        assert remote(server.url, retries=2, **options).score([sample()]).tolist() == [[7]]
        assert len(server.requests) == 3
        assert server.requests[0][2] == server.requests[2][2]  # the same again
    with scripted(fault) as server:
        message = failure(server.url, retries=1, **options)
        assert "did not answer in 2 tries" in message and len(server.requests) == 2
    assert re.search(words, message)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 301, 204])
def test_a_refusal_is_not_tried_again(status):
    with scripted(says(status, b'{"error": "no such\nthing"}')) as server:
        message = failure(server.url, retries=5)
        assert len(server.requests) == 1
    assert f"refused the request: status {status}" in message


@pytest.mark.parametrize(
    "answer, words",
    [
        (b"<html>It works</html>", "did not answer with a JSON object.*It works"),
        (b"", "did not answer with a JSON object"),
        ([1.0], "did not answer with a JSON object"),
        ({"score": [1.0]}, "without a list of scores"),
        ({"scores": 1.0}, "without a list of scores"),
        ({"scores": [1.0, 2.0]}, "returned 2 values for 1 samples"),
        ({"scores": []}, "returned 0 values for 1 samples"),
        ({"scores": ["high"]}, "one number for each sample"),
        (pickle.dumps({"scores": [1.0]}), "did not answer with a JSON object"),
    ],
)
def test_nonsense_is_refused_at_once(answer, words):
    with scripted(says(200, answer)) as server, pytest.raises(UserError, match=words):
        try:
            remote(server.url, retries=5).score([sample()])
        finally:
            assert len(server.requests) == 1


@pytest.mark.parametrize("part", DRIPS)
def test_the_deadline_bounds_the_whole_of_a_request(part):
    """A socket's timeout bounds the wait for the next byte, which comes in time here, and without end."""
    with dripping(part) as url:
        started = time.monotonic()
        message = failure(url, deadline_s=0.3, retries=0)
    assert "did not answer in 1 tries" in message and "Timeout: the answer was not complete after 0.3 s" in message
    assert time.monotonic() - started < 5


def test_the_deadline_holds_for_an_answer_that_trickles():
    with scripted(trickles) as server:
        start = time.monotonic()
        assert "not complete after 0.2 s" in failure(server.url, deadline_s=0.2, retries=1)
        assert time.monotonic() - start < 2.5  # each answer would take five seconds
        assert len(server.requests) == 2


def test_pauses_grow_to_a_limit(monkeypatch):
    pauses = []
    monkeypatch.setattr(http, "BACKOFF_S", (1.0, 5.0))
    monkeypatch.setattr(http, "sleep", pauses.append)
    with scripted(says(500, b"")) as server:
        failure(server.url, retries=5)
    assert pauses == [1, 2, 4, 5, 5]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"url": "127.0.0.1:8000"}, "begins with http"),
        ({"deadline_s": 0}, "deadline_s must be positive"),
        ({"retries": -1}, "retries must be 0 or more, not -1"),
        ({"format": "pickle"}, "format must be one of json, npz"),
        ({"pixels": "bf16"}, "pixels must be one of"),
        ({"scope": "rank"}, "scope must be one of"),
        ({"retry": 1}, "did you mean 'retries'"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=f"reward 'http'.*{words}"):
        build("http", {"url": "http://127.0.0.1:1"} | options)


# --- what goes over the wire ---


def same(a, b):
    assert (a.prompt.id, a.prompt.text, a.prompt.answer, a.prompt.system) == (
        b.prompt.id,
        b.prompt.text,
        b.prompt.answer,
        b.prompt.system,
    )
    assert a.prompt.metadata == b.prompt.metadata and len(a.prompt.images) == len(b.prompt.images)
    assert all(np.array_equal(x, y) for x, y in zip(a.prompt.images, b.prompt.images, strict=True))
    assert (a.response, a.response_length, a.truncated, a.max_response_length) == (
        b.response,
        b.response_length,
        b.truncated,
        b.max_response_length,
    )


@pytest.mark.parametrize("format, pixels", [("json", "float32"), ("npz", "float32"), ("npz", "uint8")])
def test_samples_survive_the_way(format, pixels):
    asked = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    wide = sample(1.5, answer=["a", 3], system="be kind", metadata={"text": "ü", "n": [1, None]}, images=(asked, asked))
    sent = [wide, sample(0.2, channels=1), Sample(Prompt("q", "no image"), "text")]
    got, group = decode(encode(sent, [4, 4, 1], format, pixels), format, max_bytes=10**6)
    assert group.tolist() == [4, 4, 1] and group.dtype == torch.int64
    for a, b in zip(sent, got, strict=True):
        same(a, b)
    assert got[2].image is None and got[1].image.shape == (1, 4, 6)
    exact = pixels == "float32" and format == "npz"
    for a, b in zip(sent[:2], got[:2], strict=True):
        expected = a.image if exact else a.image.clamp(0, 1)
        torch.testing.assert_close(b.image, expected, rtol=0, atol=0 if exact else 0.5 / 255 + 1e-6)
    assert decode(encode(sent, None, format, pixels), format, max_bytes=10**6)[1] is None


@pytest.mark.parametrize("format, pixels", [("json", "float32"), ("npz", "float32"), ("npz", "uint8")])
def test_clips_survive_the_way(format, pixels):
    """Those of a prompt, and what was made for one, beside samples without any."""
    shown = tuple(Image.fromarray(np.full((2, 4, 3), level, np.uint8)) for level in (10, 200, 90))
    made = torch.rand(5, 1, 4, 6, generator=torch.Generator().manual_seed(0)) * 1.4 - 0.2
    asked = Prompt("p", "<video>What moves?", videos=(Video(shown, 4.0), Video(shown[:1], 2.5)))
    sent = [Sample(Prompt("q", "text"), "text"), Sample(asked, "a cat"), Sample(Prompt("r", "a cat"), frames=made)]
    plain, told, drawn = decode(encode(sent, None, format, pixels), format, max_bytes=10**6)[0]
    assert plain.frames is None and plain.prompt.videos == () == drawn.prompt.videos and told.frames is None
    assert [clip.fps for clip in told.prompt.videos] == [4.0, 2.5]
    for clip, frames in zip(told.prompt.videos, (shown, shown[:1]), strict=True):
        assert [np.asarray(frame).tolist() for frame in clip.frames] == [np.asarray(frame).tolist() for frame in frames]
    exact = pixels == "float32" and format == "npz"
    tolerance = 0 if exact else 0.5 / 255 + 1e-6
    torch.testing.assert_close(drawn.frames, made if exact else made.clamp(0, 1), rtol=0, atol=tolerance)


def test_what_json_cannot_carry_is_named():
    with pytest.raises(UserError, match="prompt .*answer or metadata cannot be sent.*Tensor"):
        encode([sample(answer=torch.zeros(2))], None, "json")


def npz(request=b'{"samples": []}', **arrays):
    file = io.BytesIO()
    np.savez(file, **({"request": np.frombuffer(request, np.uint8)} if request is not None else {}), **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "body, format, words",
    [
        (b"nonsense", "json", "Expecting value"),
        (b"\xff", "json", "decode"),
        (b"[]", "json", "list of samples"),
        (b'{"samples": 3}', "json", "list of samples"),
        (b'{"samples": [3]}', "json", "sample 0 is not a JSON object"),
        (b'{"samples": [{}, {"txt": "a"}]}', "json", "sample 1 has unknown keys txt"),
        (b'{"samples": [{"text": 3}]}', "json", "text must be of type str"),
        (b'{"samples": [{"image": 3}]}', "json", "not an image in base64 PNG"),
        (b'{"samples": [{"image": "AAAA"}]}', "json", "not an image in base64 PNG"),
        (b'{"samples": [{"images": ["?"]}]}', "json", "not an image in base64 PNG"),
        (b'{"samples": [{"videos": [{"frames": []}]}]}', "json", "a video must have frames and fps"),
        (b'{"samples": [{"frames": ["?"]}]}', "json", "not an image in base64 PNG"),
        (b'{"samples": [{}], "group": [1, 2]}', "json", "one integer for each sample"),
        (b'{"samples": [{}], "group": ["a"]}', "json", "one integer for each sample"),
        (b"PK nonsense", "npz", "not an npz file"),
        (npz(None), "npz", "no array `request`"),
        (npz(image_0=np.zeros((3, 2, 2), np.uint8)), "npz", "belong to no sample: image_0"),
        (npz(b'{"samples": [{}]}', image_0=np.zeros((2, 2), np.uint8)), "npz", "sample 0: image is uint8"),
        (npz(b'{"samples": [{}]}', image_0=np.zeros((3, 2, 2))), "npz", "sample 0: image is float64"),
        (npz(image_0=np.array([print], dtype=object)), "npz", "allow_pickle"),
    ],
)
def test_requests_that_cannot_be_read(body, format, words):
    with pytest.raises(ValueError, match=words):
        decode(body, format, max_bytes=10**6)


def test_an_npz_may_not_unpack_to_more_than_allowed():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("request.npy", bytes(3 * 10**6))
    assert len(file.getvalue()) < 10_000
    with pytest.raises(ValueError, match="unpacks to more than 1000000"):
        decode(file.getvalue(), "npz", max_bytes=10**6)


def test_only_png_is_opened():
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "BMP")
    body = json.dumps({"samples": [{"image": base64.b64encode(file.getvalue()).decode()}]}).encode()
    with pytest.raises(ValueError, match="not an image"):
        decode(body, "json", max_bytes=10**6)


# --- the server ---


def mean(sample, *, sign=1.0):
    """The mean of the image; not scorable without one."""
    if sample.prompt.text == "fail":
        raise RuntimeError("a fault of the reward")
    if sample.prompt.text == "refuse":
        raise UserError("no such prompt")
    return None if sample.image is None else sign * float(sample.image.mean())


class Rank:
    scope = "group"

    def score(self, samples):
        order = sorted(float(s.image.mean()) for s in samples)
        return [order.index(float(s.image.mean())) for s in samples]


@pytest.fixture(scope="module")
def server():
    with running(
        RewardServer(RewardSpec(name=f"{HERE}:mean", options={"sign": -1.0}), "127.0.0.1", 0, max_bytes=10**5)
    ) as s:
        yield s


def url_of(server):
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("options", [{}, {"format": "npz"}, {"format": "npz", "pixels": "uint8"}])
def test_remote_scores_equal_local_ones(server, options):
    samples = [sample(51 / 255), sample(204 / 255, channels=1), Sample(Prompt("q", "none")), sample(0.0)]
    local = RewardSet([RewardSpec(name=f"{HERE}:mean", options={"sign": -1.0})]).score(samples)
    far = remote(url_of(server), **options)
    torch.testing.assert_close(far.score(samples), local, equal_nan=True)
    assert far.score(samples)[2].isnan()
    torch.testing.assert_close(far.score(samples[::-1]), local.flip(0), equal_nan=True)


def test_a_group_reward_may_live_elsewhere():
    with running(RewardServer(RewardSpec(name=f"{HERE}:Rank"), "127.0.0.1", 0)) as server:
        samples = [sample(level) for level in (0.9, 0.1, 0.5, 0.3)]
        scores = remote(url_of(server), scope="group").score(samples, torch.tensor([0, 0, 1, 1]))
        assert scores.flatten().tolist() == [1, 0, 1, 0]
        assert "call score() with `group`" in failure(url_of(server))


def test_faults_on_the_far_side_are_heard_here(server):
    with pytest.raises(UserError, match="refused the request: status 422: .*no such prompt"):
        remote(url_of(server)).score([sample(text="refuse")])
    scores = remote(url_of(server), retries=0).score([sample(), sample(text="fail")]).flatten()
    assert scores.isnan().tolist() == [False, True]  # a fault of the reward costs its sample, here as there
    assert not remote(url_of(server)).score([sample()]).isnan().any()  # and it goes on


def exchange(server, body, **headers):
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest("POST", "/")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.headers["Content-Type"] == JSON
    return answer.status, json.loads(text)


@pytest.mark.parametrize(
    "body, headers, status, words",
    [
        (b"{}", {"Content_Type": "application/octet-stream", "Content_Length": "2"}, 415, JSON),
        (pickle.dumps([]), {"Content_Type": "application/x-pickle", "Content_Length": "5"}, 415, NPZ),
        (b"{}", {"Content_Length": "2"}, 415, JSON),
        (b"", {"Content_Type": JSON}, 411, "Content-Length"),
        (b"", {"Content_Type": JSON, "Content_Length": "-1"}, 411, "Content-Length"),
        (b"", {"Content_Type": JSON, "Content_Length": "100001"}, 413, "at most 100000"),
        (b"{}", {"Content_Type": JSON, "Content_Length": "2"}, 400, "list of samples"),
        (b"{}", {"Content_Type": NPZ, "Content_Length": "2"}, 400, "not an npz file"),
        (b"[" * 90_000, {"Content_Type": JSON, "Content_Length": "90000"}, 400, ""),
    ],
)
def test_what_the_server_refuses(server, body, headers, status, words):
    got, answer = exchange(server, body, **headers)
    assert got == status and words in answer["error"]


def test_the_server_runs_as_a_program(tmp_path):
    """As a user starts it, with an option that must reach the reward."""
    (tmp_path / "mine.py").write_text("def length(sample, *, per=1):\n    return len(sample.response) / per\n")
    command = [sys.executable, "-m", "mmrl.rewards.services.server", "mine:length", "--option", "per=8", "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    ) as process:
        try:
            url = process.stdout.readline().split()[-1]
            assert remote(url).score([sample()]).tolist() == [[0.5]]
        finally:
            process.kill()


def test_the_program_refuses_what_it_cannot_build(capsys):
    from mmrl.rewards.services.server import main

    assert main(["jpeg_compresibility", "--port", "0"]) == 2
    assert "did you mean 'jpeg_compressibility'" in capsys.readouterr().err
    assert main(["jpeg_compressibility", "--option", "qualty=3", "--port", "0"]) == 2
    assert "did you mean 'quality'" in capsys.readouterr().err
