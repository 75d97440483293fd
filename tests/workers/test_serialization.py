"""What goes between the trainer and its workers arrives to the bit, and can not run anything."""

import math
import pickle
import socket
import threading
from dataclasses import dataclass
from multiprocessing import AuthenticationError

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.rollouts import Column, Prompt, Rollouts, Sample
from mmrl.workers import serialization
from mmrl.workers.rendezvous import Door, dial, linked
from mmrl.workers.serialization import decode, encode, objects_of


@dataclass
class Own:
    part: tuple
    more: dict


TENSORS = [
    torch.tensor([[1.5, math.nan, -math.inf]]),
    torch.arange(6).view(2, 3).T,
    torch.tensor([True, False, True]),
    torch.tensor(3.25, dtype=torch.float64),
    torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    torch.empty(0, 4),
    torch.tensor([[1], [255]], dtype=torch.uint8),
]


@pytest.mark.parametrize("values", TENSORS, ids=lambda values: str(values.dtype))
def test_tensors_arrive_to_the_bit(values):
    came = decode(encode([torch.ones(3, dtype=torch.uint8), values]))[1]
    assert came.dtype == values.dtype and came.shape == values.shape
    assert torch.equal(came.nan_to_num(7), values.nan_to_num(7)) and torch.equal(came.isnan(), values.isnan())
    came.zero_()  # what came may be written into


def test_plain_values_and_arrays_arrive_as_they_were():
    given = {
        "a": (1, 2.5, None, True, "ö"),
        3: [math.inf, 0.1 + 0.2, -0.0],
        ("b", 1): np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        "c": np.float32(0.3),
    }
    came = decode(encode(given))
    assert list(came) == list(given) and came["a"] == given["a"] and type(came["a"]) is tuple
    assert came[3] == given[3] and math.copysign(1, came[3][2]) == -1
    array = came["b", 1]
    assert array.dtype == np.int16 and array.tolist() == [[0, 2], [3, 5]]
    assert type(came["c"]) is np.float32 and came["c"] == np.float32(0.3)
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("mode", serialization.MODES)
def test_pictures_arrive_to_the_bit(mode):
    picture = Image.new("L", (5, 3))
    picture.putdata(range(0, 150, 10))
    picture = picture.convert(mode)
    came = decode(encode(picture))
    assert came.mode == mode and came.size == (5, 3) and came.tobytes() == picture.tobytes()


def test_records_arrive_and_share_what_both_sides_hold():
    picture = Image.new("RGB", (2, 2))
    prompts = [Prompt("a", "of a", (picture,), metadata={"seed": 1 << 31}), Prompt("b", "of b")]
    asked = decode(encode({"prompts": prompts}))["prompts"]
    assert asked[0].metadata == {"seed": 1 << 31} and asked[0].images[0].tobytes() == picture.tobytes()
    made = Rollouts(
        [Sample(asked[1]), Sample(asked[0], image=torch.ones(1, 2, 2))],
        [Own((asked[0].images[0],), {"x": torch.tensor([1.0])}), None],
        torch.tensor([0, 1]),
        torch.ones(2, 3, dtype=torch.bool),
        extras={"column": Column(torch.tensor([2.0, 3.0]))},
    )
    message = encode(made, objects_of(asked))
    came = decode(message, objects_of(prompts))
    assert came.samples[0].prompt is prompts[1] and came.samples[1].prompt is prompts[0]
    assert came.inputs[0].part[0] is picture and came.inputs[0].more["x"].tolist() == [1.0] and came.inputs[1] is None
    assert came.extras["column"].values.tolist() == [2.0, 3.0] and came.rewards is None and came.mask.all()
    assert len(message) < len(encode(made)), "a prompt that both have is not sent again"


@pytest.mark.parametrize("value", [{1}, b"x", len, object(), torch.Size([1]), np.array([object()]), Own])
def test_anything_else_is_not_sent(value):
    with pytest.raises(TypeError):
        encode({"x": value})


def test_a_picture_with_a_palette_is_not_sent():
    with pytest.raises(TypeError, match="mode P"):
        encode(Image.new("P", (1, 1)))


@pytest.mark.parametrize("module, name", [("subprocess", "Popen"), ("no.such.module", "Own"), ("os", "sep")])
def test_nothing_but_known_records_is_made(module, name):
    own = f'["{__name__}", "Own"'.encode()
    message = encode(Own((), {}))
    assert own in message
    forged = message.replace(own, f'["{module}", "{name}"'.encode())
    forged = len(forged[8:].rstrip()).to_bytes(8, "little") + forged[8:].rstrip()
    with pytest.raises(ValueError, match="no record"):
        decode(forged)
    with pytest.raises((ValueError, KeyError)):
        decode(pickle.dumps(1))


# --- the door ---


def test_only_who_has_the_key_comes_in():
    door = Door("127.0.0.1")
    silent = socket.create_connection(door.address)  # it keeps nobody waiting
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        dial(*door.address, "another key", "0-1")
    callers = [threading.Thread(target=dial, args=(*door.address, door.key, name)) for name in ("0-2", "1-1")]
    for caller in callers:
        caller.start()
    assert door.fetch("0-1", 0.3) is None
    assert door.fetch("1-1", 10) is not None and door.fetch("0-2", 10) is not None and door.fetch("0-2", 0) is None
    silent.close()
    door.close()
    with pytest.raises(OSError):
        socket.create_connection(door.address)


def test_large_messages_pass():
    ours, theirs = (linked(one) for one in _pair())
    message = encode(torch.arange(1 << 20))
    sender = threading.Thread(target=ours.send_bytes, args=(message,))
    sender.start()
    assert torch.equal(decode(theirs.recv_bytes()), torch.arange(1 << 20))
    sender.join()


def _pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        return caller, server.accept()[0]
