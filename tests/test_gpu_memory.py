"""The recipes for GPUs fit an 80 GiB one: weights, gradients, optimizer and activations at the real shapes, on the meta
device. The numbers of a recipe are read from its file; what is not counted (the CUDA context, buffers of reductions,
rewards, the cache of a colocated engine) has the 8 GiB that are left."""

import math
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mmrl import kernels
from mmrl.config import load
from mmrl.engine.memory import kept_for_backward, standing

CONFIGS = Path(__file__).parent.parent / "configs"
GIB, ROOM, WORLD = 2**30, 72, 8
HALF = {"device": "meta", "dtype": torch.bfloat16}


def recipe(name, *overrides):
    return load(CONFIGS / f"{name}.yaml", [f"run_dir={name}", *overrides])


def on_meta(make):
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def total(module, config, *activations):
    """GiB, printed by part."""
    parts = standing(module, config.engine.zero_stage, WORLD, config.model.dtype)
    parts["activations"] = sum(activations)
    print({name: round(size / GIB, 2) for name, size in parts.items()})
    return sum(parts.values()) / GIB


def adapted(module, lora):
    model = get_peft_model(module, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets))
    return model.to(torch.bfloat16)


def test_a_linear_layer_keeps_its_input_alone():
    layer = torch.nn.Linear(3, 5, device="meta")
    given = torch.empty(7, 3, device="meta")
    assert kept_for_backward(layer, lambda: layer(given)) == 7 * 3 * 4
    twice = torch.nn.Sequential(layer, torch.nn.Linear(5, 2, device="meta"))
    assert kept_for_backward(twice, lambda: twice(given)) == 7 * (3 + 5) * 4
    layer.requires_grad_(False)
    assert kept_for_backward(layer, lambda: layer(given)) == 0


@pytest.mark.parametrize(
    ("stage", "gradients", "weights", "optimizer"), [(0, 30, 46, 180), (1, 30, 46, 45), (2, 7.5, 46, 45)]
)
def test_what_zero_shares_out_over_four_ranks(stage, gradients, weights, optimizer):
    """15 weights are trained, 8 are not."""
    module = torch.nn.ModuleList([torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)])
    module[1].requires_grad_(False)
    found = standing(module, stage, 4, "bfloat16")
    assert found == {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    assert standing(module, 3, 4, "float32") == {"weights": 23.0, "gradients": 15.0, "optimizer": 30.0}


def openvla(looks, lora):
    from mmrl.policies.vla.openvla import OpenVLAConfig, OpenVLAForActionPrediction, Together

    text = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    settings = OpenVLAConfig(
        text_config={**text, "vocab_size": 32064, "max_position_embeddings": 2048},
        timm_model_ids=["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        timm_override_act_layers=[None, None],
        image_sizes=[224, 224],
    )
    settings._attn_implementation = "sdpa"
    core = on_meta(lambda: OpenVLAForActionPrediction(settings))
    model = adapted(core, lora)

    def read():
        ids = torch.zeros(looks, 30, dtype=torch.long, device="meta")
        pictures = [torch.empty(looks, 3, 224, 224, **HALF)] * 2
        given = core.embed(ids, torch.ones_like(ids), pictures)
        end = torch.empty(1, 4096, **HALF)
        # Seven numbers of each of eight actions
        return Together(core.language_model, given, end).together(torch.empty(looks, 56, 4096, **HALF))

    return model, kept_for_backward(model, read)


def test_libero_with_openvla_fits_by_parts_of_its_looks():
    pytest.importorskip("timm")
    config = recipe("manipulation_libero_spatial")
    action, at_once = config.section("action"), config.engine.looks_at_once
    looks = math.ceil(action.horizon / action.chunk)
    assert (looks, config.engine.micro_batch) == (28, 1)
    pictures = looks * 2 * 3 * 224 * 224 * 4  # go into every part
    model, part = openvla(at_once, config.model.lora)
    assert total(model, config, part, pictures) < ROOM
    _, one = openvla(1, config.model.lora)
    assert part < 1.1 * at_once * one  # and so all at once would not fit:
    assert total(model, config, looks * one) > 80


QWEN = {
    "3B": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008},
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944},
}


def qwen(size):
    text = {**QWEN[size], "num_key_value_heads": 2 if size == "3B" else 4, "tie_word_embeddings": size == "3B"}
    text |= {"vocab_size": 151936 if size == "3B" else 152064}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    vision |= {"out_hidden_size": text["hidden_size"], "fullatt_block_indexes": [7, 15, 23, 31]}
    tied = text["tie_word_embeddings"]
    settings = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return on_meta(lambda: Qwen2_5_VLForConditionalGeneration(settings))


@pytest.mark.parametrize(("size", "billions"), [("3B", 3.75), ("7B", 8.29)])
def test_geometry3k_with_qwen_fits(size, billions):
    from mmrl.policies.vlm.loading import part_of, recompute_activations

    config, model = recipe("visual_qa_geometry3k"), qwen(size)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in config.model.freeze)
    rows, width = config.engine.micro_batch, QWEN[size]["hidden_size"]
    length = config.rollout.max_prompt_length + int(config.rollout.max_response_length.extremes[1])
    decoder = model.model.language_model

    def read():
        places = torch.zeros(3, rows, length, dtype=torch.long, device="meta")
        given = torch.empty(rows, length, width, **HALF, requires_grad=True)
        return decoder(inputs_embeds=given, position_ids=places, use_cache=False).last_hidden_state

    decoder.layers, every = decoder.layers[:1], decoder.layers
    layer = kept_for_backward(model, read)  # that is computed again
    decoder.layers = every
    assert config.model.activation_checkpointing
    recompute_activations(model)
    model.train()
    kept = kept_for_backward(model, read)
    assert kept < 4 * GIB and kept > len(every) * rows * length * width * 2
    chunk = config.engine.logp_chunk * decoder.embed_tokens.num_embeddings * 4 * 2  # logits and their gradient, fp32
    assert total(model, config, kept, layer, chunk) < ROOM


def test_sd35_with_ocr_fits():
    config = recipe("image_sd35_ocr")
    denoising = config.section("denoising")
    made = {"num_layers": 24, "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096}
    made |= {"caption_projection_dim": 1536, "pooled_projection_dim": 2048, "pos_embed_max_size": 384}
    made |= {"dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm", "in_channels": 16, "out_channels": 16}
    model = on_meta(lambda: SD3Transformer2DModel(sample_size=128, patch_size=2, **made))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(2.24, rel=0.01)
    lora = config.model.lora
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets))
    model.to(torch.bfloat16)
    rows = config.engine.micro_batch * denoising.likelihood.window.size
    side = denoising.resolution // 8

    def read():
        texts = torch.empty(rows, 333, 4096, **HALF)
        pooled, times = torch.empty(rows, 2048, **HALF), torch.empty(rows, device="meta")
        return model(torch.empty(rows, 16, side, side, **HALF), texts, pooled, times, return_dict=False)

    plain = kept_for_backward(model, read)
    assert config.model.activation_checkpointing
    model.enable_gradient_checkpointing()
    kept = kept_for_backward(model, read)
    assert kept < plain / 20
    encoders = 11.1 * GIB  # T5-XXL and two CLIPs, which visit the GPU while prompts are read
    assert total(model, config, kept, plain / 24, encoders) < ROOM


@pytest.fixture(autouse=True)
def plain_kernels():
    """The fused ones know no meta device."""
    kernels.use("torch")
    yield
    kernels.use("auto")
