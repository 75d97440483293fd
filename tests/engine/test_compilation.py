"""Blocks that torch.compile compiles for the passes of the engine: which ones, when, and what stays as it was."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmrl.config import configure
from mmrl.engine import Engine, compilation
from mmrl.engine.compilation import CompiledBlocks, apart, check_compiler, records_gradients, repeated_blocks
from mmrl.engine.flops import CallMeter, Tally
from mmrl.engine.settings import SGD, EngineSettings
from mmrl.errors import UserError
from mmrl.job import check_start

pytestmark = pytest.mark.usefixtures("alone")
WIDTH = 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = []

    def forward(self, h, past_key_values=None):
        if past_key_values is not None:
            past_key_values.append(len(past_key_values))
        return h + torch.nn.functional.silu(self.inner(h)).softmax(-1)


class Net(nn.Module):
    """Layers between two matrices. recomputes: with activation checkpointing around each layer."""

    def __init__(self, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x, **options):
        h = self.enter(x).tanh()  # no view: views are compiled apart
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.recomputes else layer(h, **options)
        return {"out": self.leave(h)}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch):
    """What was compiled: a graph each, and how often compiled code ran."""
    told = SimpleNamespace(compiled=[], runs=0)

    def backend(graph, inputs):
        told.compiled.append(graph)

        def run(*args):
            told.runs += 1
            return graph(*args)

        return run

    usual = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: usual(function, **{**options, "backend": backend})
    )
    return told


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def engine(module, **options):
    return Engine(module, SGD(lr=0.1, clip_grad_norm=0.0), EngineSettings(compile="eager", **options))


def batch(rows=2, length=5, seed=1):
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed))


# --- what is compiled ---


def test_blocks_are_the_members_of_lists_of_one_class():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower, self.plain = nn.Sequential(net()), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
            self.mixed = nn.ModuleList([net(), Layer()])

    two = Two()
    assert repeated_blocks(two) == [*two.tower[0].layers, *two.mixed[0].layers]


def test_one_graph_serves_all_layers_lengths_and_rows(graphs):
    wrapped = engine(net())
    for rows, length in ((2, 5), (3, 7), (4, 2), (2, 6)):
        wrapped.backward(wrapped(batch(rows, length))["out"].sum())
    wrapped.close()
    assert len(graphs.compiled) == 1 and graphs.runs == 12


def test_only_the_engine_runs_compiled_code(graphs):
    module = net()
    wrapped = engine(module)
    module(batch())
    copied = copy.deepcopy(module)
    assert graphs.runs == 0
    wrapped(batch())
    assert graphs.runs == 3
    copied(batch())
    module(batch())
    wrapped.close()
    assert graphs.runs == 3


def test_a_block_that_fills_a_cache_runs_as_it_is(graphs):
    wrapped, cache = engine(net()), []
    out = wrapped(batch(), past_key_values=cache)["out"]
    wrapped.close()
    assert graphs.runs == 0 and cache == [0, 1, 2] and out.equal(net()(batch())["out"])


def test_a_function_that_depends_on_values_runs_apart(graphs, monkeypatch):
    monkeypatch.setattr(compilation, "_apart", [])
    seen = []

    def split(h):
        seen.append(type(h))  # a tensor of the pass, none that is being traced
        return torch.cat(h.split(h[0, :2, 0].abs().gt(-1).tolist().count(True), dim=1), 1)

    split.__module__, split.__name__ = __name__, "splitting"
    monkeypatch.setitem(globals(), "splitting", apart(split))
    monkeypatch.setattr(Layer, "forward", lambda layer, h: globals()["splitting"](layer.inner(h).tanh()))
    wrapped = engine(net())
    wrapped(batch())
    wrapped.close()
    assert graphs.runs == 3 and len(graphs.compiled) == 1 and set(seen) == {torch.Tensor}


# --- what stays ---


def test_names_weights_and_gradients_stay_the_same():
    plain, module = net(), net()
    names = list(module.state_dict())
    wrapped = engine(module)
    for seed in (1, 2):
        wrapped.backward(wrapped(batch(seed=seed))["out"].square().sum())
        plain(batch(seed=seed))["out"].square().sum().backward()
    gradients = [(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True)]
    assert list(wrapped.state()) == names == list(plain.state_dict())
    wrapped.close()
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in gradients)


@pytest.mark.parametrize("recomputes", [False, True])
def test_passes_without_gradients_run_the_same_code(graphs, recomputes):
    wrapped = engine(net(recomputes=recomputes))
    with torch.no_grad():
        old = wrapped(batch())["out"]
    new = wrapped(batch())["out"]
    assert len(graphs.compiled) == 1 and old.equal(new)
    assert not old.requires_grad and new.requires_grad
    wrapped.backward(new.sum())
    wrapped.close()
    assert len(graphs.compiled) == 1 and graphs.runs == (9 if recomputes else 6)


def test_operations_are_counted_as_without(graphs):
    """Of passes for a gradient, and of those without one."""
    found = []
    for wrap in (lambda module: module, engine):
        tally, module = Tally(), net(recomputes=True)
        CallMeter(module, tally)
        called = wrap(module)
        with torch.no_grad():
            called(batch())
        without = tally.flops
        out = called(batch())["out"]
        if wrap is engine:
            called.backward(out.sum())
        else:
            out.sum().backward()
        found.append((without, tally.flops))
        if wrap is engine:
            called.close()
    assert found[0] == found[1] and 0 < found[0][0] < found[0][1] / 3
    assert graphs.runs == 9


def test_a_pass_without_gradients_is_none_for_a_gradient():
    blocks = CompiledBlocks(net(), "eager")
    assert records_gradients()
    with torch.no_grad():
        assert blocks.call(lambda: records_gradients()) is False
    assert blocks.call(lambda: records_gradients()) is True and records_gradients()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_fused_code_is_the_same_with_and_without_gradients():
    """By the backend itself: it compiles other code for passes without gradients, which rounds differently."""
    plain, module = net(), net()
    wrapped = Engine(module, SGD(lr=0.1, clip_grad_norm=0.0), EngineSettings(compile="inductor"))
    with torch.no_grad():
        old = wrapped(batch(3, 9))["out"]
    new = wrapped(batch(3, 9))["out"]
    wrapped.backward(new.square().sum())
    plain(batch(3, 9))["out"].square().sum().backward()
    gradients = [(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True)]
    wrapped.close()
    assert old.equal(new)
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in gradients)


# --- what is refused ---


def test_a_network_without_blocks_is_refused():
    with pytest.raises(
        UserError, match="^engine.compile=eager compiles the repeated blocks .* set engine.compile=none"
    ):
        engine(nn.Linear(2, 2))


def test_a_machine_without_a_compiler_is_refused_before_a_model_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = configure({"run_dir": str(tmp_path / "run"), "engine": {"compile": "inductor"}})
    with pytest.raises(
        UserError, match="^engine.compile=inductor needs a C.. compiler, .* or set engine.compile=none$"
    ):
        check_start(config)
    check_compiler("eager")


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(compilation.toolchain, "compiler", lambda kind: "g++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^engine.compile=inductor needs Triton on GPUs; install triton"):
        check_compiler("inductor")


@pytest.mark.parametrize(("engine_section", "rollout", "message"), [
    ({"zero_stage": 3}, {}, "engine.*compile=eager does not go with engine.zero_stage=3"),
    ({}, {"generator": {"type": "vllm_colocated", "routing_replay": True}},
     "go with rollout.generator.routing_replay=true"),
])  # fmt: skip
def test_what_it_does_not_go_with_is_refused(engine_section, rollout, message):
    tree = {"run_dir": "unset", "engine": {"compile": "eager", **engine_section}, "rollout": rollout}
    with pytest.raises(UserError, match=message):
        configure(tree)
