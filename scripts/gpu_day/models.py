"""Writes models with random weights and the sizes of published ones, and data for jobs with them.

`python -m scripts.gpu_day.models {language,images} FOLDER [--small]` writes FOLDER/model and FOLDER/data.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration

from mmrl.policies.diffusion import embeddings, tiny
from mmrl.policies.diffusion import memory_estimate as images
from mmrl.policies.diffusion.families.images import StableDiffusion3
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.vlm import memory_estimate as language
from mmrl.policies.vlm.tiny_qwen import END, VISION, Sizes, build_processor, train_tokenizer
from mmrl.tasks.visual_qa.tiny.model import build as build_tiny

QWEN = "Qwen/Qwen2.5-VL-3B-Instruct"
SD35 = "stabilityai/stable-diffusion-3.5-medium"
SYLLABLES = [
    "ba",
    "ce",
    "di",
    "fo",
    "gu",
    "ha",
    "je",
    "ki",
    "lo",
    "mu",
    "na",
    "pe",
    "ri",
    "so",
    "tu",
    "va",
    "we",
    "xi",
    "yo",
    "zu",
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def words(number: int, draw: random.Random) -> str:
    return " ".join("".join(draw.choices(SYLLABLES, k=draw.randint(1, 3))) for _ in range(number))


def write_language(folder: Path, small: bool) -> None:
    """Writes a Qwen2.5-VL in the shape of the 3B model in bfloat16, or mmrl's tiny one."""
    if small:
        build_tiny(folder)
        return
    draw = random.Random(0)
    tokenizer = train_tokenizer([words(50, draw) for _ in range(200)], 2000)
    tokenizer.add_tokens([f"<x{i}>" for i in range(151_665 - len(tokenizer))])  # ids without a token are suppressed
    config: Any = language.model_config(QWEN)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in VISION]
    config.vision_start_token_id, config.vision_end_token_id, config.image_token_id, config.video_token_id = ids
    for part in (config, config.text_config):
        part.eos_token_id, part.pad_token_id = tokenizer.convert_tokens_to_ids(END), tokenizer.pad_token_id
        part.bos_token_id = None
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2_5_VLForConditionalGeneration(config)
        torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.model_max_length = 32_768
    build_processor(tokenizer, Sizes(patch=14, merge=2, max_patches=4096)).save_pretrained(folder)


def write_questions(folder: Path, small: bool) -> Path:
    """Writes 64 questions of 50 to 450 words about a picture of 476 x 476 pixels, which is 289 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, noise = random.Random(1), np.random.default_rng(1)
    side, most = (16, 6) if small else (476, 450)
    rows = []
    for i in range(64):
        Image.fromarray(noise.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        text = words(draw.randint(most // 9 + 1, most), draw)
        rows.append({"problem": f"<image>{text}", "answer": str(i), "images": [f"{i}.png"]})
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_images(folder: Path, small: bool) -> None:
    """Writes a Stable Diffusion 3.5 in the shape of the medium model without text encoders, or a tiny one."""
    parts = images.PUBLISHED[SD35][1]
    shape: dict[str, Any] = dict(parts["transformer"][1])
    vae: dict[str, Any] = dict(parts["vae"][1])
    if small:
        shape |= {
            "num_layers": 2,
            "num_attention_heads": 2,
            "caption_projection_dim": 128,
            "dual_attention_layers": (0,),
        }
        vae |= {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
    with torch.device(DEVICE):
        transformer = SD3Transformer2DModel(**shape).to(torch.bfloat16)
        autoencoder = AutoencoderKL(**vae)
    pipe: Any = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder,
        text_encoder=None,
        tokenizer=tiny.word_tokenizer(SYLLABLES, max_length=77),
        text_encoder_2=None,
        tokenizer_2=tiny.word_tokenizer(SYLLABLES, max_length=77),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    diffusers.utils.logging.set_verbosity_error()
    pipe.save_pretrained(folder)


def write_prompts(folder: Path, model: Path, resolution: int) -> Path:
    """Writes 32 prompts and random embeddings of them and of the empty negative prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(2)
    prompts = [words(8, draw) for _ in range(32)]
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    absent = dict.fromkeys([*StableDiffusion3.encoders, "image_encoder", "feature_extractor", "tokenizer_3"])
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(model, **absent)
    family = StableDiffusion3(pipe, str(model))
    shape = family.latent_shape(resolution, None)
    condition = family.meta_condition(shape)
    tensors, files = {}, {}
    for text in [*prompts, ""]:
        key = embeddings.condition_key(ConditionInputs(text), shape)
        files[key] = "embeddings-00000.safetensors"
        tensors |= {f"{key}.{name}": torch.randn(meta.shape) for name, meta in condition.items()}
    save_file(tensors, folder / "embeddings-00000.safetensors")
    index = {"pipeline": "StableDiffusion3Pipeline", "text_tokens": family.text_tokens, "files": files}
    (folder / embeddings.INDEX).write_text(json.dumps(index))
    return folder / "prompts.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["language", "images"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    model, data = options.folder / "model", options.folder / "data"
    if options.kind == "language":
        write_language(model, options.small)
        write_questions(data, options.small)
    else:
        write_images(model, options.small)
        write_prompts(data, model, 64 if options.small else 512)


if __name__ == "__main__":
    main()
