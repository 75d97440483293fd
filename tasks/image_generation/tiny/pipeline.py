"""Tiny diffusers pipelines for digits, edits and named images: the same classes as published models, for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from mmrl.policies.diffusion import tiny
from mmrl.policies.diffusion.families.components import quiet
from mmrl.policies.diffusion.sentences import SentenceDenoiser
from mmrl.tasks.image_generation.data import digits, edits, named_images
from mmrl.tasks.image_generation.rewards import minilm


def build_digits(folder: str, seed: int) -> None:
    """Writes a tiny StableDiffusion3Pipeline of 0.29M parameters for images of 1 x 8 x 8, which are four patches."""
    stable_diffusion_3(folder, seed, words=digits.words(), channels=1, size=digits.SIZE, patch=4, width=64, depth=2)


def stable_diffusion_3(
    folder: str, seed: int, *, words: Sequence[str], channels: int, size: int, patch: int, width: int, depth: int
) -> None:
    """Writes a StableDiffusion3Pipeline without a third text encoder, whose latents are the pixels.

    words: the vocabulary of the text encoders; patch: pixels along a side of a patch; width: channels of the
    transformer; depth: its number of layers. Use it with model.text_tokens=1: diffusers appends that many zero tokens
    in place of the tokens of the third encoder.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny.word_tokenizer(words, max_length=12)
        text_width, heads = 32, width // 16
        transformer = SD3Transformer2DModel(
            sample_size=size,
            patch_size=patch,
            in_channels=channels,
            out_channels=channels,
            num_layers=depth,
            attention_head_dim=16,
            num_attention_heads=heads,
            caption_projection_dim=width,
            joint_attention_dim=2 * text_width,
            pooled_projection_dim=2 * text_width,
            pos_embed_max_size=size // patch,
        )
        pipe: Any = StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=tiny.identity_vae(channels, size),
            text_encoder=tiny.clip_text_encoder(tokenizer, text_width),
            tokenizer=tokenizer,
            text_encoder_2=tiny.clip_text_encoder(tokenizer, text_width),
            tokenizer_2=tokenizer,
            text_encoder_3=None,
            tokenizer_3=None,
        )
    with quiet():
        pipe.save_pretrained(folder)


def build_edits(folder: str, seed: int) -> None:
    """Writes a tiny FluxKontextPipeline for images of 3 x 16 x 16, whose latents are 3 x 8 x 8: 16 tokens of the
    generated image, and 16 of the source image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny.word_tokenizer(edits.words(), max_length=8)
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=12,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 6, 6],
            guidance_embeds=False,
        )
        pipe: Any = FluxKontextPipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=tiny.identity_vae(3, edits.SIZE, halving=True),
            text_encoder=tiny.clip_text_encoder(tokenizer, 32, projection=False),
            tokenizer=tokenizer,
            text_encoder_2=tiny.t5_text_encoder(tokenizer, 32),
            tokenizer_2=tokenizer,
        )
    with quiet():
        pipe.save_pretrained(folder)


def build_named(folder: str, seed: int) -> None:
    """Writes a tiny AuraFlowPipeline for images of 3 x 16 x 16, with the pretrained text encoder MiniLM. Its
    transformer is replaced by a perceptron of 1.5M parameters, which learns such images several times faster."""
    tokenizer, encoder = minilm.sentence_encoder()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe: Any = AuraFlowPipeline(
            transformer=SentenceDenoiser(named_images.SIZE, joint_attention_dim=minilm.WIDTH),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=tiny.identity_vae(3, named_images.SIZE),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )
    with quiet():
        pipe.save_pretrained(folder)
