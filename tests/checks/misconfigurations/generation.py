"""Images and videos by diffusion: what users of pipelines, prompt files and rewards of images bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.checks.misconfigurations.parts import Case, Written, row, write_config, write_lines, write_module

GITHUB = "https://github.com"
COLOURS = ("red", "green", "blue", "white")
THINGS = ("cup", "box", "car", "hat", "key")
TRAIN = [f"a {colour} {thing}" for colour in COLOURS for thing in THINGS[:3]]
HELD_OUT = [f"a {colour} {thing}" for colour in COLOURS for thing in THINGS[3:]]
REWARD = '''"""A reward of the user's own: how bright an image is."""


def brightness(sample):
    return float(sample.image.float().mean())
'''
Tree = dict[str, Any]


def pipeline(folder: Path, name: str = "sd3", change: Callable[[Any], None] | None = None) -> Tree:
    """Writes a tiny random pipeline, changed; a section that names it."""
    from tests.helpers import tiny_pipelines, tiny_video_pipelines

    makers = tiny_pipelines.MAKERS | tiny_video_pipelines.MAKERS

    def make() -> Any:
        made = makers[name]()
        if change is not None:
            change(made)
        return made

    tiny_pipelines.write(make, folder / "model")
    return {"model": {"path": str(folder / "model")}}


def base(folder: Path, case: str) -> Tree:
    """A configuration that trains: a pipeline, files of prompts, a reward of the user's own."""
    reward = {"name": f"{write_module(folder, case, REWARD)}:brightness"}
    data = {"type": "prompts", "train": str(folder / "train.txt"), "eval": str(folder / "eval.txt")}
    write_lines(folder / "train.txt", TRAIN)
    write_lines(folder / "eval.txt", HELD_OUT)
    return {
        "model": {"type": "diffusion"},
        "task": {"type": "image_generation", "data": data, "rewards": [reward], "accuracy": reward},
        "denoising": {"steps": 4, "evaluation_steps": 4, "resolution": 16},
    }


def written(folder: Path, case: str, *trees: Tree, name: str = "sd3", change: Callable[[Any], None] | None = None):
    return write_config(folder, base(folder, case), pipeline(folder, name, change), *trees)


def changed(case: str, *trees: Tree, **options: Any) -> Callable[[Path], Written]:
    """Writes the base with some keys changed."""
    return lambda folder: written(folder, case, *trees, **options)


# --- pipelines ---


def other_flow_scheduler(pipe: Any) -> None:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe.register_modules(scheduler=scheduler)


def zero_terminal_snr(pipe: Any) -> None:
    from diffusers import DDIMScheduler

    told = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    spaced = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    pipe.register_modules(scheduler=DDIMScheduler(**told, **spaced, prediction_type="epsilon"))


def halved_time(pipe: Any) -> None:
    """Replaces Wan's VAE by one that takes two frames as one."""
    from diffusers import AutoencoderKLWan

    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True]}
    scales = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = AutoencoderKLWan(**sizes, **scales, scale_factor_temporal=2, scale_factor_spatial=2)
    pipe.register_modules(vae=vae)
    pipe.vae_scale_factor_temporal = 2


NOISE_PREDICTING: Tree = {"denoising": {"likelihood": {"transition": {"type": "ddim", "noise": 1.0}}}}


def end_of_a_prompt_is_cut_off(folder: Path) -> Written:
    made = written(folder, "end_of_a_prompt_is_cut_off", NOISE_PREDICTING, name="sd15")
    prompts = list(TRAIN)
    prompts[5] = "on a wooden table beside an open window in the morning, a blue car"
    write_lines(folder / "train.txt", prompts)
    return made


def videos(folder: Path, case: str, frames: int) -> Written:
    text = '''"""A reward of the user's own: how bright a video is."""


def brightness(sample):
    return float(sample.frames.float().mean())
'''
    made = base(folder, case)
    reward = {"name": f"{write_module(folder, case, text)}:brightness"}
    task = {"type": "video_generation", "rewards": [reward], "accuracy": reward}
    return write_config(
        folder, made, pipeline(folder, "wan", halved_time), {"task": task, "denoising": {"frames": frames}}
    )


# --- prompts ---


def ocr_prompt_without_quotes(folder: Path) -> Written:
    made = written(folder, "ocr_prompt_without_quotes", {"task": {"data": {"format": "ocr"}}})
    write_lines(folder / "train.txt", [f'a sign "{n}"' if n != 3 else "a sign that says 3" for n in range(1, 13)])
    write_lines(folder / "eval.txt", [f'a sign "{n}"' for n in range(13, 21)])
    return made


def geneval_row_without_objects(folder: Path) -> Written:
    def asked(colour: str, thing: str) -> Tree:
        include = [{"class": thing, "count": 1, "color": colour}]
        return {"tag": "colors", "include": include, "prompt": f"a {colour} {thing}"}

    data = {"format": "geneval", "train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")}
    rows = [asked(colour, thing) for colour in COLOURS for thing in ("cup", "car")]
    rows[3].pop("include")
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "eval.jsonl", [asked(colour, "book") for colour in COLOURS])
    return written(folder, "geneval_row_without_objects", {"task": {"data": data}})


def prompts_under_another_key(folder: Path) -> Written:
    data = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")}
    write_lines(folder / "train.jsonl", [{"t2i_words": text, "level": 1} for text in TRAIN])
    write_lines(folder / "eval.jsonl", [{"t2i_words": text, "level": 1} for text in HELD_OUT])
    return written(folder, "prompts_under_another_key", {"task": {"data": data}})


def held_out_prompts_are_trained_on(folder: Path) -> Written:
    made = written(folder, "held_out_prompts_are_trained_on")
    write_lines(folder / "eval.txt", TRAIN[4:])
    return made


def alike_pairs(folder: Path) -> Written:
    """Row 4 shows one image as the better and the worse one."""
    names = []
    for number in range(8):
        for kind, shade in (("good", 200), ("bad", 60)):
            Image.new("RGB", (16, 16), (shade, 8 * number, 90)).save(folder / f"{kind}{number}.png")
        names.append({"prompt": TRAIN[number], "chosen": f"good{number}.png", "rejected": f"bad{number}.png"})
    names[3]["rejected"] = names[3]["chosen"]
    write_lines(folder / "train.jsonl", names)
    made = base(folder, "alike_pairs")
    made["task"]["data"] = {"type": "pairs", "train": str(folder / "train.jsonl"), "eval": str(folder / "eval.txt")}
    rest = {"algorithm": {"type": "offline_preference"}}
    return write_config(folder, made, pipeline(folder), rest, without=("rollout.group_size", "denoising.steps"))


# --- rewards ---


def constant_reward(folder: Path) -> Written:
    made = written(folder, "constant_reward")
    text = '''"""A reward whose scale is wrong: images have values in 0 .. 1, and it expects 0 .. 255."""


def brightness(sample):
    return float(sample.image.float().mean() / 255 > 0.5)
'''
    write_module(folder, "constant_reward", text)
    return made


def reward_model_that_is_not_there(folder: Path) -> Written:
    options = {"model": str(folder / "clip-vit-large")}
    rewards = {"task": {"rewards": [{"name": "clip_similarity", "options": options}]}}
    return written(folder, "reward_model_that_is_not_there", rewards)


def reward_server_that_is_down(folder: Path) -> Written:
    options = {"url": "http://127.0.0.1:9/score", "retries": 0}
    rewards = {"task": {"rewards": [{"name": "http", "options": options}]}}
    return written(folder, "reward_server_that_is_down", rewards)


CASES = (
    Case(
        "side_that_patches_do_not_divide",
        "generation",
        changed("side_that_patches_do_not_divide", {"denoising": {"resolution": 18}}),
        ("resolution", "18"),
        source=f"{GITHUB}/huggingface/diffusers/pull/9573",
    ),
    Case(
        "side_beyond_the_position_table",
        "generation",
        changed("side_beyond_the_position_table", {"denoising": {"resolution": 64}}),
        ("resolution", "64"),
    ),
    Case(
        "flow_scheduler_of_another_class",
        "generation",
        changed("flow_scheduler_of_another_class", change=other_flow_scheduler),
        ("UniPCMultistepScheduler",),
        source=f"{GITHUB}/huggingface/diffusers/issues/12108",
    ),
    Case(
        "zero_terminal_snr_of_predicted_noise",
        "generation",
        changed("zero_terminal_snr_of_predicted_noise", NOISE_PREDICTING, name="sd15", change=zero_terminal_snr),
        (
            ("rescale_betas_zero_snr", "zero terminal", "zero SNR", "zero-SNR"),
            ("epsilon", "prediction_type", "predicts noise", "predicted noise"),
        ),
        source=f"{GITHUB}/huggingface/diffusers/issues/3851",
    ),
    Case(
        "guidance_of_a_distilled_model",
        "generation",
        changed("guidance_of_a_distilled_model", {"denoising": {"guidance": 3.5}}, name="flux_schnell"),
        ("denoising.guidance",),
        "warned",
        f"{GITHUB}/black-forest-labs/flux/issues/63",
    ),
    Case(
        "end_of_a_prompt_is_cut_off",
        "generation",
        end_of_a_prompt_is_cut_off,
        (row(6), ("token", "tokens", "cut", "long")),
        "warned",
        f"{GITHUB}/huggingface/diffusers/issues/5890",
    ),
    Case(
        "frames_that_the_vae_does_not_take",
        "generation",
        lambda folder: videos(folder, "frames_that_the_vae_does_not_take", 6),
        ("denoising.frames", "6"),
        source=f"{GITHUB}/huggingface/diffusers/pull/11167",
    ),
    Case(
        "ocr_prompt_without_quotes",
        "generation",
        ocr_prompt_without_quotes,
        (row(3), "quotes"),
        source=f"{GITHUB}/X-GenGroup/Flow-Factory/issues/125",
    ),
    Case("geneval_row_without_objects", "generation", geneval_row_without_objects, (row(4), "include")),
    Case("prompts_under_another_key", "generation", prompts_under_another_key, ("prompt", "t2i_words")),
    Case(
        "held_out_prompts_are_trained_on",
        "generation",
        held_out_prompts_are_trained_on,
        (("held-out", "task.data.eval"), "8"),
        "warned",
        f"{GITHUB}/OpenRLHF/OpenRLHF/issues/1089",
    ),
    Case("alike_pairs", "generation", alike_pairs, (row(4), "chosen", "rejected"), "warned"),
    Case(
        "constant_reward",
        "generation",
        constant_reward,
        ("own_constant_reward:brightness", ("same", "constant", "equal", "alike", "differ", "tell apart")),
        "warned",
        f"{GITHUB}/modelscope/ms-swift/issues/4512",
    ),
    Case(
        "reward_model_that_is_not_there",
        "generation",
        reward_model_that_is_not_there,
        ("clip_similarity", "clip-vit-large"),
    ),
    Case("reward_server_that_is_down", "generation", reward_server_that_is_down, ("127.0.0.1:9",)),
    Case(
        "key_of_diffusers",
        "generation",
        changed("key_of_diffusers", {"denoising": {"guidance_scale": 4.5}}),
        ("guidance_scale", "denoising.guidance"),
        in_config=True,
    ),
)
