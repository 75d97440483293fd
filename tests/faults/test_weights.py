"""Weights that an engine does not have, re-enacted on an engine that is a copy of the model: each fault is named at the
first synchronisation after the first update."""

import pytest
import torch

from mmrl.errors import UserError
from mmrl.generation.sampling import Sampling
from mmrl.policies.vlm.synced import Synced, weights
from tests.helpers.tiny_models import build
from tests.policies.conftest import PROMPTS, loaded
from tests.policies.second import Copy
from tests.whole_runs.parts import model_folder

ONE_IMAGE = [PROMPTS[2], PROMPTS[1]]
LORA = {"rank": 4, "alpha": 8.0, "targets": "all-linear"}
OLD_LIMIT = 0.3  # of the largest gap of one token in bfloat16, once


def built(path, engine=Copy, **options):
    policy = loaded(path, sampling=Sampling(0.7), max_response_length=7, **options)
    adapters = options.get("freeze") is not None
    made = Synced(
        policy, engine(policy, PROMPTS, adapters=adapters), ONE_IMAGE, gather=lambda v: [v], adapters=adapters
    )
    made.sync_weights()  # before the first update all is well
    return made


def updated(made, lr):
    """One step of AdamW on random gradients."""
    trained = [parameter for parameter in made.policy.module.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(0)
    for parameter in trained:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    torch.optim.AdamW(trained, lr=lr, weight_decay=0.0).step()
    return made


def named(made, words):
    with pytest.raises(UserError, match=words) as error:
        made.sync_weights()
    assert "\n" not in str(error.value)


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@DTYPES
def test_a_healthy_engine_is_left_alone(dtype):
    for options in ({}, {"lora": LORA}, {"lora": LORA, "freeze": ["vision", "connector"]}):
        made = built(model_folder(), dtype=dtype, **options)
        for _ in range(2):
            updated(made, 1e-3).sync_weights()


class Without(Copy):
    """It takes the first LoRA and no later one."""

    taken = 0

    def adapt(self, write):
        self.taken += 1
        if self.taken == 1:
            super().adapt(write)


@DTYPES
def test_an_adapter_that_does_not_arrive(dtype):
    """After one step of the smallest learning rate in use. Under the old limit of the probe it would hide for long."""
    made = updated(built(model_folder(), Without, dtype=dtype, lora=LORA, freeze=["vision", "connector"]), 1e-6)
    assert made.probe(made.engine).mean < OLD_LIMIT / 10
    named(made, r"tensors in it are not as they were sent: base_model\S+lora_[AB].weight")


class Unmerged(Copy):
    """It takes the weights of the model without what its LoRA adds to them."""

    def load(self, given):
        dict(given)
        super().load(weights(self.policy.module.model, merged=False))

    def __init__(self, policy, prompts, **options):
        self.policy = policy
        super().__init__(policy, prompts, **options)


@DTYPES
def test_a_merged_lora_that_does_not_arrive(dtype):
    made = updated(built(model_folder(), Unmerged, dtype=dtype, lora=LORA), 1e-3)
    assert made.probe(made.engine).mean < OLD_LIMIT
    named(made, r"tensors in it are not as they were sent: visual\.\S+weight")


class Forgetful(Copy):
    """Names of one layer do not fit, and it goes on with what it has."""

    def load(self, given):
        own = dict(weights(self.own.module.model))
        super().load([(n, own[n] if "layers.1.self_attn.o_proj" in n else value) for n, value in given])


@DTYPES
def test_a_word_that_is_dropped_from_a_name(dtype):
    named(
        updated(built(model_folder(), Forgetful, dtype=dtype), 1e-3),
        r"vLLM, 1 of the 69 tensors in it are not as they were sent: \S+layers.1.self_attn.o_proj.weight;",
    )


class Transposing(Copy):
    """It writes experts' weights in the layout that they had before they were processed for its kernels."""

    loads = 0

    def load(self, given):
        super().load(given)
        self.loads += 1
        if self.loads > 1:
            for name, own in self.own.module.model.named_parameters():
                if name.endswith("down_proj") and "experts" in name:
                    own.data.copy_(own.mT.reshape(own.shape).clone())


def test_experts_that_are_transposed_after_the_first_update(tmp_path):
    made = built(build("qwen3_vl_moe", tmp_path), Transposing)
    named(updated(made, 1e-4), r"2 of the \d+ tensors in it are not as they were sent: \S+experts.down_proj, ")


class Late(Copy):
    """Half of the weights are written on another stream, and not there yet when the engine goes on."""

    def load(self, given):
        own, rows = dict(weights(self.own.module.model)), list(given)
        self.rest = rows
        super().load([(name, value if i % 2 else own[name]) for i, (name, value) in enumerate(rows)])


def test_weights_that_are_still_being_written():
    made = built(model_folder(), Late)
    named(updated(made, 1e-6), "35 of the 69 tensors in it are not as they were sent")
    Copy.load(made.engine, made.engine.rest)
    assert made.comparison.compare(made.base.sent, {}, made.engine.arrived())[0] is None  # a moment later


class Pair(Copy):
    """Two engines, of which the second takes no weights but the first ones."""

    second = None

    def __init__(self, policy, prompts, **options):
        super().__init__(policy, prompts, **options)
        self.second = Copy(policy, prompts, **options)

    def arrived(self):
        return super().arrived() + self.second.arrived()


def test_weights_that_one_engine_of_two_missed():
    made = built(model_folder(), Pair)
    assert len(made.engine.arrived()) == 2
    named(updated(made, 1e-6), "69 of the 69 tensors in it are not as they were sent")
