"""Tiny pipelines that are built in code: identity VAEs, text of unit scale, and their folders in diffusers."""

import pytest
import torch
from diffusers import FluxKontextPipeline, StableDiffusion3Pipeline, WanPipeline

from mmrl.policies.diffusion import pipelines, tiny
from mmrl.policies.diffusion.family import ConditionInputs
from mmrl.policies.diffusion.settings import DiffusionModel
from mmrl.tasks.data import moving_shapes
from mmrl.tasks.image_generation.data import edits
from mmrl.tasks.image_generation.tiny import pipeline
from mmrl.tasks.video_generation import tiny_pipeline as tiny_clips


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def test_the_identity_vae_gives_back_pixels_beyond_the_gamut_too():
    vae = tiny.identity_vae(3, 8)
    x = 6 * torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) - 3
    with torch.no_grad():
        torch.testing.assert_close(vae.encode(x).latent_dist.mode(), x, atol=2e-4, rtol=0)
        torch.testing.assert_close(vae.decode(x)[0], x, atol=2e-4, rtol=0)


def test_the_halving_vae_averages_and_repeats():
    vae = tiny.identity_vae(3, 8, halving=True)
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    means = torch.nn.functional.avg_pool2d(x, 2)
    with torch.no_grad():
        torch.testing.assert_close(vae.encode(x).latent_dist.mode(), means, atol=2e-5, rtol=0)
        repeated = means.repeat_interleave(2, 2).repeat_interleave(2, 3)
        torch.testing.assert_close(vae.decode(means)[0], repeated, atol=2e-5, rtol=0)


def test_the_halving_wan_vae_keeps_frames_apart():
    vae = tiny.halving_wan_vae()
    x = torch.rand(2, 3, 5, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    means = torch.nn.functional.avg_pool3d(x, (1, 2, 2))
    with torch.no_grad():
        torch.testing.assert_close(vae.encode(x).latent_dist.mode(), means, atol=2e-5, rtol=0)
        repeated = means.repeat_interleave(2, 3).repeat_interleave(2, 4)
        torch.testing.assert_close(vae.decode(means)[0], repeated, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("build", "kind", "text", "tokens", "size"),
    [
        (pipeline.build_digits, StableDiffusion3Pipeline, "draw a seven", 1, (None,)),
        (pipeline.build_edits, FluxKontextPipeline, "make the bar blue", 8, (16,)),
        (tiny_clips.build_moving_shapes, WanPipeline, "the ring moves up slowly", 10, (12, 5)),
    ],
)
def test_a_folder_is_of_the_users_class_and_its_words_have_unit_scale(build, kind, text, tokens, size, folder):
    path = folder / build.__name__
    build(str(path), seed=0)
    family = pipelines.load(str(path), DiffusionModel(text_tokens=tokens))
    assert isinstance(family.pipe, kind)
    assert sum(p.numel() for p in family.module.parameters()) < 3_000_000
    tokenizer = family.pipe.tokenizer
    assert tokenizer.unk_token_id not in tokenizer(text).input_ids
    shape = family.latent_shape(*size)
    images = edits.EditedShapes("all", size=1, seed=0)[0].images if kind is FluxKontextPipeline else ()
    condition = family.encode([ConditionInputs(text, images)], shape)[0]["encoder_hidden_states"]
    said = condition[: len(tokenizer(text).input_ids)]
    assert 0.7 < float(said.std()) < 1.4
    again = folder / "again"
    build(str(again), seed=0)
    same = pipelines.load(str(again), DiffusionModel(text_tokens=tokens)).module.state_dict()
    assert all(torch.equal(same[name], value) for name, value in family.module.state_dict().items())


def test_a_limit_takes_the_padding_away(folder):
    path = folder / "sd3"
    pipeline.build_digits(str(path), seed=0)
    lengths = [
        pipelines.load(str(path), DiffusionModel(text_tokens=n)).encode([ConditionInputs("draw a seven")])[0]
        for n in (None, 1)
    ]
    # twelve tokens of CLIP, and as many zeros as the third encoder, which is not there, would have given
    assert [len(c["encoder_hidden_states"]) for c in lengths] == [12 + 256, 12 + 1]


def test_clips_that_are_drawn_pass_the_vae_unchanged(folder):
    path = folder / "wan"
    tiny_clips.build_moving_shapes(str(path), seed=1)
    family = pipelines.load(str(path), DiffusionModel(text_tokens=10, decoding="whole"))
    source = moving_shapes.MovingShapes("all", size=8, seed=0)
    clips = torch.stack([source[i].metadata["target"] for i in range(8)])
    latents = family.to_latents(clips)
    assert latents.shape == (8, 1, 5, 6, 6)
    torch.testing.assert_close(family.decode(latents), clips, atol=1e-5, rtol=0)
