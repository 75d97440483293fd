"""Features of images that a frozen vision tower computed once: likelihoods and gradients are those of a tower that
computes them each time, and the tower reads each image of a step once."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from mmrl.policies.settings import LoRA
from mmrl.policies.vlm.loading import images_are_frozen, part_of
from mmrl.policies.vlm.responses.features import ImageFeatures, compute_features, num_crops
from mmrl.policies.vlm.responses.runner import Lockstep
from mmrl.policies.vlm.scorer import transformers_model
from mmrl.rollouts import Prompt, Rollouts
from tests.helpers.tiny_models import FAMILIES
from tests.policies.conftest import PROMPTS, configured, image, loaded

FROZEN = ["vision", "connector"]
OTHER = Prompt("other", "Which digit? <image>", (image(40, 24),), answer="7")


def frozen(folder, **options):
    return loaded(folder, max_response_length=7, freeze=FROZEN, **options)


def towers(policy):
    """The modules that read pixels, each with the number of images or crops of each call."""
    calls, base = [], policy.runner.core.base_model
    (name,) = {"visual", "vision_model", "vision_tower"} & {child for child, _ in base.named_children()}
    tower = base.get_submodule(name)

    def count(_, args, kwargs):
        grid = kwargs.get("grid_thw")
        pixels = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]
        calls.append(len(pixels if grid is None else grid))

    tower.register_forward_pre_hook(count, with_kwargs=True)
    return calls


def scored(policy, rollouts):
    """Log-probabilities, and the gradients of their weighted sum."""
    policy.module.zero_grad()
    logp = policy.replay(rollouts, policy.module).logp
    (logp * torch.arange(1.0, logp.numel() + 1).view_as(logp)).sum().backward()
    return logp.detach(), {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_likelihoods_and_gradients_are_those_of_pixels(folders, family):
    policy = frozen(folders[family])
    assert policy.module.reuses_features
    # two images, none, one, and one of another size; two responses each
    rollouts = policy.rollout([*PROMPTS, OTHER], 2, range(8))
    found, gradients = scored(policy, rollouts)
    again, _ = scored(policy, rollouts)
    policy.module.reuses_features = False
    expected, expected_gradients = scored(policy, rollouts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, found)  # the same features, to the bit: the first ratio of a step is exactly 1
    assert gradients.keys() == expected_gradients.keys() and not any("visual" in name for name in gradients)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_image_has_its_own_features(folders, family):
    policy = frozen(folders[family])
    core = policy.runner.core
    parts = [row.images for row in policy.demonstrate([PROMPTS[0], OTHER, PROMPTS[2]]).inputs]
    together = compute_features(core, parts)
    for part, features in zip(parts, together, strict=True):
        (alone,) = compute_features(core, [part])
        assert len(alone.pooled) == len(features.pooled) > 0 and len(alone.deeper) == len(features.deeper)
        for one, other in zip(alone.pooled, features.pooled, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        for layer, other_layer in zip(alone.deeper, features.deeper, strict=True):
            for one, other in zip(layer, other_layer, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    first, second = together[1].pooled, together[2].pooled
    assert first[0].shape != second[0].shape or not torch.allclose(first[0], second[0], atol=1e-3)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_tower_reads_each_image_of_a_step_once(folders, family):
    policy = frozen(folders[family])
    calls = towers(policy)
    rollouts = policy.rollout([PROMPTS[0], OTHER], 3, range(6))
    policy.runner.should_pack = lambda lengths: True
    # minibatches as in an update: old log-probabilities of all, then rows of both prompts in two orders
    for rows in ([0, 1, 2, 3, 4, 5], [5, 0], [3, 1, 2, 4], [0, 3]):
        policy.replay(rollouts.select(torch.tensor(rows)), policy.module)
    assert calls == [3]  # two images of the first prompt and one of the second
    policy.replay(policy.view(rollouts.select(torch.tensor([0])), lambda _: OTHER), policy.module)
    assert calls == [3, 1]  # another prompt is encoded anew, with images of its own
    policy.module.reuses_features = False
    policy.replay(rollouts, policy.module)
    assert sum(calls[2:]) in (3, 9)  # with prompts shared, or one for each row


def test_features_go_with_the_rollouts(folders):
    policy = frozen(folders["qwen2_5_vl"])
    rollouts = policy.rollout([PROMPTS[0], OTHER], 2, range(4))
    policy.replay(rollouts, policy.module)
    assert len(policy.module.features) == 2
    one = rollouts.select(torch.tensor([2, 3]))
    del rollouts
    gc.collect()
    assert len(policy.module.features) == 1
    del one
    gc.collect()
    assert len(policy.module.features) == 0


def test_observations_have_features_too(folders):
    policy = frozen(folders["qwen2_5_vl"])
    rollouts = policy.rollout([PROMPTS[0], PROMPTS[1]], 1, range(2))
    seen = policy.demonstrate([OTHER]).inputs[0].without_response()
    rows = [row.with_observation(seen) for row in rollouts.inputs]
    mask = torch.nn.utils.rnn.pad_sequence([row.decision_mask for row in rows], batch_first=True)
    shown = Rollouts(rollouts.samples, rows, rollouts.group, mask)
    found = policy.replay(shown, policy.module).logp
    policy.module.reuses_features = False
    expected = policy.replay(shown, policy.module).logp
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_nothing_is_kept_where_images_are_trained(folders):
    folder = folders["qwen2_5_vl"]
    assert not loaded(folder).module.reuses_features
    assert not loaded(folder, freeze=["vision"]).module.reuses_features  # its merger is trained
    assert not loaded(folder, freeze=["connector"]).module.reuses_features
    everywhere = loaded(folder, lora=LoRA(rank=2, targets="all-linear"))
    assert any(part_of(n) == "vision" and p.requires_grad for n, p in everywhere.module.named_parameters())
    assert not everywhere.module.reuses_features
    # a frozen LoRA in the tower: the reference policy switches it off, and its features are others
    both = loaded(folder, lora=LoRA(rank=2, targets="all-linear"), freeze=FROZEN)
    assert not both.module.reuses_features and not images_are_frozen(transformers_model(both.module.model))
    language = loaded(folder, lora=LoRA(rank=2, targets=r".*language_model.*(q|v)_proj"))
    assert language.module.reuses_features


def test_it_is_off_where_the_engine_says_so(folders):
    config = configured(folders["qwen2_5_vl"], freeze=FROZEN)
    engine = config.engine.model_copy(update={"reuse_features": False})
    on, off = (c.model.load(c, None, c.model.path) for c in (config, config.model_copy(update={"engine": engine})))
    assert on.module.reuses_features and not off.module.reuses_features


def test_crops_of_padding_are_not_counted():
    pixels = torch.zeros(1, 3, 3, 2, 2)
    pixels[0, :2] = 0.5
    assert num_crops({"pixel_values": pixels}) == 2 and num_crops({"pixel_values": torch.zeros(4, 3, 2, 2)}) == 4


def test_pixels_are_read_where_ranks_run_the_tower_together_and_beside_videos(folders):
    policy = frozen(folders["qwen2_5_vl"])
    rows = policy.demonstrate([OTHER, PROMPTS[1]]).inputs
    images = policy.runner.reusable_images(rows)
    assert len(images) == 1 and torch.equal(images[0]["pixel_values"], rows[0].images["pixel_values"])
    assert policy.runner.reusable_images(rows[1:]) is None  # no image
    video = replace(rows[1], images={"pixel_values_videos": torch.ones(4, 3)})
    assert policy.runner.reusable_images([rows[0], video]) is None
    policy.runner.lockstep = Lockstep(max=lambda number: number, gather_weights=nullcontext)  # as under ZeRO-3
    assert policy.runner.reusable_images(rows) is None


class Tower:
    """A tower whose images of one patch have as features their pixel, and its tenfold and hundredfold in two layers."""

    def get_image_features(self, pixel_values, image_grid_thw, return_dict):
        parts = tuple(pixel_values.split(1))
        deeper = [[10 * part for part in parts], [100 * part for part in parts]]
        return BaseModelOutputWithDeepstackFeatures(pooler_output=parts, deepstack_features=deeper)


def test_every_layer_gets_the_features_of_all_images_in_their_order():
    core = SimpleNamespace(base_model=Tower(), device="cpu")
    two, one = (
        {"pixel_values": torch.tensor(pixels), "image_grid_thw": torch.ones(len(pixels), 3, dtype=torch.int64)}
        for pixels in ([[1.0], [2.0]], [[3.0]])
    )
    features = ImageFeatures()
    features.inputs(core, [one])
    image = features.inputs(core, [two, one, two])["mm_encoder_outputs"]["image"]
    expected = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0])[:, None]
    assert torch.equal(torch.cat(image.pooler_output), expected)
    assert [torch.cat(layer).tolist() for layer in image.deepstack_features] == [
        (10 * expected).tolist(),
        (100 * expected).tolist(),
    ]
