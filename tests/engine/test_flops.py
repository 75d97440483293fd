"""Counted operations, by hand and beside torch's own counter on passes of other sizes than those that were counted."""

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from mmrl.engine.device_peaks import PEAKS, peak_of
from mmrl.engine.flops import CallMeter, FlopCounter, Flops, SequenceFlops, Tally, count, packed_attention_flops
from tests.helpers.tiny_models import build
from tests.helpers.tiny_pipelines import sd3, unet


def measured(compute):
    """Operations of a forward pass and the backward pass from it, by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        out = compute()
        forward = counter.get_total_flops()
        out.sum().backward()
    return Flops(forward, counter.get_total_flops() - forward)


def test_a_product_has_a_gradient_for_each_factor_that_needs_one():
    layer, x = nn.Linear(3, 5), torch.ones(4, 3)
    with FlopCounter() as whole:
        layer(x.clone().requires_grad_())
    with FlopCounter() as first:
        layer(x)
    with FlopCounter() as frozen, torch.no_grad():
        layer(x)
    layer.bias.requires_grad_(False)  # it is added, and no factor
    with FlopCounter() as without_bias:
        layer(x.clone().requires_grad_())
    assert without_bias.total == whole.total == Flops(2 * 4 * 3 * 5, 2 * 2 * 4 * 3 * 5)
    assert first.total == Flops(120, 120) and frozen.total == Flops(120, 0)


def test_attention_is_two_products_forward_and_four_backward():
    query, key, value = (torch.ones(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    with FlopCounter() as counter:
        nn.functional.scaled_dot_product_attention(query, key, value)
    assert counter.pairs == Flops(2 * 2 * (2 * 3 * 5 * 7 * 8), 4 * 2 * (2 * 3 * 5 * 7 * 8))
    assert counter.weights == Flops()


GPU_ATTENTION = {  # what torch computes attention by on a GPU, and further arguments
    "_scaled_dot_product_flash_attention": (),
    "_scaled_dot_product_efficient_attention": (None, True),
}


@pytest.mark.parametrize("name", GPU_ATTENTION)
def test_attention_of_heads_that_share_keys_is_counted_whatever_a_gpu_computes_it_by(name, monkeypatch):
    """torch 2.11's own formula refuses fewer heads of keys than of queries, which stopped the first step on a GPU."""

    def refuses(*_, **__):
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    monkeypatch.setitem(flop_registry, vars(torch.ops.aten)[name], refuses)
    query, key, value = (torch.ones(2, heads, 6, 8, device="meta", requires_grad=True) for heads in (4, 2, 2))
    with FlopCounter() as counter:
        vars(torch.ops.aten)[name](query, key, value, *GPU_ATTENTION[name])
    assert counter.pairs == Flops(2 * 2 * (2 * 4 * 6 * 6 * 8), 4 * 2 * (2 * 4 * 6 * 6 * 8))


def test_packed_attention_has_pairs_within_its_sequences():
    query, key, value = (torch.ones(9, heads, 8) for heads in (4, 2, 2))
    starts = torch.tensor([0, 2, 9])
    assert packed_attention_flops(query, key, value, starts, None) == 2 * 2 * 4 * 8 * (2 * 2 + 7 * 7)
    assert packed_attention_flops(query, key, value, starts, torch.tensor([0, 3, 4])) == 2 * 2 * 4 * 8 * (2 * 3 + 7 * 1)


def test_activations_that_are_computed_again_are_no_work():
    layer, tally = nn.Linear(3, 5), Tally()
    CallMeter(layer, tally)
    for _ in range(2):  # counted, then known
        checkpoint(layer, torch.ones(4, 3, requires_grad=True), use_reentrant=False).sum().backward()
    with torch.no_grad():
        layer(torch.ones(2, 3))
    assert tally.flops == 2 * (120 + 240) + 60


def test_tokens_one_by_one_attend_to_those_before_and_to_themselves():
    flops = SequenceFlops(Flops(10, 20), Flops(1, 2))
    assert flops.for_sequence(3) == Flops(3 * 10 + 9, 3 * 20 + 18)
    assert flops.for_extension(2, 3) == Flops(30 + 3 * 5, 60 + 30)
    assert flops.for_extension(2, 3, one_by_one=True) == Flops(30 + 3 + 4 + 5, 60 + 2 * (3 + 4 + 5))


def sd3_inputs(rows):
    return torch.randn(rows, 4, 8, 8), torch.randn(rows, 5, 64), torch.randn(rows, 64), torch.ones(rows)


def unet_inputs(rows):
    return torch.randn(rows, 4, 8, 8), torch.ones(rows), torch.randn(rows, 5, 1280)


def masked(rows):
    return (torch.ones(rows, 12, dtype=torch.long),)


def masked_model():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(vocab_size=50, **sizes, attn_implementation="eager"))


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(lambda: sd3().transformer, sd3_inputs), (unet, unet_inputs), (masked_model, masked)],
    ids=["dit", "unet", "masked"],
)
def test_a_network_with_more_rows_is_within_one_per_cent(make, inputs, monkeypatch):
    network, tally = make(), Tally()
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", plain_attention)  # torch counts it on GPUs alone
    CallMeter(network, tally)
    network(*inputs(2))
    before = tally.flops
    found = measured(lambda: network(*inputs(3))[0])
    assert found.backward > found.forward > 0
    assert tally.flops - before == pytest.approx(found.total, rel=0.01)


def plain_attention(query, key, value, attn_mask=None, **_):
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -1e9)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["whole", "lora"])
def test_replay_of_a_vision_language_model_is_within_one_per_cent(lora, tmp_path):
    from tests.policies.conftest import PROMPTS, loaded

    freeze = [] if lora is None else ["vision", "connector"]
    policy = loaded(build("qwen2_5_vl", tmp_path), attention="eager", lora=lora, freeze=freeze)
    few = policy.rollout(PROMPTS[:1], 1, [1], max_response_length=3)
    policy.replay(few, policy.module).logp.sum().backward()  # the decoder's operations follow from this pass
    shared = policy.rollout(PROMPTS[:1], 2, [3, 3])  # equal, so that nothing is padded
    apart = policy.rollout(PROMPTS[:1] * 2, 1, [3, 3])
    for rollouts in (shared, apart):
        before, decisions = policy.work.flops, int(rollouts.mask.sum())
        found = measured(lambda these=rollouts: policy.replay(these, policy.module).logp)
        head = policy.runner.flops.head * decisions  # of a fused operator, which torch does not see
        assert policy.work.flops - before == pytest.approx(found.total + head.total, rel=0.01)
        assert head.forward == 2 * decisions * policy.module.model.get_output_embeddings().weight.numel()
        assert decisions == sum(len(row.response) for row in rollouts.inputs) > 4


def test_peaks_are_found_by_the_names_of_drivers():
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100-SXM4-80GB": "a100"}
    names |= {"NVIDIA L40S": "l40s", "NVIDIA L4": "l4", "NVIDIA A10G": "a10", "NVIDIA H200": "h200", "Tesla T4": "t4"}
    assert {name: peak_of(name) for name in names} == {name: PEAKS[short] for name, short in names.items()}
    assert peak_of("NVIDIA H100 PCIe") is None and peak_of("GeForce GTX 480") is None
    assert [PEAKS["h100"].flops(dtype) for dtype in ("bfloat16", "float32")] == pytest.approx([989.4e12, 66.9e12])


def test_the_linear_layer_of_stage_3_counts_as_torch_s(monkeypatch):
    """DeepSpeed puts it in the place of torch's for the rest of a process; it computes without recording."""
    network = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    rows = torch.randn(3, 5, 8)
    plain = count(lambda: network(rows))
    monkeypatch.setattr(nn.functional, "linear", zero3_linear_wrap)
    assert count(lambda: network(rows)) == plain == Flops(2 * 15 * (128 + 64), 2 * 15 * (128 + 2 * 64))
    with torch.no_grad():
        assert count(lambda: network(rows)) == Flops(plain.forward, 0.0)
