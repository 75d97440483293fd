"""`mmrl serve`, asked by OpenAI's own client and by hand."""

import base64
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.errors import UserError
from mmrl.policies.vlm.policy import VisionLanguagePolicy
from mmrl.rollouts import Message, Prompt
from mmrl.serving.chat import BadRequest, ChatServer, parse_messages
from tests.helpers.pages import ROOT
from tests.helpers.tiny_models import build

LONGEST = 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = build("qwen2_5_vl", tmp_path_factory.mktemp("served") / "model")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return VisionLanguagePolicy(model, AutoProcessor.from_pretrained(path), max_response_length=LONGEST)


@pytest.fixture(scope="module")
def server(policy):
    with ChatServer(policy, "tiny", LONGEST, host="127.0.0.1", port=0, key="secret") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def image(color):
    return Image.new("RGB", (32, 32), color)


def url(color):
    file = io.BytesIO()
    image(color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def asked(color, text="What digit?"):
    return [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url(color)}}, {"type": "text", "text": text}],
        }
    ]


def direct(policy, color, text="What digit?", seed=0, temperature=0.0, limit=LONGEST):
    prompt = Prompt("p", "", messages=(Message("user", (image(color), text)),))
    return policy.rollout([prompt], 1, [seed], temperature=temperature, max_response_length=limit).samples[0]


def linked(address):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": address}]}]


def post(server, body, path="/v1/chat/completions", key="secret", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    named = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **headers}
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), named)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_the_published_client_gets_what_the_policy_says(server, policy):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="secret", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    answers = {}
    for color in ("red", "blue"):
        given = client.chat.completions.create(model="tiny", messages=asked(color), temperature=0)
        expected = direct(policy, color)
        assert given.choices[0].message.content == expected.response
        assert given.choices[0].finish_reason == ("length" if expected.truncated else "stop")
        answers[color] = given.choices[0].message.content
    drawn = client.chat.completions.create(
        model="tiny", messages=asked("red"), temperature=1.0, seed=7, n=3, max_tokens=4
    )
    said = [choice.message.content for choice in drawn.choices]
    assert said == [direct(policy, "red", seed=7 + i, temperature=1.0, limit=4).response for i in range(3)]
    assert len(set(said)) > 1
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_conversation_is_read_in_order(server, policy):
    messages = [
        {"role": "developer", "content": "Be short."},
        *asked("red"),
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "Are you sure?"},
    ]
    roles = [(message.role, message.text) for message in parse_messages(messages)]
    assert roles == [
        ("system", "Be short."),
        ("user", "What digit?"),
        ("assistant", "seven"),
        ("user", "Are you sure?"),
    ]
    assert parse_messages(messages)[1].parts[0].getpixel((0, 0)) == (255, 0, 0)
    status, answer = post(server, {"messages": messages, "temperature": 0})
    prompt = Prompt("p", "", messages=parse_messages(messages))
    assert status == 200
    assert (
        answer["choices"][0]["message"]["content"]
        == policy.rollout([prompt], 1, [0], temperature=0.0).samples[0].response
    )


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, r"messages\[0\]: expected an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, r"messages\[0\].content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "role assistant; it must be of a user or a tool"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, r"content\[0\]: expected a part"),
        ({"messages": linked({"url": "http://x/a.png"})}, 400, "nothing is fetched"),
        ({"messages": linked("file:///etc/passwd")}, 400, "nothing is fetched"),
        ({"messages": linked("data:image/png;base64,xx")}, 400, r"content\[0\]"),
        ({"model": "other"}, 404, "no model 'other'"),
        ({"stream": True}, 400, "stream"),
        ({"tools": [{}]}, 400, "tools is not supported"),
        ({"n": 0.5}, 400, "n must be a number from 1 to 64"),
        ({"n": 65}, 400, "n must be a number from 1 to 64"),
        ({"max_tokens": LONGEST + 1}, 400, f"max_tokens must be a number from 1 to {LONGEST}"),
        ({"temperature": -1}, 400, "temperature must be"),
        ({"temperature": "hot"}, 400, "temperature must be"),
        ({"seed": True}, 400, "seed must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_told_with_its_field(server, change, status, message):
    given, answer = post(server, {"messages": [{"role": "user", "content": "x"}]} | change)
    assert given == status
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer["error"]["message"])


def test_the_door(server):
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
    assert post(server, body)[0] == 200
    assert post(server, body, key="wrong")[0] == 401 and post(server, body, key="")[0] == 401
    assert post(server, body, Origin="http://elsewhere")[0] == 403
    assert post(server, body, path="/v1/embeddings")[0] == 404
    assert (
        post(server, b"{broken")[0] == 400 and post(server, b"[" * 100000)[0] == 400 and post(server, b"[]")[0] == 400
    )
    assert post(server, body, **{"Content-Length": str(1 << 40)})[0] == 413
    assert post(server, body)[0] == 200  # and it goes on


def test_a_policy_that_refuses_says_why():
    class Refusing:
        evaluation_temperature = 0.0

        def rollout(self, *_, **__):
            raise UserError("the prompt is too long")

    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    with (
        ChatServer(Refusing(), "m", 4, host="127.0.0.1", port=0) as server,
        pytest.raises(BadRequest, match="too long"),
    ):
        server.complete(body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "may be reached from other machines, so an API key is needed"),
        (["--key-env", "NO_SUCH_KEY"], "this environment variable is not set"),
    ],
)
def test_an_open_door_needs_a_key(arguments, message):
    from mmrl.cli.main import main

    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", out := io.StringIO())
        main(["serve", "runs/none", *arguments])
    assert message in out.getvalue()


@pytest.mark.slow
def test_a_run_is_served(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "THE_KEY": "k"}
    command = [sys.executable, "-m", "mmrl"]
    sizes = ["steps=1", "evaluation.prompts=4", "rollout.prompts=2", f"run_dir={tmp_path / 'run'}"]
    recipe = ROOT / "configs/vlm/visual_qa_digits.yaml"
    build = ["model.warm_start=null", "model.build=mmrl.tasks.visual_qa.tiny.model:build"]
    subprocess.run([*command, "train", str(recipe), *build, *sizes], check=True, env=environment, timeout=250)
    serving = [*command, "serve", str(tmp_path / "run"), "--port", "0", "--key-env", "THE_KEY"]
    with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True, env=environment) as process:
        line = next(line for line in process.stdout if "serves 'run'" in line)
        port = int(line.split("/v1")[0].rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"messages": [{"role": "user", "content": "7?"}]})
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer k"})
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
