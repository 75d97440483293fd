"""What goes between a process and its children arrives to the bit, and can not run anything."""

import json
import math
import pickle
import subprocess
import sys
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.children import frames
from mmrl.children.frames import decode, encode
from mmrl.rollouts import Column, Message, Prompt, Rollouts, Sample, Video
from mmrl.workers.worker import shared_objects


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
        "raw": b"\x00\xff",
        ("b", 1): np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        "c": np.float32(0.3),
    }
    came = decode(encode(given))
    assert list(came) == list(given) and came["a"] == given["a"] and type(came["a"]) is tuple
    assert came["raw"] == given["raw"] and type(came["raw"]) is bytes
    assert came[3] == given[3] and math.copysign(1, came[3][2]) == -1
    array = came["b", 1]
    assert array.dtype == np.int16 and array.tolist() == [[0, 2], [3, 5]]
    assert type(came["c"]) is np.float32 and came["c"] == np.float32(0.3)
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 11, 27, 13, 5, 59, 123456, timezone(timedelta(hours=2))),
        datetime(2026, 11, 27),
        date(2024, 2, 29),
        time(23, 59, 1),
        Decimal("-1.50"),
        {"red", "blue"},
        frozenset({(1, date(2026, 1, 2)), ()}),
    ],
    ids=["zoned", "datetime", "date", "time", "decimal", "set", "frozenset"],  # a set's own text differs by process
)
def test_values_of_tables_arrive_as_they_were(value):
    """As metadata of rows from Parquet files and data sets hold them, alone and within other values."""
    for sent in (value, [value, value], {"column": (value,)}):
        came = decode(encode(sent, repeats=True), repeats=True)
        assert came == sent and repr(type(came)) == repr(type(sent))
    assert type(decode(encode(value))) is type(value)


@pytest.mark.parametrize(
    "tree", [{"datetime": "no day"}, {"date": 3}, {"decimal": "ten"}, {"set": [["a"]]}, {"set": 1}]
)
def test_forged_values_of_tables_are_one_kind_of_error(tree):
    text = json.dumps(tree).encode()
    with pytest.raises(ValueError):
        decode(len(text).to_bytes(frames.LENGTH, "little") + text)


@pytest.mark.parametrize("mode", frames.MODES)
def test_images_arrive_to_the_bit(mode):
    image = Image.new("L", (5, 3))
    image.putdata(range(0, 150, 10))
    image = image.convert(mode)
    came = decode(encode(image))
    assert came.mode == mode and came.size == (5, 3) and came.tobytes() == image.tobytes()


def test_records_arrive_and_share_what_both_sides_hold():
    image = Image.new("RGB", (2, 2))
    prompts = [Prompt("a", "of a", (image,), metadata={"seed": 1 << 31}), Prompt("b", "of b")]
    asked = decode(encode({"prompts": prompts}))["prompts"]
    assert asked[0].metadata == {"seed": 1 << 31} and asked[0].images[0].tobytes() == image.tobytes()
    made = Rollouts(
        [Sample(asked[1]), Sample(asked[0], image=torch.ones(1, 2, 2))],
        [Own((asked[0].images[0],), {"x": torch.tensor([1.0])}), None],
        torch.tensor([0, 1]),
        torch.ones(2, 3, dtype=torch.bool),
        extras={"column": Column(torch.tensor([2.0, 3.0]))},
    )
    message = encode(made, shared_objects(asked))
    came = decode(message, shared_objects(prompts))
    assert came.samples[0].prompt is prompts[1] and came.samples[1].prompt is prompts[0]
    assert came.inputs[0].part[0] is image and came.inputs[0].more["x"].tolist() == [1.0] and came.inputs[1] is None
    assert came.extras["column"].values.tolist() == [2.0, 3.0] and came.rewards is None and came.mask.all()
    assert len(message) < len(encode(made)), "a prompt that both have is not sent again"


@pytest.mark.parametrize("value", [1j, bytearray(b"x"), len, object(), torch.Size([1]), np.array([object()]), Own])
def test_anything_else_is_not_sent(value):
    with pytest.raises(TypeError):
        encode({"x": value})


def test_an_image_with_a_palette_is_not_sent():
    with pytest.raises(TypeError, match="mode P"):
        encode(Image.new("P", (1, 1)))


@pytest.mark.parametrize("module, name", [("subprocess", "Popen"), ("no.such.module", "Own"), ("os", "sep")])
def test_nothing_but_known_records_is_made(module, name):
    own = f'["{__name__}", "Own"'.encode()
    message = encode(Own((), {}))
    assert own in message
    forged = message.replace(own, f'["{module}", "{name}"'.encode())
    forged = len(forged[8:].rstrip()).to_bytes(8, "little") + forged[8:].rstrip()
    with pytest.raises(ValueError, match="not one of the data classes"):
        decode(forged)
    with pytest.raises(ValueError):
        decode(pickle.dumps(1))


def test_of_one_that_nobody_vouches_for_only_some_records_are_made():
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    message = encode([Message("user", ("a", Video((image,), 3.0)))])
    (came,) = decode(message, records=(Message, Video))
    assert came.role == "user" and came.parts[0] == "a" and came.parts[1].fps == 3.0
    assert came.parts[1].frames[0].tobytes() == bytes([1, 2, 3, 1, 2, 3])
    for records in ((), (Message,)):
        with pytest.raises(ValueError, match="mmrl.rollouts:(Message|Video) is not one of the data classes"):
            decode(message, records=records)


FORGED = [
    {"image": ["RGB", [-1, -1], 0, 8]},
    {"image": ["CMYK", [1, 2], 0, 8]},
    {"array": ["|O", [1], 0, 8]},
    {"array": ["<f8", [3], 0, 8]},
    {"array": ["no dtype", [1], 0, 8]},
    {"tensor": ["float32", [3], 0, 8]},
    {"tensor": ["__name__", [1], 0, 8]},
    {"tensor": ["no dtype", [1], 0, 8]},
    {"array": ["<f8", [1], "0", 8]},
    {"shared": 0},
    {"dict": [[[], 1]]},
    {"dict": [1]},
    {"tuple": 1},
    {"record": ["mmrl.rollouts", "Message", {"roll": "user"}]},
    {"record": [[], {}, 1]},
    {"unheard": 1},
    {"list": 1, "tuple": 1},
    {},
]


@pytest.mark.parametrize("tree", FORGED, ids=str)
def test_what_nobody_would_send_is_one_kind_of_error(tree):
    text = json.dumps(tree).encode()
    with pytest.raises(ValueError):
        decode(len(text).to_bytes(8, "little") + text + bytes(8))


def test_no_room_is_made_for_an_image_that_is_not_there():
    text = json.dumps({"image": ["RGB", [1 << 16, 1 << 16], 0, 8]}).encode()  # 12 GiB, of which eight bytes are there
    with pytest.raises(ValueError, match=r"^8 bytes are not an image of mode RGB and size \[65536, 65536\]$"):
        decode(len(text).to_bytes(8, "little") + text + bytes(8))


def test_neither_depth_nor_length_is_another():
    deep = b"[" * 100_000 + b"]" * 100_000
    for text, size in ((deep, len(deep)), (b"[1]", 2), (b"\xff", 1), (b"", 0)):
        with pytest.raises(ValueError):
            decode(size.to_bytes(8, "little") + text)
    with pytest.raises(ValueError):
        decode(b"")


def test_arrays_lie_in_the_message_itself():
    message = bytearray(encode({"a": np.arange(4.0), "b": np.empty((2, 0), np.float32)}))
    came = decode(message)
    message[-8:] = bytes(8)
    assert came["a"].tolist() == [0, 1, 2, 0] and came["b"].shape == (2, 0) and came["b"].dtype == np.float32


def test_arrays_need_neither_torch_nor_pillow():
    """An interpreter that runs a simulator may lack both."""
    words = """
import sys
class Lacking:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "PIL", "pydantic"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Lacking)
import numpy as np
import mmrl.sims.vector.service
from mmrl.children.frames import decode, encode
assert decode(encode({"a": np.ones(2)}))["a"].sum() == 2
try:
    encode(object())
except TypeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.stdout == "a builtins.object\n", done.stderr
