"""Checksums of tensors, and how they are had from an engine that packs what it is given. The engine here is a few
layers that are loaded as vLLM loads its own: staged, then processed, then copied to where kernels read them."""

import pytest
import torch
from torch import nn

from mmrl.generation.weight_sync.checksums import (
    CHUNK,
    HELD,
    PACKED,
    Checksum,
    Report,
    SentWeights,
    absent,
    checksum,
    differing,
    report,
    row_strides,
)
from mmrl.generation.weight_sync.receiver import CopyWatch, ramp

SIZE = 6


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- checksums ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_a_checksum_changes_with_any_element_and_any_place(dtype):
    values = (10 * numbers(4, 6)).to(dtype)
    whole = checksum(values)
    assert whole == checksum(values.clone()) == checksum(values.t().contiguous().t()) and whole.count == 24
    for i in range(24):
        other = values.clone()
        other.view(-1)[i] += 1
        assert not checksum(other).is_of(whole)
    assert not checksum(values.flip(0)).is_of(whole) and not checksum(values[:, [1, 0, 2, 3, 4, 5]]).is_of(whole)
    square = values[:, :4].contiguous()
    assert not checksum(square.t()).is_of(checksum(square))


def test_zeros_count_too():
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4)) and checksum(torch.zeros(3)).value != 0


def test_a_checksum_is_a_known_number():
    """That of another version could not be compared with. By hand: in integers without a bound, modulo 2^64."""
    assert checksum(torch.arange(5.0)).value == 4924024510225912999
    assert checksum(torch.tensor(1.5)) == checksum(torch.tensor([1.5]))


def test_parts_add_up_to_the_whole_wherever_they_lie():
    values = numbers(6, 8)
    whole, strides = checksum(values), row_strides(values.shape)
    rows = [checksum(values[i : i + 2], (i * 8, strides)) for i in (0, 2, 4)]
    columns = [checksum(values[:, i : i + 4].contiguous(), (i, strides)) for i in (0, 4)]
    for parts in (rows, columns):
        assert sum(parts[1:], parts[0]).is_of(whole)
        assert not parts[0].is_of(whole)
        assert sum([*parts[1:], *parts], parts[0]).is_of(whole)  # two processes have each part
        assert not sum([*parts[1:], parts[0]], parts[0]).is_of(whole)  # one part twice
    transposed = checksum(values.t(), (0, strides[::-1]))
    assert transposed == whole


def test_large_tensors_are_looked_at_in_pieces():
    values = torch.arange(2 * CHUNK + 5, dtype=torch.int32)
    third = len(values) // 3
    parts = [checksum(values[i : i + third], (i, (1,))) for i in range(0, len(values), third)]
    assert sum(parts[1:], parts[0]) == checksum(values)


def test_processes_of_an_engine_make_one_report():
    one = {"tensors": {"a": [2**64 - 1, 3, HELD], "b": [1, 1, HELD]}, "blank": ["y"], "misplaced": []}
    other = {"tensors": {"a": ["2", "3", PACKED]}, "blank": ["x", "y"], "misplaced": ["a"]}
    assert report([one, other]) == Report({"a": Checksum(1, 6, PACKED), "b": Checksum(1, 1)}, ["x", "y"], ["a"])


def test_a_tied_tensor_is_taken_under_either_name():
    ledger = SentWeights()
    head = numbers(3, 2)
    list(ledger.recorded([("embedding", head), ("head", head.clone()), ("norm", numbers(3))]))
    found = {"embedding": ledger.sent["embedding"]}
    assert absent(ledger.sent, found) == ["norm"] and differing(ledger.sent, found) == []
    assert differing(ledger.sent, {"norm": checksum(numbers(3, seed=1)), "more": checksum(head)}) == ["norm", "more"]
    list(ledger.recorded([("norm", head)]))
    assert list(ledger.sent) == ["norm"]  # of the last time alone


# --- an engine that packs ---


class Packing(nn.Module):
    """Queries, keys and values in one parameter, experts in another, a norm as it is; of processes that share them."""

    def __init__(self, rank=0, ranks=1, pack=(), dtype=torch.float32):
        super().__init__()
        self.rank, self.share, self.pack = rank, SIZE // ranks, set(pack)
        shapes = {"qkv": (3 * self.share, SIZE), "experts": (2, SIZE, SIZE), "norm": (SIZE,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        for name, parameter in self.named_parameters():
            parameter.copy_(self.packed(name, ramp(parameter)))
        self.transposes = True

    def packed(self, name, value):
        return value.flip(0).contiguous() if name in self.pack else value

    def load(self, weights):
        staged = {name: torch.empty_like(parameter) for name, parameter in self.named_parameters()}
        for name, value in weights:
            self.take(staged, name, value)
        for name, parameter in self.named_parameters():
            parameter.data.copy_(self.packed(name, staged[name]))

    def take(self, staged, name, value):
        if name in "qkv":
            rows = value.narrow(0, self.rank * self.share, self.share)
            staged["qkv"].narrow(0, "qkv".index(name) * self.share, self.share).copy_(rows)
        elif name == "experts":  # published input first
            for expert in range(2):
                staged["experts"][expert].copy_(value[expert].t() if self.transposes else value[expert])
        elif name == "norm":
            staged["norm"].copy_(value)


def weights(seed=0, dtype=torch.float32):
    shapes = {"q": (SIZE, SIZE), "k": (SIZE, SIZE), "v": (SIZE, SIZE), "experts": (2, SIZE, SIZE), "norm": (SIZE,)}
    return {n: numbers(*shape, seed=seed + i, dtype=dtype) for i, (n, shape) in enumerate(shapes.items())}


def loaded(engine, given, before=None, filled=True):
    watch = CopyWatch(before, filled=filled)
    with watch, torch.no_grad():
        engine.load(watch.watched(given.items()))
    watch.finish(engine)
    return watch


def sums(given):
    return {name: checksum(value) for name, value in given.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_packed_into_one_tensor_is_found_by_its_published_names(dtype):
    given = weights(dtype=dtype)
    found = loaded(Packing(dtype=dtype), given).checksums()
    assert found == sums(given) and {own.state for own in found.values()} == {HELD}


def test_weights_come_as_views_and_in_any_order():
    given = weights()
    together = torch.stack([given[name] for name in "qkv"])
    views = dict(zip("qkv", together, strict=True)) | {"experts": given["experts"].transpose(1, 2).contiguous().mT}
    assert loaded(Packing(), views | {"norm": given["norm"]}).checksums() == sums(given)


def test_processes_have_slices():
    given = weights()
    parts = [loaded(Packing(rank, 2), given).checksums() for rank in range(2)]
    whole = {name: parts[0][name] + parts[1][name] for name in given}
    assert differing(sums(given), whole) == [] and whole["q"].count == SIZE * SIZE
    assert whole["norm"].count == 2 * SIZE  # each has all of it
    assert differing(sums(given), parts[0]) == ["q", "k", "v"]


def test_an_engine_in_another_precision_has_what_was_sent():
    given, engine = weights(), Packing(dtype=torch.bfloat16)
    watch = loaded(engine, given)
    assert watch.checksums() == sums(given)
    engine.norm += 1
    assert differing(sums(given), watch.checksums()) == ["norm"]


def test_what_a_kernel_reads_in_a_layout_of_its_own_is_looked_at_as_it_comes():
    given = weights()
    watch = loaded(Packing(pack=["qkv"]), given)
    found = watch.checksums()
    assert differing(sums(given), found) == [] and watch.misplaced() == []
    assert {name for name, own in found.items() if own.state == PACKED} == {"q", "k", "v"}


class Shuffling(Packing):
    """It repacks in the memory in which weights came, as vLLM does with experts on a GPU."""

    def load(self, weights):
        staged = {name: torch.empty_like(parameter) for name, parameter in self.named_parameters()}
        for name, value in weights:
            self.take(staged, name, value)
        staged["qkv"].copy_(staged["qkv"].flip(0))
        for name, parameter in self.named_parameters():
            parameter.data.copy_(staged[name])


def test_a_layout_that_is_made_in_place_is_looked_at_as_it_comes():
    given = weights()
    watch = loaded(Shuffling(pack=["qkv"]), given)
    assert differing(sums(given), watch.checksums()) == [] and watch.misplaced() == []
    assert {name for name, own in watch.checksums().items() if own.state == PACKED} == {"q", "k", "v"}


@pytest.mark.parametrize("name", ["qkv", "experts", "norm"])
def test_memory_that_changes_afterwards_is_found_by_name(name):
    given, engine = weights(), Packing()
    watch = loaded(engine, given)
    engine.get_parameter(name).view(-1)[-1] += 1e-3
    assert differing(sums(given), watch.checksums()) == ["v" if name == "qkv" else name]


def test_a_tensor_that_is_not_taken_is_absent_and_its_place_blank():
    given, engine = weights(), Packing()
    sent = {("norm.weight" if name == "norm" else name): value for name, value in given.items()}
    watch = CopyWatch()
    with watch, torch.no_grad():
        staged = {name: torch.empty_like(parameter) for name, parameter in engine.named_parameters()}
        for name, value in watch.watched(sent.items()):
            engine.take(staged, name, value)
        for name in ("qkv", "experts"):
            engine.get_parameter(name).copy_(staged[name])
    watch.finish(engine)
    assert absent(sums(sent), watch.checksums()) == ["norm.weight"] and watch.blank(engine) == ["norm"]


def test_an_engine_that_packs_at_the_start_alone_is_found():
    given, engine = weights(), Packing(pack=["experts"])
    engine.pack = set()
    watch = loaded(engine, given)
    assert watch.misplaced() == ["experts"] and differing(sums(given), watch.checksums()) == []
    assert loaded(engine, weights(seed=9), watch).misplaced() == ["experts"]


def test_an_engine_that_stops_packing_is_found():
    engine = Packing(pack=["experts"])
    first = loaded(engine, weights(), filled=False)  # started with weights that nobody knows
    engine.pack = set()
    assert first.misplaced() == [] and loaded(engine, weights(seed=9), first).misplaced() == ["experts"]


def test_an_engine_that_stops_transposing_is_found():
    engine = Packing()
    first = loaded(engine, weights())
    again = loaded(engine, weights(seed=9), first)
    engine.transposes = False
    third = loaded(engine, weights(seed=18), again)
    assert (first.misplaced(), again.misplaced(), third.misplaced()) == ([], [], ["experts"])
