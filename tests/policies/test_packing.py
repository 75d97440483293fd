"""Rows that are replayed without padding: likelihoods and gradients are those of each row alone, in every family."""

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmrl.engine.flops import Flops
from mmrl.generation.decoding import PACKED
from mmrl.policies.vlm import scorer
from mmrl.policies.vlm.loading import load_model, recompute_activations
from mmrl.policies.vlm.responses import packing
from mmrl.rollouts import Prompt
from tests.helpers.tiny_models import FAMILIES
from tests.policies.conftest import PROMPTS, configured, loaded, mixed


@pytest.fixture
def policy(request, folders):
    return loaded(folders[request.param], max_response_length=7)


def gradients(policy):
    return {name: p.grad.clone() for name, p in policy.module.named_parameters() if p.grad is not None}


def scores(policy, rollouts, packs):
    """Likelihoods of responses, and gradients of their weighted sum, padded or packed."""
    policy.module.zero_grad()
    policy.runner.should_pack = lambda lengths: packs
    replay = policy.replay(rollouts, policy.module)
    weights = torch.arange(1.0, replay.logp.numel() + 1).view_as(replay.logp)
    (replay.logp * weights).sum().backward()
    return replay, gradients(policy)


@pytest.mark.parametrize("policy", FAMILIES, indirect=True)
def test_packed_rows_have_the_likelihoods_and_gradients_of_padded_ones(policy):
    if not policy.runner.can_pack:
        assert not policy.module.can_pack
        pytest.skip("this family is padded")
    seen = []
    first = policy.runner.core.get_decoder().layers[0]
    first.register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0].shape), with_kwargs=True)
    rollouts = mixed(policy)
    lengths = [len(row.prompt) + len(row.response) for row in rollouts.inputs]
    seen.clear()
    (padded, expected), padded_shape = scores(policy, rollouts, False), seen.pop()
    (packed, found), packed_shape = scores(policy, rollouts, True), seen.pop()
    assert padded_shape[:2] == (len(lengths), max(lengths)) and packed_shape[:2] == (1, sum(lengths))
    for name in ("logp", "entropy", "square_sum"):
        torch.testing.assert_close(vars(packed)[name], vars(padded)[name], rtol=1e-4, atol=1e-5)
    assert set(found) == set(expected)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("policy", ["qwen2_5_vl"], indirect=True)
def test_recomputed_layers_are_packed_in_the_backward_pass_too(policy):
    rollouts = mixed(policy)
    _, expected = scores(policy, rollouts, True)
    recompute_activations(policy.module.model)
    _, found = scores(policy, rollouts, True)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["qwen2_5_vl"], indirect=True)
def test_two_policies_may_share_a_model(policy):
    rollouts = mixed(policy)
    alone, _ = scores(policy, rollouts, True)
    second = type(policy)(policy.module.model, policy.tokens.processor, max_response_length=7)
    shared, _ = scores(second, rollouts, True)
    torch.testing.assert_close(shared.logp, alone.logp)


@pytest.mark.parametrize("policy", ["qwen2_5_vl"], indirect=True)
def test_rows_are_packed_where_a_tenth_would_be_padding(policy, monkeypatch):
    assert packing.worthwhile([10, 7]) and not packing.worthwhile([10, 8]) and not packing.worthwhile([5])
    used = []
    monkeypatch.setattr(
        scorer, "packed_rows", lambda mask, packed=packing.packed_rows: used.append(mask) or packed(mask)
    )
    words = Prompt("words", "number " * 60, answer="4")
    short, long = policy.demonstrate(PROMPTS[1:2]), policy.demonstrate([words])
    policy.replay(type(short).concat([short, long]), policy.module)
    (mask,) = used
    assert mask.sum(1).tolist() == [len(row.prompt) + len(row.response) for row in (*short.inputs, *long.inputs)]
    policy.replay(long, policy.module)
    assert len(used) == 1


def test_it_is_off_where_the_engine_says_so(folders):
    config = configured(folders["qwen2_5_vl"])
    on = config.model.load(config, None, config.model.path)
    engine = config.engine.model_copy(update={"packing": False})
    off = config.model.load(config.model_copy(update={"engine": engine}), None, config.model.path)
    assert on.module.can_pack and not off.module.can_pack
    used = [policy.runner.core.get_decoder().config._attn_implementation for policy in (on, off)]
    assert used == [PACKED, "sdpa"] and not off.runner.should_pack([1, 100])


@pytest.mark.parametrize("policy", ["qwen2_5_vl"], indirect=True)
def test_operations_of_packed_rows_are_those_of_their_tokens(policy):
    rollouts = mixed(policy)
    scores(policy, rollouts, True)
    known = policy.runner.flops.meter.known
    other = loaded(policy.runner.core.config._name_or_path, max_response_length=7)
    scores(other, rollouts.select(torch.tensor([0])), False)
    plain = other.runner.flops.meter.known
    assert isinstance(known.token, Flops)
    assert known.token.forward == pytest.approx(plain.token.forward)
    assert known.pair.forward == pytest.approx(plain.pair.forward, rel=1e-3)  # rotary phases are products too


def test_attention_within_each_sequence_is_that_of_each_alone():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    ends = torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    module = torch.nn.Module()
    out, _ = packing.packed_attention(module, query, key, value, None, cu_seq_lens_q=ends, scaling=0.3)
    for start, end in ((0, 2), (2, 3), (3, 9)):
        for head in range(4):
            q, k, v = query[0, head, start:end], key[0, head // 2, start:end], value[0, head // 2, start:end]
            logits = (q @ k.t() * 0.3).masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
            torch.testing.assert_close(out[0, start:end, head], logits.softmax(-1) @ v)


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "takes"),
    [
        (torch.bfloat16, 80, (9, 0), True),
        (torch.float16, 128, (8, 0), True),
        (torch.float32, 80, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 20, (9, 0), False),
        (torch.bfloat16, 80, (7, 5), False),
    ],
)
def test_flash_attention_is_for_what_it_can_do(monkeypatch, dtype, width, capability, takes):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 2, 3, width), device="cuda:0")
    assert packing.can_use_flash(query) is takes
    assert not packing.can_use_flash(torch.zeros(1, 2, 3, 80, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: flash attention")
@pytest.mark.parametrize("causal", [None, False])
def test_flash_attention_of_a_gpu_is_that_of_each_sequence_alone(causal):
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(1, heads, 300, 64, generator=generator) for heads in (8, 2, 2)]
    ends = torch.tensor([0, 7, 8, 130, 300], dtype=torch.int32)
    weights = torch.randn(1, 300, 8, 64, generator=generator)

    def computed(device, dtype):
        leaves = [t.to(device, dtype).requires_grad_() for t in plain]
        out, _ = packing.packed_attention(
            torch.nn.Module(),
            *leaves,
            None,
            cu_seq_lens_q=ends.to(device),
            max_length_q=170,
            scaling=0.1,
            is_causal=causal,
        )
        (out * weights.to(device, dtype)).sum().backward()
        return [t.detach().double().cpu() for t in (out, *(leaf.grad for leaf in leaves))]

    exact, found = computed("cpu", torch.float64), computed("cuda", torch.bfloat16)
    assert all((a - b).norm() < 0.01 * b.norm() for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_windows_of_a_vision_tower_are_attended_to_in_one_call(family, folders, monkeypatch):
    """Also in a model that robots act with: it is so as it is loaded."""
    config = configured(folders[family])
    model, processor = load_model(config.model.path, config.model)
    calls = []

    def counted(module, *arguments, attention=packing.packed_attention, **options):
        calls.append(options.get("cu_seq_lens_q"))
        return attention(module, *arguments, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, packing.PACKED_IMAGES, counted)
    vision = model.base_model.visual
    images = [image for prompt in PROMPTS for image in prompt.images]
    inputs = processor.image_processor(images, return_tensors="pt")
    arguments = (inputs["pixel_values"], inputs["image_grid_thw"])
    packed = vision(*arguments).pooler_output
    assert len(calls) == len(vision.blocks) and all(len(starts) > 2 for starts in calls)
    assert vision.config._attn_implementation == "sdpa"
    for block in vision.blocks:
        block.attn.config = vision.config
    torch.testing.assert_close(packed, vision(*arguments).pooler_output, rtol=1e-5, atol=1e-6)
