"""The reference of a LoRA: which models may be asked without their adapters, and that this says what a copy says."""

import peft
import pytest
import torch
from torch import nn

from mmrl.engine.snapshot import AdaptersOff, Snapshot, make_reference


def adapted(init=True, **config):
    """Two layers of which the first has an adapter."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).requires_grad_(False)
    targets = config.pop("target_modules", ["0"])
    return peft.get_peft_model(
        plain, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=init, **config)
    )


def start(module, *, fixed=True, zero_stage=0):
    return make_reference(module, fixed=fixed, zero_stage=zero_stage)


@torch.no_grad()
def move(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(0.3)


def test_without_adapters_the_model_says_what_it_said_at_the_start_bit_for_bit():
    module, x = adapted(), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    copy, off, before = Snapshot(module), start(module), module(x).detach()
    assert isinstance(off, AdaptersOff)
    move(module)
    now = module(x).detach()
    assert float((now - before).abs().max()) > 0.1
    for reference in (copy, off):
        with reference.applied(), torch.no_grad():
            assert torch.equal(module(x), before)
        assert torch.equal(module(x), now)


def test_adapters_come_back_after_an_error_and_stay_what_is_trained():
    module, x = adapted(), torch.ones(1, 8)
    off, trained = start(module), [p.requires_grad for p in module.parameters()]
    move(module)
    now = module(x).detach()
    with pytest.raises(ZeroDivisionError), off.applied():
        assert not torch.equal(module(x), now)
        raise ZeroDivisionError
    assert torch.equal(module(x), now) and [p.requires_grad for p in module.parameters()] == trained


@pytest.mark.parametrize(
    "made",
    [
        lambda: adapted(init=False),  # both factors at random: it changed the model
        lambda: adapted(init="orthogonal"),  # what it adds was taken off the weights
        lambda: adapted(modules_to_save=["2"]),  # the last layer is trained too
        lambda: adapted(use_dora=True),  # it trains magnitudes too
        lambda: nn.Linear(8, 3),
    ],
    ids=["random", "orthogonal", "more", "dora", "whole"],
)
def test_what_is_not_the_start_without_its_adapters_is_copied(made):
    assert isinstance(start(made()), Snapshot)


def test_a_reference_that_moves_is_a_copy_and_so_it_is_under_zero_3():
    assert isinstance(start(adapted(), fixed=False), Snapshot)
    assert isinstance(start(adapted(), zero_stage=3), Snapshot)
    assert isinstance(start(adapted(), zero_stage=2), AdaptersOff)


def test_an_adapter_that_was_trained_before_is_copied():
    module, x = adapted(), torch.ones(1, 8)
    move(module)
    kept, before = start(module), module(x).detach()
    move(module)
    assert isinstance(kept, Snapshot)
    with kept.applied():
        assert torch.equal(module(x), before)
