"""Weights handed to a second engine, and the proof that they arrived. The engine here is a copy of the model that
transformers generates with, so these tests need no vLLM; tests/whole_runs/test_vllm.py runs the same with vLLM
itself."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.generation.settings import VLLMColocated
from mmrl.generation.vllm import engine as vllm
from mmrl.generation.vllm.sleep import SleepMode
from mmrl.generation.weight_sync import receiver
from mmrl.policies.vlm.proof import Gap
from mmrl.policies.vlm.synced import Synced, weights
from tests.policies.conftest import PROMPTS, loaded
from tests.policies.second import Copy
from tests.whole_runs.parts import model_folder

ONE_IMAGE = [PROMPTS[2], PROMPTS[1]]


@pytest.fixture
def synced():
    def make(lora=None, limit=1e-3):
        policy = loaded(model_folder(), sampling=Sampling(0.7), max_response_length=7, lora=lora)
        return Synced(policy, Copy(policy, PROMPTS), ONE_IMAGE, limit=limit, gather=lambda value: [value])

    return make


def disturb(policy, size=0.05):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


LORA = {"rank": 4, "alpha": 8.0, "targets": "all-linear"}


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_generation_has_the_trained_weights_after_every_change(synced, lora):
    made = synced(lora)
    for _ in range(3):
        disturb(made.policy)
        assert made.probe(made.engine).mean > 1e-2  # what the engine still has is far from what the model has now
        with made.generation() as measured:
            assert made.engine.awake and measured["generation/probe_gap"] < 1e-3
            rollouts = made.policy.rollout(ONE_IMAGE, 3, range(6))
            with torch.no_grad():
                logp = made.policy.replay(rollouts, made.policy.module).logp
            torch.testing.assert_close(rollouts.behaviour_logp, logp, atol=1e-3, rtol=0)
        assert not made.engine.awake


class Recorded(Copy):
    """With the memory of a GPU, of which only the order is real."""

    def __init__(self, policy, *, keep_weights):
        super().__init__(policy, PROMPTS, adapters=keep_weights)
        self.told = []
        self.rest = SleepMode(self, keep_weights=keep_weights)

    def sleep(self, level=None):
        self.told.append(f"sleep at level {level}") if level else self.rest.sleep()

    def wake_up(self, tags):
        self.told.append(f"wake {' and '.join(tags)}")

    def wake(self):
        self.rest.wake_weights()

    def serve(self):
        self.rest.wake_cache()

    def load(self, weights):
        super().load(weights)
        self.told.append("load")

    def adapt(self, write):
        super().adapt(write)
        self.told.append("adapt")

    def generate(self, requests, **options):
        self.told.append("generate")
        return super().generate(requests, **options)


@pytest.mark.parametrize("adapters", [False, True], ids=["merged", "adapter"])
@pytest.mark.quick("adapter")
def test_memory_is_free_before_the_engine_takes_it_and_weights_come_before_the_cache(monkeypatch, adapters):
    options = {"lora": LORA, "freeze": ["vision", "connector"]} if adapters else {}
    policy = loaded(model_folder(), sampling=Sampling(0.7), max_response_length=7, **options)
    engine = Recorded(policy, keep_weights=adapters)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: engine.told.append("empty"))
    made = Synced(policy, engine, ONE_IMAGE, limit=1e-3, gather=lambda value: [value], adapters=adapters)
    level = 1 if adapters else 2  # a base that is sent once has to be kept
    asleep, before, after = f"sleep at level {level}", ["empty", "wake weights"], ["empty", "wake kv_cache", "generate"]
    for given in (["load", "adapt"], ["adapt"]) if adapters else (["load"], ["load"]):
        engine.told.clear()
        with made.generation():
            assert engine.told == [*before, *given, *after]  # the last is the probe
        assert engine.told[-1] == asleep


def test_weights_are_those_that_peft_merges(synced, tmp_path):
    policy = synced(LORA).policy
    disturb(policy)
    found = dict(weights(policy.module.model))
    copy.deepcopy(policy.module.model).merge_and_unload().save_pretrained(tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {*want, "lm_head.weight"}  # the tied layer under both of its names
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


def test_weights_are_those_of_the_published_checkpoint(family, load, folders, tmp_path):
    """Names and layout are those of the file that was loaded, also where the model has others, and of the file that it
    saves."""
    policy = load(family)
    file = load_file(folders[family] / "model.safetensors")
    policy.save(tmp_path, policy.module.state_dict())
    found, saved = dict(weights(policy.module.model)), load_file(tmp_path / "model.safetensors")
    for want in (published(file), saved):
        assert found.keys() - want.keys() <= {"lm_head.weight"} and not want.keys() - found.keys()
        assert all(torch.equal(found[name], value) for name, value in want.items())


def published(file):
    """transformers leaves experts as they lie in its model; those of Qwen3-VL-MoE are published transposed, input
    features first."""
    experts = ("experts.gate_up_proj", "experts.down_proj")
    return {name: value.mT if name.endswith(experts) else value for name, value in file.items()}


def test_weights_that_do_not_arrive_stop_the_run_on_every_rank(synced):
    made = synced()
    made.engine.load = lambda weights: None  # nor asks for them
    disturb(made.policy)
    with pytest.raises(UserError, match=r"69 of the 69 tensors in it are not as they were sent: visual.patch_embed"):
        made.sync_weights()
    healthy = synced()
    healthy.gather = lambda value: [value, "another rank's"]
    with pytest.raises(UserError, match="another rank's"):
        healthy.sync_weights()


def test_an_engine_that_computes_otherwise_stops_the_run_on_every_rank(synced):
    for other, words in ((0.5, "0.5"), (math.nan, "nan")):
        healthy = synced()
        healthy.compare = lambda arrivals: {}
        healthy.gather = lambda value, other=other: [value, [Gap(other)]]  # another rank's
        with pytest.raises(UserError, match=f"differ from .* by {words} on average, .*probe_limit=0.001"):
            healthy.sync_weights()


def test_a_weight_that_is_left_out_is_noticed(synced):
    """The tied output layer of an engine that packs it by itself."""
    made = synced()
    head = made.engine.own.module.model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    load = made.engine.load

    def load_but_head(weights):
        kept = head.weight.detach().clone()
        load(weights)
        head.weight.data.copy_(kept)

    made.engine.load = load_but_head
    disturb(made.policy)
    with pytest.raises(UserError, match="1 of the 69 tensors in it are not as they were sent: lm_head.weight;"):
        made.sync_weights()


def test_an_engine_that_is_not_installed_is_asked_for_in_one_line(monkeypatch):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^rollout.generator needs vLLM, which is not installed; install"):
        vllm.check_installed()


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_without_checksums_the_trainer_sums_nothing_and_the_probe_still_proves(monkeypatch, lora):
    frozen = [] if lora is None else ["vision", "connector"]  # an adapter of the language model alone
    policy = loaded(model_folder(), sampling=Sampling(0.7), max_response_length=7, lora=lora, freeze=frozen)
    adapters = lora is not None
    engine = Copy(policy, PROMPTS, adapters=adapters)
    made = Synced(policy, engine, ONE_IMAGE, gather=lambda value: [value], adapters=adapters, checksums=False)

    def refused(*_):
        raise AssertionError("a checksum was computed")

    monkeypatch.setattr("mmrl.generation.weight_sync.checksums.checksum", refused)
    monkeypatch.setattr("mmrl.policies.vlm.synced.adapter_checksums", refused)
    for _ in range(2):
        disturb(policy)
        assert made.probe(engine).mean > 1e-2
        assert made.sync_weights()["generation/probe_gap"] < 1e-3


@pytest.mark.parametrize("watches", [True, False])
def test_engines_watch_their_copies_where_checksums_are_compared(monkeypatch, watches):
    """The extension of vLLM's workers, on a runner that takes weights as vLLM's does."""
    entered = []
    monkeypatch.setattr(receiver.CopyWatch, "__enter__", lambda self: entered.append(self) or self)
    monkeypatch.setattr(receiver.CopyWatch, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(receiver, "repack_experts", lambda model: None)
    layer = nn.Linear(2, 2, bias=False)

    class Runner:
        def get_model(self):
            return layer

        def reload_weights(self, weights_iterator):
            for name, value in weights_iterator:
                layer.get_parameter(name).copy_(value)

    worker = receiver.Arrival()
    options = vllm.EngineOptions(context=8, settings=VLLMColocated(checksums=watches), dtype="float32", seed=0)
    worker.model_runner = Runner()
    worker.vllm_config = SimpleNamespace(additional_config=options.arguments()["additional_config"])
    worker.receive([("weight", torch.full((2, 2), 3.0))])
    assert layer.weight.eq(3.0).all() and bool(entered) is watches and (worker.watch is not None) is watches
