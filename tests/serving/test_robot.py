"""`mmrl serve` for robots, asked over websockets by hand; `test_published_clients.py` asks with openpi's own client."""

import threading
from contextlib import contextmanager

import msgpack
import numpy as np
import pytest
import torch
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from mmrl.errors import UserError
from mmrl.policies.vla.heads.codec import ActionStatistics
from mmrl.rollouts import Prompt
from mmrl.serving import robot
from mmrl.serving.arrays import pack, unpack
from mmrl.serving.observations import BadObservation, RobotReader
from mmrl.serving.robot import RobotServer
from mmrl.sims import build
from tests.policies.vla.conftest import CHUNK, backbones, make  # noqa: F401  (fixtures)
from tests.policies.vla.test_cameras import TwoCameras


class Arm(TwoCameras):
    """Two cameras, whose images follow the point; a state of the point and of its double; in units of 5."""

    state_dim = 2

    def _shown(self, moved):
        size = len(moved.state)
        state, images = moved.state, moved.images
        moved.state = np.concatenate([state[:, :1], 2 * state[:, :1]], 1)
        for i in range(size):
            level = int(100 + 40 * np.tanh(state[i, 0]))
            images[i, :, :8], images[i, :, 8:] = level, 255 - level
        return moved

    @property
    def action_bounds(self):
        return np.array([-5.0]), np.array([5.0])


def arm(rows=2):
    return build("tests.serving.test_robot:Arm", rows)


def stirred(policy, amount):
    """Changes every weight, so that actions follow images, state and noise; in a run's own units, of 0.1 and 0.2."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter += amount * torch.randn(parameter.shape, generator=generator)
    policy.normalizer = ActionStatistics(np.array([-0.2]), np.array([0.1]), np.array([True]))
    return policy


@contextmanager
def serving(policy, key=None):
    server = RobotServer(policy, "line", host="127.0.0.1", port=0, key=key)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def policy(make):  # noqa: F811
    made = make("gaussian", sim=arm(), proprioception=True, cameras=["wrist", "front"], standardise=True)
    return stirred(made, 0.3)


@pytest.fixture(scope="module")
def server(policy):
    with serving(policy, "secret") as server:
        yield server


def opened(server, key="secret", **headers):
    named = {"Authorization": f"Api-Key {key}"} | headers
    return connect(f"ws://127.0.0.1:{server.port}", compression=None, additional_headers=named)


def shown(level=100, position=0.3, **changed):
    tree = {
        "observation/front": np.full((8, 8, 3), level, np.uint8),
        "observation/wrist": np.full((8, 8, 3), 255 - level, np.uint8),
        "observation/state": np.array([position, 2 * position]),
        "prompt": "go",
    }
    return {key: value for key, value in (tree | changed).items() if value is not None}


def played(policy, seed=30):
    """An evaluation's episode by the policy's own hand: what it saw and what it did, chunk by chunk."""
    sim, record = policy.sim, []
    step = sim.step

    def noted(actions, active=None):
        seen = sim.observation()
        record.append((seen.select([0]), np.asarray(actions)[0].copy()))
        return step(actions, active)

    sim.step = noted
    try:
        policy.respond([Prompt("p", "go", metadata={"seed": seed, "task": "go"})], [0])
    finally:
        del sim.step
    return record


def test_chunks_are_those_of_an_evaluation(server, policy):
    record = played(policy)
    assert len(record) == 2
    assert np.abs(record[0][1] - record[1][1]).max() > 1e-3  # chunks that follow what is seen
    with opened(server) as robot:
        facts = unpack(robot.recv(timeout=20))
        assert facts == {
            "model": "line",
            "cameras": ["wrist", "front"],
            "image_size": [8, 8],
            "state_dim": 2,
            "action_dim": 1,
            "action_horizon": CHUNK,
        }
        for seen, actions in record:
            tree = {f"observation/{name}": seen.image(name)[0] for name in seen.cameras}
            robot.send(pack({**tree, "observation/state": seen.state[0], "prompt": seen.instructions[0]}))
            answer = unpack(robot.recv(timeout=20))
            np.testing.assert_allclose(answer["actions"], actions, rtol=0, atol=1e-6)
            assert answer["actions"].shape == (CHUNK, 1)
            assert answer["server_timing"]["infer_ms"] > 0
            assert answer["actions"].min() >= -0.2 and answer["actions"].max() <= 0.1  # the run's own statistics


@pytest.mark.parametrize("kind", ["flow", "gaussian"])
def test_noise_is_that_of_an_evaluation(make, kind):  # noqa: F811
    policy = stirred(make(kind, sim=arm(), cameras=["front"], evaluation_temperature=1.0), 0.02)
    record = played(policy)
    with serving(policy) as server:
        for number, (seen, actions) in enumerate(record):
            tree = {"observation/image": seen.image("front")[0], "state": seen.state[0], "prompt": seen.instructions[0]}
            answer = server.infer(pack(tree), number)["actions"]
            np.testing.assert_allclose(answer, actions, rtol=0, atol=1e-6)
        other = server.infer(pack(tree), 0)["actions"]  # the same observation as the first of a connection
    assert len(record) == 2 and np.abs(other - answer).max() > 1e-3


CAMERAS = ("front", "wrist")  # in the simulator's order


def test_keys_of_other_robots(policy):
    reader = RobotReader(policy)
    image = {name: np.random.default_rng(n).integers(0, 256, (8, 8, 3), np.uint8) for n, name in enumerate(CAMERAS)}
    plain = reader.read(shown(**{f"observation/{name}": one for name, one in image.items()}))
    bare = {"state": shown()["observation/state"], "prompt": "go"}
    libero = {**bare, "observation/image": image["wrist"], "observation/wrist_image": image["front"]}
    aloha = {**bare, "images": {name: one.transpose(2, 0, 1) for name, one in image.items()}}
    for tree in (libero, aloha):
        read = reader.read(tree)
        np.testing.assert_array_equal(read.images, plain.images)
        np.testing.assert_array_equal(read.state, plain.state)
    np.testing.assert_array_equal(plain.images[0], np.concatenate(list(image.values()), 1))  # as the simulator's
    assert plain.state.tolist() == [[np.float32(0.3), np.float32(0.6)]] and plain.instructions == ["go"]


def test_hidden_cameras_and_numbers_are_not_needed(make):  # noqa: F811
    reader = RobotReader(make("regression", sim=arm(), cameras=["wrist"], privileged=1))
    read = reader.read(shown(**{"observation/front": None, "observation/state": np.array([0.5])}))
    assert read.images[0, 0, :, 0].tolist() == [0] * 8 + [155] * 8
    assert read.state.tolist() == [[0.5, 0.0]]


WRONG = {
    "prompt: the instruction": {"prompt": None},
    "observation/wrist: the image of this camera is missing; there are observation/front,": {"observation/wrist": None},
    r"observation/front: an image is an array \[height, width, 3\] of uint8, not float64 \[8, 8, 3\]": {
        "observation/front": np.zeros((8, 8, 3))
    },
    r"trained on images of 8 x 8 x 3, not of 9 x 8 x 3; send image_tools.resize_with_pad\(image, 8, 8\)": {
        "observation/front": np.zeros((9, 8, 3), np.uint8)
    },
    r"state is 2 numbers, not float64 \[3\]": {"observation/state": np.zeros(3)},
    "state is 2 numbers, not missing": {"observation/state": None},
    "observation/state: number 1 is nan": {"observation/state": np.array([0.0, np.nan])},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_observation_that_does_not_fit_is_told_by_its_key(policy, message):
    with pytest.raises(BadObservation, match=message) as caught:
        RobotReader(policy).read(shown(**WRONG[message]))
    assert "\n" not in str(caught.value)


def array(data=b"\0" * 8, dtype="<f8", shape=(1,)):
    return msgpack.packb({b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape})


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        pack({"a": 1})[:-1],
        array(dtype="|O"),
        array(dtype="<f16"),
        array(dtype="f8,f8"),
        array(dtype="<M8[s]"),
        array(data=b"\0" * 7),
        array(shape=(-1,)),
        array(shape=(2,)),
        array(data="text"),
        pack([1]) + b"\0",
        b"\x91" * 5000,
    ],
)
def test_a_message_that_can_not_be_read_is_answered_and_the_next_one_too(server, data):
    with opened(server) as robot:
        robot.recv(timeout=20)
        robot.send(data)
        answer = robot.recv(timeout=20)
        assert isinstance(answer, str) and answer.startswith("the message cannot be read") and "\n" not in answer
        robot.send(pack(shown()))
        assert unpack(robot.recv(timeout=20))["actions"].shape == (CHUNK, 1)


def test_text_is_no_message(server):
    with opened(server) as robot:
        robot.recv(timeout=20)
        robot.send("{}")
        assert robot.recv(timeout=20) == "a message must be msgpack, not text"


def test_arrays_come_back_as_they_went():
    tree = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": [np.float32(0.5), "x"], "c": np.zeros((0, 3))}
    read = unpack(pack(tree))
    np.testing.assert_array_equal(read["a"], tree["a"])
    assert read["a"].dtype == np.int16 and read["b"] == [0.5, "x"] and read["c"].shape == (0, 3)
    with pytest.raises(TypeError, match="neither a number"):
        pack({"a": np.array([None])})


def test_the_door(server):
    for headers, status in (({"key": "wrong"}, 401), ({"Origin": "http://x"}, 403)):
        with pytest.raises(InvalidStatus) as caught, opened(server, **headers):
            pass
        assert caught.value.response.status_code == status


def test_actions_that_are_not_finite_do_not_reach_the_robot(policy, server, monkeypatch):
    monkeypatch.setattr(policy, "act", lambda *a: np.full((1, CHUNK, 1), np.nan))
    with pytest.raises(BadObservation, match="not finite"):
        server.infer(pack(shown()), 0)


def test_a_failure_costs_its_request(policy, server, monkeypatch):
    with opened(server) as robot:
        robot.recv(timeout=20)
        with monkeypatch.context() as patch:
            patch.setattr(policy, "act", lambda *a: 1 / 0)
            robot.send(pack(shown()))
            assert robot.recv(timeout=20) == "ZeroDivisionError('division by zero')"
        robot.send(pack(shown()))
        assert isinstance(robot.recv(timeout=20), bytes)


def test_an_address_in_use_is_one_line(policy, server):
    with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{server.port}"):
        robot.serve(policy, "line", host="127.0.0.1", port=server.port, key=None)
