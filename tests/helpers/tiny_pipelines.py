"""Tiny random diffusers pipelines with their tokenizers, built from configs: nothing is downloaded.

`build(name, path)` writes a folder that `DiffusionPipeline.from_pretrained` loads. An image has 16 x 16 pixels: 8 x 8
latents of 4 channels. Weights are larger than a fresh network's, so that text, time and guidance all change the output.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from tests.helpers.tiny_models import qwen2_5_vl

SIZE, LATENT = 16, (4, 8, 8)
WIDTH = 32  # of every text encoder


def clip_tokenizer() -> CLIPTokenizer:
    """Bytes, alone or at the end of a word, and CLIP's two special tokens last, as in the real vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({piece: i for i, piece in enumerate(pieces)}, [], model_max_length=24)


def clip(tokenizer: CLIPTokenizer, *, projection: bool = True) -> CLIPTextModel | CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        projection_dim=WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def t5(width: int = WIDTH) -> tuple[T5Tokenizer, T5EncoderModel]:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    tokenizer = T5Tokenizer([(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0, model_max_length=64)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_ff=2 * width, d_kv=16, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    return tokenizer, T5EncoderModel(config)


def vae(**more: Any) -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=SIZE,
        **more,
    )


def flow_vae() -> AutoencoderKL:
    return vae(use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5, shift_factor=0.06)


def unet(**more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        **more,
    )


def sd3() -> DiffusionPipeline:
    tokenizer = clip_tokenizer()
    tokenizer_3, text_encoder_3 = t5(2 * WIDTH)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=8,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flow_vae(),
        text_encoder=clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=clip(tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
    )


def sd3_without_t5() -> DiffusionPipeline:
    pipe = sd3()
    pipe.register_modules(text_encoder_3=None, tokenizer_3=None)
    return pipe


def flux(guidance_embeds: bool = True) -> DiffusionPipeline:
    tokenizer = clip_tokenizer()
    tokenizer_2, text_encoder_2 = t5()
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=[4, 4, 8],
            guidance_embeds=guidance_embeds,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flow_vae(),
        text_encoder=clip(tokenizer, projection=False),
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
    )


def flux_schnell() -> DiffusionPipeline:
    pipe = flux(guidance_embeds=False)
    pipe.register_modules(scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0))
    return pipe


def qwen_image() -> DiffusionPipeline:
    text_encoder, processor = qwen2_5_vl()
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=text_encoder.config.text_config.hidden_size,
            axes_dims_rope=(4, 4, 8),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=6,
            z_dim=4,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[-0.1, 0.0, 0.2, 0.1],
            latents_std=[1.5, 2.0, 0.8, 1.0],
        ),
        text_encoder=text_encoder,
        tokenizer=processor.tokenizer,
    )


def aura_flow() -> DiffusionPipeline:
    tokenizer, text_encoder = t5()
    return AuraFlowPipeline(
        transformer=AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            caption_projection_dim=32,
            pos_embed_max_size=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=vae(scaling_factor=0.13025),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def sd15() -> DiffusionPipeline:
    tokenizer = clip_tokenizer()
    return StableDiffusionPipeline(
        unet=unet(cross_attention_dim=WIDTH),
        scheduler=PNDMScheduler(**SCHEDULE, skip_prk_steps=True, set_alpha_to_one=False),
        vae=vae(scaling_factor=0.18215),
        text_encoder=clip(tokenizer, projection=False),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> DiffusionPipeline:
    tokenizer = clip_tokenizer()
    return StableDiffusionXLPipeline(
        unet=unet(
            cross_attention_dim=2 * WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=WIDTH + 6 * 8,
        ),
        scheduler=EulerDiscreteScheduler(**SCHEDULE, timestep_spacing="leading"),
        vae=vae(scaling_factor=0.13025),
        text_encoder=clip(tokenizer, projection=False),
        tokenizer=tokenizer,
        text_encoder_2=clip(tokenizer),
        tokenizer_2=tokenizer,
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )


MAKERS: dict[str, Callable[[], DiffusionPipeline]] = {
    maker.__name__: maker for maker in (sd3, sd3_without_t5, flux, flux_schnell, qwen_image, aura_flow, sd15, sdxl)
}
NAMES = tuple(MAKERS)


def build(name: str, path: Path, *, seed: int = 0) -> Path:
    """Write the pipeline to `path`; the same seed gives the same weights."""
    return write(MAKERS[name], path, seed=seed)


def write(maker: Callable[[], DiffusionPipeline], path: Path, *, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = maker()
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                for parameter in part.parameters():
                    if parameter.ndim > 1:
                        nn.init.normal_(parameter, std=1 / parameter[0].numel() ** 0.5)
    pipe.save_pretrained(path)
    return Path(path)


def ddim(pipe: DiffusionPipeline) -> DDIMScheduler:
    """The scheduler whose steps the policy takes with a noise-predicting pipeline."""
    return DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
