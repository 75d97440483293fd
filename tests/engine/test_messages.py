"""What ranks send each other is read, and never runs."""

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmrl.engine.packing import MAX_MESSAGE, check_sizes, gather_messages, pack, unpack
from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Sample

ROOT = Path(__file__).resolve().parents[2]
OF_OBJECTS = re.compile(r"\b\w*(?:_object_list|gather_object|scatter_object\w*|recv_object\w*|send_object\w*)\b")
PICKLES = re.compile(r"pickle\.loads?\(|Unpickler\(")
OF_ONE_HOST = {  # where a process opens what a process of its own, which it has started, has pickled
    "mmrl/children/forked.py",
    "mmrl/collection/prefetch.py",
}


@dataclass
class Pair:
    left: object
    right: object


def sources():
    return [path for top in ("mmrl", "tasks", "sims") for path in (ROOT / top).rglob("*.py")]


def lines_with(pattern):
    return {str(path.relative_to(ROOT)) for path in sources() if pattern.search(path.read_text())}


def test_no_collective_of_torch_that_opens_pickles_is_called():
    assert lines_with(OF_OBJECTS) == set()
    assert OF_OBJECTS.search("dist.all_gather_object(") and OF_OBJECTS.search("dist.broadcast_object_list(")


def test_pickles_are_opened_from_own_children_alone():
    assert lines_with(PICKLES) == OF_ONE_HOST


def test_what_is_there_twice_is_sent_once():
    """A group shares its prompt, whose images are large."""
    prompt = Prompt("a", "b", metadata={"pixels": torch.arange(30_000, dtype=torch.uint8), "raw": b"\x00\xff"})
    group = [Sample(prompt, response=str(number), response_length=1) for number in range(8)]
    message = pack(group)
    assert 30_000 < len(message) < 36_000
    came = unpack(message)
    assert [sample.response for sample in came] == list("01234567") and all(s.prompt is came[0].prompt for s in came)
    assert torch.equal(came[0].prompt.metadata["pixels"], prompt.metadata["pixels"])
    assert came[0].prompt.metadata["raw"] == b"\x00\xff"


def test_parts_that_are_there_again_keep_their_order():
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    inner = Pair(one, two)
    came = unpack(pack([Pair(inner, one), two, inner, Pair(two, inner)]))
    assert [float(came[0].right), float(came[1]), float(came[2].left), float(came[3].left)] == [1.0, 2.0, 1.0, 2.0]
    assert came[0].left is came[2] is came[3].right and came[0].right is came[2].left and came[1] is came[2].right


class Runs:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_a_pickle_that_another_rank_sends_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in (0, 2, 5):
        data = pickle.dumps(Runs(), protocol)
        for message in (data, len(data).to_bytes(8, "little") + data):
            with pytest.raises(ValueError):
                unpack(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    text = json.dumps({"record": ["subprocess", "Popen", {"args": "touch ran"}]}).encode()
    with pytest.raises(ValueError, match="is not one of the data classes"):
        unpack(torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8))
    assert not Path("ran").exists()


def test_what_can_not_be_sent_is_named():
    with pytest.raises(UserError, match=r"metadata, holds a builtins\.complex, which cannot be sent; set here=none$"):
        pack({"root": 1j}, "here=none")
    with pytest.raises(UserError, match="holds .* which cannot be sent; use numbers, texts, arrays or images$"):
        pack({1j, 2})


@pytest.mark.parametrize("size", [-1, MAX_MESSAGE + 1])
def test_sizes_are_bounded_before_there_is_memory_for_them(size, monkeypatch):
    with pytest.raises(UserError, match=f"rank 1 announces a message of {size} bytes"):
        check_sizes([5, size])
    calls = []

    def gather(parts, part, **how):
        calls.append(len(part))
        for slot, length in zip(parts, (len(part), size), strict=True):
            slot.fill_(length)

    monkeypatch.setattr(dist, "all_gather", gather)
    with pytest.raises(UserError, match="rank 1 announces"):
        gather_messages(pack("a"), 2, None)
    assert calls == [1]


def test_messages_of_all_ranks_come_whole(monkeypatch):
    """One shorter and one longer than this rank's."""
    messages = [pack("ab"), pack("a"), pack("a longer one")]

    def gather(parts, part, **how):
        own = [torch.tensor([len(message)]) for message in messages] if len(part) == 1 else messages
        for slot, sent in zip(parts, own, strict=True):
            slot[: len(sent)] = sent

    monkeypatch.setattr(dist, "all_gather", gather)
    assert [unpack(message) for message in gather_messages(messages[0], 3, None)] == ["ab", "a", "a longer one"]
