"""A tiny Wan pipeline for moving shapes, built in code: the class that users bring, at a laptop's size."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

from mmrl.policies.diffusion import tiny
from mmrl.policies.diffusion.families.components import quiet
from mmrl.tasks.data import moving_shapes

TEXT = 32  # width of the text encoder


def build_moving_shapes(folder: str, seed: int) -> None:
    """Writes a Wan for videos of 5 x 1 x 12 x 12, whose latents are 1 x 5 x 6 x 6.

    A video is one patch, and so one token: with a token a frame, Wan's positions, which are relative, do not let a
    network of this size learn in which direction something moves, and with quarters of the frames it learns more
    slowly. A patch has 180 numbers and the network is 256 wide: the noise of a patch has to pass through it, or videos
    stay noisy. Levels are shifted towards noise, as Wan's are: below a level of 0.6 nothing is left to decide.
    """
    canvas = moving_shapes.GENERATION_CANVAS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny.word_tokenizer(moving_shapes.words(), max_length=12)
        transformer = WanTransformer3DModel(
            patch_size=(canvas.frames, canvas.grid, canvas.grid),
            num_attention_heads=4,
            attention_head_dim=64,
            in_channels=1,
            out_channels=1,
            text_dim=TEXT,
            freq_dim=64,
            ffn_dim=512,
            num_layers=1,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        )
        pipe: Any = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=tiny.umt5_text_encoder(tokenizer, TEXT),
            vae=tiny.halving_wan_vae(1),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=transformer,
        )
    with quiet():
        pipe.save_pretrained(folder)
