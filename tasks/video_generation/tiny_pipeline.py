"""A tiny diffusers WanPipeline for moving shapes: the same class as published models, for a CPU."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

from mmrl.policies.diffusion import tiny
from mmrl.policies.diffusion.families.components import quiet
from mmrl.tasks.data import moving_shapes

TEXT_WIDTH = 32  # hidden size of the text encoder


def build_moving_shapes(folder: str, seed: int) -> None:
    """Writes a tiny WanPipeline for videos of 5 x 1 x 12 x 12, whose latents are 1 x 5 x 6 x 6.

    The whole video is one patch, and so one token. With one token for each frame so small a network does not learn in
    which direction something moves, since Wan's positions are relative; with a quarter of a frame for each token it
    learns more slowly. The hidden size, 256, must exceed the 180 values of the patch, or videos stay noisy. Sigmas are
    shifted towards noise, as Wan's are: below 0.6 the content of a video is already determined.
    """
    canvas = moving_shapes.GENERATION_CANVAS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny.word_tokenizer(moving_shapes.vocabulary(), max_length=12)
        transformer = WanTransformer3DModel(
            patch_size=(canvas.num_frames, canvas.grid, canvas.grid),
            num_attention_heads=4,
            attention_head_dim=64,
            in_channels=1,
            out_channels=1,
            text_dim=TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=512,
            num_layers=1,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        )
        pipe: Any = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=tiny.umt5_text_encoder(tokenizer, TEXT_WIDTH),
            vae=tiny.halving_wan_vae(1),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=transformer,
        )
    with quiet():
        pipe.save_pretrained(folder)
