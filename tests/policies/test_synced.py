"""Weights handed to a second engine, and the proof that they arrived. The engine here is a copy of the model that
transformers generates with, so these tests need no vLLM; tests/engine/test_vllm.py runs the same with vLLM itself."""

import copy
import math

import pytest
import torch
from torch import nn

from mmrl.errors import UserError
from mmrl.generation import vllm
from mmrl.generation.sampling import Sampling
from mmrl.policies import vlm
from mmrl.policies.synced import Synced, weights
from tests.engine.parts import model_folder
from tests.policies.conftest import PROMPTS
from tests.policies.second import Copy

ONE_PICTURE = [PROMPTS[2], PROMPTS[1]]


@pytest.fixture
def synced():
    def make(lora=None, limit=1e-3):
        policy = vlm.load(model_folder(), sampling=Sampling(0.7), max_response_length=7, lora=lora)
        return Synced(policy, Copy(policy, PROMPTS), ONE_PICTURE, limit=limit, gather=lambda value: [value])

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
        assert made.probe(made.engine) > 1e-2  # what the engine still has is far from what the model has now
        with made.generation() as measured:
            assert made.engine.awake and measured["generation/probe_gap"] < 1e-3
            rollouts = made.policy.rollout(ONE_PICTURE, 3, range(6))
            with torch.no_grad():
                logp = made.policy.replay(rollouts, made.policy.module).logp
            torch.testing.assert_close(rollouts.behaviour_logp, logp, atol=1e-3, rtol=0)
        assert not made.engine.awake


def test_weights_are_those_that_peft_merges(synced):
    policy = synced(LORA).policy
    disturb(policy)
    found = dict(weights(policy.module.model))
    merged = copy.deepcopy(policy.module.model).merge_and_unload()
    want = dict(merged.named_parameters(remove_duplicate=False))
    assert found.keys() == want.keys() and "lm_head.weight" in found  # the tied layer under both of its names
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


def test_weights_that_do_not_arrive_stop_the_run_on_every_rank(synced):
    made = synced()
    made.engine.load = lambda weights: None
    disturb(made.policy)
    with pytest.raises(UserError, match="rollout.vllm.probe_limit=0.001: weights or caches are stale"):
        made.synchronise()
    for other, words in ((0.5, "0.5"), (math.nan, "nan")):
        healthy = synced()
        healthy.gather = lambda value, other=other: [value, [other]]  # another rank's
        with pytest.raises(UserError, match=f"differ from the trained model's by {words}"):
            healthy.synchronise()


def test_a_weight_that_is_left_out_is_noticed(synced):
    """The tied output layer of an engine that packs it by itself."""
    made = synced()
    head = made.engine.own.module.model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    made.engine.load = lambda weights: [
        dict(made.engine.own.module.model.named_parameters())[name].data.copy_(value)
        for name, value in weights
        if name != "lm_head.weight"
    ]
    disturb(made.policy)
    with pytest.raises(UserError, match="stale"):
        made.synchronise()


def test_an_engine_that_is_not_installed_is_asked_for_in_one_line(monkeypatch):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^rollout.engine=vllm needs vLLM: install"):
        vllm.check_installed()
