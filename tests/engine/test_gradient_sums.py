"""Gradients of many micro-batches, summed by the engine in bf16."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmrl.engine import Engine
from mmrl.engine.settings import SGD, EngineSettings

pytestmark = pytest.mark.usefixtures("alone")
MICRO_BATCHES = 64


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_bf16_gradients_are_summed_in_fp32_over_micro_batches(offload):
    """The weights begin at 0, so that a step of rate 1 holds the sum: within the rounding of a weight, not of a sum."""
    module = nn.Linear(16, 16, bias=False).bfloat16()
    nn.init.zeros_(module.weight)
    settings = EngineSettings(zero_stage=2, offload=offload)
    engine = Engine(module, SGD(lr=1.0, clip_grad_norm=0.0), settings, dtype="bfloat16")
    generator, exact = torch.Generator().manual_seed(1), torch.zeros(16, 16, dtype=torch.float64)
    for _ in range(MICRO_BATCHES):
        gradient = torch.randn(16, 16, generator=generator).bfloat16()
        engine.backward((module.weight * gradient).sum())
        exact -= gradient.double()
    assert engine.step()[0]
    error = (module.weight.detach().double() - exact).norm() / exact.norm()
    engine.close()
    assert error < 0.0025  # bf16 rounds by at most 0.4 %, evenly; sums in bf16 are off by more than 0.5 %


@pytest.mark.parametrize(("backend", "stage", "beside"), [
    ("nccl", 0, False), ("nccl", 1, False), ("nccl", 2, True), ("nccl", 3, True), ("gloo", 2, False),
])  # fmt: skip
def test_gradients_are_summed_beside_the_backward_pass_where_deepspeed_takes_it(monkeypatch, backend, stage, beside):
    """DeepSpeed itself judges the settings that ranks have on GPUs, at every stage."""
    configured = Engine._deepspeed_config

    def on_gpus(engine, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_backend", lambda *_: backend)
            return configured(engine, *arguments)

    monkeypatch.setattr(Engine, "_deepspeed_config", on_gpus)
    engine = Engine(nn.Linear(4, 4), SGD(lr=1.0), EngineSettings(zero_stage=stage))
    assert engine._engine.zero_overlap_comm() is beside
    engine.close()
