"""Families that draw clips, edit images or take lists: against diffusers' own pipelines, and through the trainer."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image

from mmrl.errors import UserError
from mmrl.policies.diffusion import pipelines
from mmrl.policies.diffusion.conditions import PromptConditions
from mmrl.policies.diffusion.families import edits
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.policy import DiffusionPolicy
from mmrl.policies.diffusion.settings import Denoising, DiffusionModel, ImageMatching
from mmrl.rollouts import Prompt
from tests.helpers.tiny_video_pipelines import CLIPS, EDITS, MAKERS, built
from tests.whole_runs import parts
from tests.whole_runs.parts import Fixed, Questions, make, release

IMAGES = Path(parts.__file__).parent / "tiny_images.yaml"
TEXTS = ["two red cats on a box", "7"]
STEPS, SCALE, EMBEDDED = 3, 4.0, 3.5
SIDE = {"ltx": 32, "flux2": 64}  # diffusers asks for multiples of 32, and sources of at least 64 pixels
LATENTS = {
    "wan": (4, 5, 8, 8),
    "wan22": (4, 5, 8, 8),
    "ltx": (8, 2, 8, 8),
    "hunyuan": (4, 2, 2, 2),
    "kontext": (4, 8, 8),
    "qwen_edit": (4, 8, 8),
    "qwen_edit_plus": (4, 8, 8),
    "flux2": (16, 16, 16),
    "z_image": (4, 8, 8),
}


def source(seed=0, side=16):
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def asked(name, text, seed=0):
    return ConditionInputs.from_prompt(Prompt("p", text, (source(seed, SIDE.get(name, 16)),) if name in EDITS else ()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("pipelines")
    return lambda name: built(name, folder)


@pytest.fixture(scope="module")
def families(folders):
    loaded = {}

    def family(name):
        if name not in loaded:
            loaded[name] = pipelines.load(str(folders(name)), DiffusionModel())
        return loaded[name]

    return family


@pytest.fixture(autouse=True)
def small_sources(monkeypatch):
    """Qwen-Image-Edit enlarges its source to a megapixel; here it keeps its size."""
    monkeypatch.setattr(edits.qwen_edit, "calculate_dimensions", lambda area, ratio: (16, 16, None))
    monkeypatch.setattr(edits.qwen_edit_plus, "calculate_dimensions", lambda area, ratio: (16, 16))


def shape_of(name, family):
    shape = family.latent_shape(SIDE.get(name, 16), 5 if name in CLIPS else None)
    assert shape == LATENTS[name]
    return shape


def fixed_levels(sigmas):
    """A scheduler that takes these noise levels, whatever it is asked for."""

    class Fixed(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
            super().set_timesteps(sigmas=levels, device=device)

    levels = sigmas[:-1].tolist()
    return Fixed(shift=1.0)


def drawn(name, family, prompt, noise, guide):
    """One rollout of the shipped policy by deterministic steps, begun at `noise`: [1, ...] pixels."""
    side, frames = SIDE.get(name, 16), 5 if name in CLIPS else None
    keys = {"steps": STEPS, "evaluation_steps": STEPS, "resolution": side, "frames": frames}
    keys |= {"embedded_guidance": EMBEDDED, "guidance": SCALE if guide else 1.0}
    policy = DiffusionPolicy(family, Denoising(likelihood=ImageMatching(), **keys))
    policy.denoiser.initial_noise = lambda seeds, shape=None: noise
    (sample,) = policy.rollout([prompt], 1, [1]).samples
    return (sample.frames if name in CLIPS else sample.image)[None]


def run_diffusers(name, family, text, image, noise, guide):
    """The pipeline's own call, with the family's noise levels and the same noise."""
    pipe = family.pipe
    pipe.set_progress_bar_config(disable=True)
    kept, pipe.scheduler = pipe.scheduler, fixed_levels(family.grid(STEPS, tuple(noise.shape[1:])).sigmas)
    side = SIDE.get(name, 16)
    options = {"height": side, "width": side, "num_inference_steps": STEPS, "latents": noise, "output_type": "pt"}
    if name in CLIPS:
        options |= {"num_frames": 5, "guidance_scale": EMBEDDED if name == "hunyuan" else SCALE if guide else 1.0}
    if name == "ltx":
        options["latents"] = pipe._pack_latents(noise, 1, 1)
    if name in ("kontext", "qwen_edit", "qwen_edit_plus"):
        options |= {"image": image, "latents": pipe._pack_latents(noise, 1, *noise.shape[1:])}
    if name == "kontext":
        options |= {"max_area": side**2, "_auto_resize": False, "guidance_scale": EMBEDDED}
    if name.startswith("qwen"):
        options |= {"true_cfg_scale": SCALE, "negative_prompt": ""} if guide else {"true_cfg_scale": 1.0}
    if name == "flux2":
        options |= {"image": image, "guidance_scale": SCALE if guide else 1.0}
    if name == "z_image":
        options |= {"guidance_scale": SCALE - 1 if guide else 0.0}  # added to 1
    with torch.no_grad():
        made = pipe(prompt=text, **options)
    pipe.scheduler = kept
    return made.frames if name in CLIPS else made.images


@pytest.mark.parametrize("guide", [False, True], ids=["plain", "guided"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_chain_equals_the_pipelines(name, guide, families):
    if guide and name in ("hunyuan", "kontext"):
        pytest.skip("it takes its guidance as an input")
    family = families(name)
    shape = shape_of(name, family)
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    prompt = Prompt("p", TEXTS[0], asked(name, TEXTS[0]).images)
    mine = drawn(name, family, prompt, noise, guide)
    theirs = run_diffusers(name, family, TEXTS[0], prompt.images[0] if prompt.images else None, noise, guide)
    assert theirs.std() > 0.05
    torch.testing.assert_close(mine.clamp(0, 1), theirs.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_words_sources_and_time_matter_and_rows_do_not_depend_on_each_other(name, families):
    family = families(name)
    shape = shape_of(name, family)
    first, other = (family.encode([asked(name, text)], shape)[0] for text in TEXTS)
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)).repeat(3, *[1] * len(shape))
    time = torch.tensor([700.0, 700.0, 300.0])
    with torch.no_grad():
        both = family.predict(family.module, noise, time, [first, other, first], EMBEDDED)
        alone = family.predict(family.module, noise[:1], time[:1], [first], EMBEDDED)
    torch.testing.assert_close(both[:1], alone, atol=1e-5, rtol=1e-5)
    assert (both[1] - both[0]).abs().max() > 1e-3 and (both[2] - both[0]).abs().max() > 1e-3
    if name in EDITS:
        changed = family.encode([asked(name, TEXTS[0], seed=1)], shape)
        with torch.no_grad():
            moved = family.predict(family.module, noise[:1], time[:1], changed, EMBEDDED)
        assert (moved - alone).abs().max() > 1e-3


def task_of(name):
    task = Fixed(lambda sample: float((sample.frames if name in CLIPS else sample.image).mean()))
    images = (source(side=SIDE.get(name, 16)),) if name in EDITS else ()
    task.train = task.evaluation = Questions(Prompt(str(i), text, images) for i, text in enumerate(TEXTS * 2))
    return task


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.quick("wan", "flux2")
def test_lora_is_trained_on_policy_and_loads_in_the_pipeline(name, folders, tmp_path):
    """The ratio of the first update is exactly 1; what is saved changes the output of diffusers' own pipeline."""
    size = [f"denoising.resolution={SIDE.get(name, 16)}"] + (["denoising.frames=5"] if name in CLIPS else [])
    trainer = make(
        tmp_path / "run",
        "model.build=null",
        f"model.path={folders(name)}",
        "model.lora={rank: 2, alpha: 4}",
        "rollout.prompts=2",
        "rollout.group_size=2",
        "engine.micro_batch=2",
        "denoising.likelihood={window: {type: random, size: 2}}",
        "steps=2",
        "optim.lr=0.05",
        "task.type=tests.whole_runs.parts:Images",
        *size,
        task=task_of(name),
        base=IMAGES,
    )
    try:
        trainer.train()
    finally:
        release(trainer)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "loss" in row)
    assert first["surrogate/ratio_gap_max"] == 0.0
    assert first["grad_norm"] > 0
    pipe = DiffusionPipeline.from_pretrained(folders(name))
    network = pipe.components["transformer"]
    before = {key: value.clone() for key, value in network.state_dict().items()}
    pipe.load_lora_weights(tmp_path / "run" / "final")
    added = {key: value for key, value in network.state_dict().items() if "lora_B" in key}
    assert added and any(value.abs().max() > 0 for value in added.values()), sorted(before)[:3]
    family = pipelines.CLASSES[type(pipe).__name__](pipe, "")
    shape = shape_of(name, family)
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(3))
    condition = family.encode([asked(name, TEXTS[0])], shape)
    with torch.no_grad():
        changed = family.predict(network, noise, torch.tensor([500.0]), condition, EMBEDDED)
        pipe.disable_lora()
        plain = family.predict(network, noise, torch.tensor([500.0]), condition, EMBEDDED)
    assert (changed - plain).abs().max() > 1e-4


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "resolution", "frames", "message"),
        [
            ("ltx", 32, 6, "denoising.frames=6, but the model at model.path generates videos of 1, 5, 9, ... frames"),
            ("wan", 18, 5, "resolution 18 is not a multiple of 4"),
            ("kontext", 16, 5, "denoising.frames=5, but FluxKontextPipeline generates images"),
            ("flux2", 18, None, "resolution 18 is not a multiple of 4"),
        ],
    )
    def test_sizes(self, name, resolution, frames, message, families):
        with pytest.raises(UserError, match=message):
            families(name).latent_shape(resolution, frames)

    def test_sources(self, families):
        family = families("kontext")
        with pytest.raises(UserError, match="has 0 images, but editing needs exactly one"):
            family.encode([ConditionInputs("make it blue")], (4, 8, 8))
        with pytest.raises(UserError, match="its image has 20 x 20 pixels, but denoising.resolution is 16 x 16"):
            family.encode([ConditionInputs.from_prompt(Prompt("p", "make it blue", (source(side=20),)))], (4, 8, 8))
        with pytest.raises(UserError, match="has an image, but WanPipeline takes only text"):
            families("wan").encode([ConditionInputs.from_prompt(Prompt("p", "blue", (source(),)))], (4, 5, 8, 8))
        with pytest.raises(UserError, match="some prompts of a batch have an image to edit and some have none"):
            made = families("flux2").encode([ConditionInputs("a"), asked("flux2", "a")], LATENTS["flux2"])
            families("flux2").predict(None, torch.zeros(2, *LATENTS["flux2"]), torch.ones(2), made, None)

    def test_a_limit_of_tokens_cuts_and_is_counted(self, folders):
        family = pipelines.load(str(folders("wan")), DiffusionModel(text_tokens=4))
        assert family.encode([ConditionInputs("abc")])[0]["encoder_hidden_states"].shape[0] == 4
        assert family.truncated_tokens("abcdefgh") == 6  # with the word's mark and the end it is ten tokens
        assert family.truncated_tokens("a") == 0


def test_an_edit_is_encoded_for_each_shape_and_a_text_once():
    """A source image is resized to the shape of the latents; what a text says does not depend on it."""
    encoded = []

    def encode(inputs, shape):
        encoded.append(([item.text for item in inputs], shape))
        return [{"of": (item.text, shape)} for item in inputs]

    conditions = PromptConditions(SimpleNamespace(encode=encode, truncated_tokens=lambda text: 0), capacity=8)
    edit, text = asked("kontext", "a", seed=0), ConditionInputs("b")
    for shape in ((4, 8, 8), (4, 16, 16), (4, 8, 8)):
        found = conditions.encode([edit, text], shape)
        assert found[0] == {"of": ("a", shape)} and found[1] == {"of": ("b", (4, 8, 8))}
    assert encoded == [(["a", "b"], (4, 8, 8)), (["a"], (4, 16, 16))]


def test_two_images_of_one_prompt_are_two_conditions():
    one, other = asked("kontext", "a", seed=0), asked("kontext", "a", seed=1)
    assert one != other and one == asked("kontext", "a", seed=0) and one.with_text("b") != one
    assert one.with_text("b").images == one.images
