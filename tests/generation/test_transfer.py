"""Weights that are broadcast: packed, announced, received by several servers at once, and given again to one that
missed them. Servers are stand-ins with the receiving half of the real ones."""

import json
import re
import threading
import time
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from pydantic import ValidationError
from torch.distributed import TCPStore

from mmrl.errors import UserError
from mmrl.generation.settings import VLLMServer
from mmrl.generation.vllm import client
from mmrl.generation.vllm.engine import EngineOptions
from mmrl.generation.vllm.servers import Servers
from mmrl.generation.weight_sync import buckets, nccl, transfer
from mmrl.generation.weight_sync.buckets import ALIGNED, Bucket, packed, read_header, unpacked
from mmrl.generation.weight_sync.checksums import SentWeights, absent, differing
from mmrl.generation.weight_sync.nccl import GLOO, BroadcastGroup, BroadcastTimeout, Receiver, Rendezvous
from tests.whole_runs.stand_in_server import serving
from tests.whole_runs.vllm_workers import needs_vllm

# --- buckets ---


def numbers(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(10).to(dtype)


MIXED = {
    "half": numbers(0, 3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "wide": numbers(1, 5, 7),
    "turned": numbers(2, 4, 6).t(),
    "double": numbers(3, 3, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
    "bytes": torch.arange(5, dtype=torch.int8),
}


@pytest.mark.parametrize("size", [1, 64, 100, 2**20])
def test_what_comes_out_of_buckets_is_what_went_in(size):
    made = [(bucket.header(), bucket.payload) for bucket in packed(MIXED.items(), size)]
    found = dict(pair for header, payload in made for pair in unpacked(read_header(header), payload))
    assert list(found) == list(MIXED)
    for name, value in MIXED.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_a_header_tells_names_types_and_shapes_and_tensors_start_at_multiples():
    (bucket,) = packed([("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.full((2, 2), 2.0))])
    assert json.loads(bucket.header()) == [["a", "bfloat16", [3]], ["b", "float32", [2, 2]]]
    assert len(bucket.payload) == ALIGNED + 16
    assert bucket.payload[:6].view(torch.bfloat16).tolist() == [1.0] * 3 and not bucket.payload[6:ALIGNED].any()
    assert bucket.payload[ALIGNED:].view(torch.float32).tolist() == [2.0] * 4


def test_small_tensors_share_a_bucket_and_a_large_one_has_its_own():
    sizes = [16, 32, 16, 200, 16]  # bytes
    weights = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    found = [[entry.name for entry in bucket.entries] for bucket in packed(weights, 64)]
    assert found == [["0", "1", "2"], ["3"], ["4"]]
    assert buckets.SIZE == 64 * 2**20


def test_a_bucket_is_made_when_it_is_asked_for():
    """Under ZeRO-3 a module is gathered then, on all ranks."""
    taken = []

    def weights():
        for i in range(6):
            taken.append(i)
            yield str(i), torch.zeros(16, dtype=torch.uint8)

    made = packed(weights(), 32)
    assert taken == []
    next(made)
    assert taken == [0, 1, 2]  # one more, which did not fit
    next(made)
    assert taken == [0, 1, 2, 3, 4]


# --- servers ---


def broadcasting(folder, running, said=None, timeout=20.0, gather=lambda value: [value]):
    addresses = [f"http://127.0.0.1:{server.server_port}" for server in running]
    return Servers(
        folder,
        EngineOptions(context=16, settings=VLLMServer(addresses=addresses, timeout=timeout, transfer="broadcast")),
        describe=lambda path: None,
        gather=gather,
        say=(said if said is not None else []).append,
    )


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two servers and what is said of them; buckets are of a few tensors."""
    monkeypatch.setattr(transfer, "packed", partial(packed, size=64))
    monkeypatch.setattr(client, "PAUSE", 0.05)
    with ExitStack() as stack:
        running, said = [stack.enter_context(serving()) for _ in range(2)], []
        made = broadcasting(tmp_path, running, said)
        yield made, running, said
        made.close()


def weights(version):
    return {f"{i}": numbers(100 * version + i, 3, 4) for i in range(5)}


def given(made, version):
    """Loads them, and tells what each server lacks or has otherwise."""
    ledger = SentWeights()
    made.load(ledger.recorded(weights(version).items()))
    reports = [report.tensors for report in made.arrived()]
    return [absent(ledger.sent, found) + differing(ledger.sent, found) for found in reports]


def test_all_servers_have_each_version_through_one_group(two):
    made, running, said = two
    names = []
    for version in range(3):
        assert given(made, version) == [[], []]
        names.append([server.receiver.group.rendezvous.name for server in running])
    assert len({name for pair in names for name in pair}) == 1 and said == []
    assert [server.receiver.group.rank for server in running] == [1, 2]
    assert [server.version for server in running] == [made.current.version] * 2
    assert sum(len(bucket.entries) for bucket in made.transfer.last_sent) == 5
    assert not list(made.exchange.path.rglob("*.safetensors")) and made.transfer.stores["127.0.0.1"].num_keys() < 20


def test_a_tensor_that_changes_on_its_way_is_found_by_name(two, monkeypatch):
    made = two[0]
    assert given(made, 0) == [[], []]

    def damaged(*arguments):
        for bucket in packed(*arguments, size=64):
            changed = bucket.payload.clone()
            if any(entry.name == "3" for entry in bucket.entries):
                changed[-1] ^= 1  # the last byte of the last tensor
            yield Bucket(bucket.entries, changed)

    monkeypatch.setattr(transfer, "packed", damaged)
    assert given(made, 1) == [["3"], ["3"]]


def forgets(server):
    """As one that was started again."""
    server.receiver.leave()
    server.receiver, server.tensors, server.version = None, None, "none"


def test_a_server_that_was_started_again_is_in_the_next_broadcast(two):
    made, running, said = two
    given(made, 0)
    before = running[1].receiver.group.rendezvous.name
    forgets(running[0])
    assert given(made, 1) == [[], []] and said == []
    assert running[0].receiver.group.rendezvous.name == running[1].receiver.group.rendezvous.name != before


def test_one_that_was_started_again_between_broadcasts_gets_what_was_sent_last(two):
    """The trained weights may have moved on; the trainer has a copy."""
    made, running, said = two
    given(made, 0)
    ledger = SentWeights()
    values = weights(1)
    made.load(ledger.recorded(values.items()))
    for value in values.values():
        value.zero_()
    forgets(running[0])
    made.servers[0].suspect = True
    made._refresh(made.servers[0], lambda: True)
    reports = [report.tensors for report in made.arrived()]
    assert [differing(ledger.sent, found) for found in reports] == [[], []]
    assert absent(ledger.sent, reports[0]) == [] and running[0].version == made.current.version
    assert running[0].receiver.group.rendezvous.size == 2  # a group of its own
    assert given(made, 2) == [[], []] and said == []
    assert running[0].receiver.group.rendezvous.size == 3


def test_a_server_that_is_lost_in_the_middle_costs_no_weights(two, monkeypatch):
    """The iterator was begun, and can not be begun again."""
    made, running, said = two
    given(made, 0)
    calls = []

    def breaks(entries, payload):
        calls.append(entries)
        if len(calls) == 4:
            raise RuntimeError("no memory")
        return unpacked(entries, payload)

    monkeypatch.setattr(nccl, "unpacked", breaks)
    started = time.monotonic()
    assert given(made, 1) == [[], []]
    assert len(said) == 1 and said[0].startswith("the broadcast of weights failed")
    assert time.monotonic() - started < 10


def test_a_server_that_keeps_silent_is_named_in_time(tmp_path):
    with serving() as one, serving("takes part in no broadcast") as other:
        made = broadcasting(tmp_path, [one, other], timeout=5.0)  # by when the other one has come
        started = time.monotonic()
        with pytest.raises(
            UserError,
            match=rf"server at http://127.0.0.1:{other.server_port} did not receive all weights that were broadcast "
            r"within rollout.generator.timeout=5 s; it received 0 buckets; .* connect to 127.0.0.1:\d+$",
        ):
            made.load(weights(0).items())
        assert 4.9 < time.monotonic() - started < 9


def test_a_server_that_falls_silent_in_the_middle_is_named_with_what_it_has(two, monkeypatch):
    made, running, said = two
    given(made, 0)
    made.transfer.timeout = made.servers[0].timeout = made.servers[1].timeout = 1.5
    real = BroadcastGroup.broadcast

    class Never:
        def is_completed(self):
            return False

    def stuck(group, payload, until):
        work = real(group, payload, until)
        parts = nccl.num_received(group, made.current.base, 2)
        return Never() if group.rank == 0 and parts >= 2 else work

    monkeypatch.setattr(BroadcastGroup, "broadcast", stuck)
    with pytest.raises(UserError, match=r"did not receive all weights .* rollout.generator.timeout=1.5 s; it received"):
        made.load(weights(1).items())
    until = time.monotonic() + 10
    while running[0].receiver.group is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert running[0].receiver.group is None  # nobody waits for rank 0 any more


def test_a_refusal_ends_the_run_and_all_weights_are_taken_from_the_iterator(tmp_path):
    with serving() as server:
        server.key = "another"
        made = broadcasting(tmp_path, [server])
        parts = iter(weights(0).items())
        with pytest.raises(UserError, match="asks for an API key"):
            made.load(parts)
        assert next(parts, None) is None  # other ranks gather them too


def test_other_ranks_take_part_in_gathering_alone_and_wait_for_rank_0(tmp_path):
    made = broadcasting(tmp_path, [])
    made.rank = made.transfer.rank = 1
    parts = iter(weights(0).items())
    made.load(parts)
    assert next(parts, None) is None and made.transfer.stores == {} and not list(tmp_path.iterdir())
    with pytest.raises(client.LOST, match="rank 0 has not sent"):
        made.transfer.give(None, made.current)


def test_engines_start_without_weights_from_a_folder_that_holds_no_others(tmp_path, monkeypatch):
    made = broadcasting(tmp_path, [])
    made.transfer.describe = lambda path: (path / "config.json").write_text("{}") and None
    made.transfer.prepare(iter(()), made.current)
    folder = made.transfer.model(made.current)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert made.transfer.arguments()["load_format"] == "mmrl_unloaded"
    made.close()
    assert list(tmp_path.iterdir()) == []


@needs_vllm
def test_servers_that_are_started_here_are_told_to_wait_for_their_weights(tmp_path):
    made = Servers(
        tmp_path,
        EngineOptions(context=16, settings=VLLMServer(transfer="broadcast")),
        describe=lambda path: None,
        gather=lambda value: [value],
    )
    said = made.processes[0].arguments(tmp_path, "127.0.0.1", 1)
    assert said[said.index("--load-format") + 1] == "mmrl_unloaded"
    assert said.count("--worker-extension-cls") == 1
    assert said[said.index("--worker-extension-cls") + 1] == "mmrl.generation.weight_sync.dummy_loader.UnloadedArrival"
    made.close()


def test_the_meeting_place_is_an_address_that_other_hosts_reach(monkeypatch):
    own = {"127.0.0.1": "127.0.0.1", "here": "127.0.0.1", "far": "10.0.0.7", "further": "10.1.0.7"}
    monkeypatch.setattr(nccl, "local_address", own.__getitem__)
    assert transfer.reachable_address(["http://127.0.0.1:1", "http://here:2"]) == "127.0.0.1"
    assert transfer.reachable_address(["http://here:1", "http://far:2", "https://further:3"]) == "10.0.0.7"


def test_this_host_knows_its_address():
    assert nccl.local_address("127.0.0.1") == "127.0.0.1" == nccl.local_address("127.0.0.2").replace("0.2", "0.1")


@pytest.mark.parametrize(("key", "value"), [("transfer", "network"), ("transfer", None)])
def test_there_are_two_ways(key, value):
    with pytest.raises(ValidationError, match=r"'folder' or 'broadcast'"):
        VLLMServer(**{key: value})


# --- a member ---


def test_a_member_that_waits_gives_up_when_the_trainer_does_or_is_gone():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Rendezvous("127.0.0.1", store.port, "g", 2, GLOO, 2.0)
    trainer, worker = BroadcastGroup(meeting, 0, store), Receiver()
    joining = threading.Thread(target=worker.join, args=(nccl.rendezvous_arguments(meeting), 1))
    joining.start()
    while trainer.absent():
        time.sleep(0.01)
    trainer.form()
    joining.join()
    assert worker.standing() == {"device": worker.standing()["device"], "group": "g", "base": None}
    nccl.publish_end(trainer, "w", 0, nccl.ABORTED)
    with pytest.raises(RuntimeError, match="aborted"):
        next(worker.weights("w"))
    (bucket,) = packed([("a", torch.ones(2))])
    nccl.publish_header(trainer, "v", 0, bucket)
    with pytest.raises((BroadcastTimeout, RuntimeError)):
        next(worker.weights("v"))  # announced, and never sent
    trainer.leave()
    worker.leave()
    worker.leave()
    assert re.match("None", str(worker.standing()["group"]))
