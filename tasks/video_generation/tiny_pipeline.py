"""A tiny Wan pipeline for moving shapes, built in code: the class that users bring, at a laptop's size."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from mmrl.tasks import moving

from mmrl.policies.diffusion import tiny
from mmrl.policies.diffusion.families.base import quiet

TEXT = 32  # width of the text encoder


def build_moving_shapes(folder: str, seed: int) -> None:
    """A Wan for clips of 5 x 1 x 16 x 16, whose latents are 1 x 5 x 8 x 8.

    All frames of a clip are one patch in time: with a token a frame, Wan's positions, which are relative, do not let a
    network of this size learn in which direction something moves. A patch has 80 numbers and the network is 96
    wide: the noise of a patch has to pass through it, or clips stay noisy.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny.word_tokenizer(moving.words(), max_length=12)
        transformer = WanTransformer3DModel(
            patch_size=(moving.FRAMES, 4, 4),
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=1,
            out_channels=1,
            text_dim=TEXT,
            freq_dim=64,
            ffn_dim=192,
            num_layers=2,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        )
        pipe: Any = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=tiny.umt5_text_encoder(tokenizer, TEXT),
            vae=tiny.halving_wan_vae(1),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            transformer=transformer,
        )
    with quiet():
        pipe.save_pretrained(folder)
