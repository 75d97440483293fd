"""Tiny random pipelines that draw clips, edit images or take lists, as `tests.helpers.tiny_pipelines`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.helpers import tiny_models
from tests.helpers.tiny_pipelines import WIDTH, clip, clip_tokenizer, flow_vae, flux, t5, write

FRAMES, SIZE = 5, 16


def umt5() -> tuple[Any, UMT5EncoderModel]:
    tokenizer, encoder = t5()
    config = UMT5Config(
        vocab_size=encoder.config.vocab_size, d_model=WIDTH, d_ff=64, d_kv=16, num_layers=1, num_heads=2, dropout_rate=0
    )
    return tokenizer, UMT5EncoderModel(config)


def wan_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, 0.0, -0.2, 0.1],
        latents_std=[1.5, 1.0, 0.8, 1.0],
        scale_factor_temporal=1,
        scale_factor_spatial=2,
    )


def wan() -> DiffusionPipeline:
    tokenizer, encoder = umt5()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=WIDTH,
            freq_dim=32,
            ffn_dim=48,
            num_layers=2,
            rope_max_seq_len=32,
        ),
    )


def wan22() -> DiffusionPipeline:
    """Like Wan 2.2's 5B model: the network is told the time of every token, and its scheduler is UniPC's."""
    pipe = wan()
    pipe.register_modules(
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0, num_train_timesteps=1000
        )
    )
    pipe.register_to_config(expand_timesteps=True)
    return pipe


def ltx() -> DiffusionPipeline:
    tokenizer, encoder = t5()
    return LTXPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            patch_size=1,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05),
        transformer=LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=WIDTH,
        ),
    )


def hunyuan() -> DiffusionPipeline:
    language = tiny_models.tokenizer([])
    tokenizer = clip_tokenizer()
    config = clip(tokenizer, projection=False).config
    config.max_position_embeddings = 77  # the pipeline pads to so many
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(
            LlamaConfig(
                vocab_size=len(language),
                hidden_size=WIDTH,
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=2,
                pad_token_id=language.pad_token_id,
            )
        ),
        tokenizer=language,
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            text_embed_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            rope_axes_dim=(2, 4, 4),
        ),
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(config),
        tokenizer_2=tokenizer,
    )


def kontext() -> DiffusionPipeline:
    pipe = flux()
    parts = {name: part for name, part in pipe.components.items() if name not in ("image_encoder", "feature_extractor")}
    return FluxKontextPipeline(**parts)


def qwen_vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=6,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[-0.1, 0.0, 0.2, 0.1],
        latents_std=[1.5, 2.0, 0.8, 1.0],
    )


def qwen_edit(kind: type = QwenImageEditPipeline) -> DiffusionPipeline:
    text_encoder, processor = tiny_models.qwen2_5_vl()
    return kind(
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
        vae=qwen_vae(),
        text_encoder=text_encoder,
        tokenizer=processor.tokenizer,
        processor=processor,
    )


def qwen_edit_plus() -> DiffusionPipeline:
    return qwen_edit(QwenImageEditPlusPipeline)


def qwen3(layers: int) -> tuple[Any, Qwen3ForCausalLM]:
    tokenizer = tiny_models.tokenizer([])
    tokenizer.chat_template = tiny_models.template("")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, Qwen3ForCausalLM(config)


def flux2() -> DiffusionPipeline:
    tokenizer, encoder = qwen3(28)
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=SIZE,
    )
    with torch.no_grad():
        vae.bn.running_mean += 0.2
        vae.bn.running_var *= 2.0
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * 16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
    )


def z_image() -> DiffusionPipeline:
    tokenizer, encoder = qwen3(2)
    vae: AutoencoderKL = flow_vae()
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[64, 32, 32],
        ),
    )


MAKERS: dict[str, Callable[[], DiffusionPipeline]] = {
    maker.__name__: maker for maker in (wan, wan22, ltx, hunyuan, kontext, qwen_edit, qwen_edit_plus, flux2, z_image)
}
CLIPS = ("wan", "wan22", "ltx", "hunyuan")
EDITS = ("kontext", "qwen_edit", "qwen_edit_plus", "flux2")


@cache
def built(name: str, path: Path) -> Path:
    return write(MAKERS[name], path / name)
