"""Likeness of edits to their source, by hand."""

import math

import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards import build
from mmrl.rollouts import Prompt, Sample

GREY, SIZE = 128 / 255, 16


def edited(*, changed=0.25, **metadata):
    """A grey source, and the same with its left half brighter by `changed`."""
    image = torch.full((3, SIZE, SIZE), GREY)
    image[:, :, : SIZE // 2] += changed
    source = Image.new("RGB", (SIZE * 2, SIZE * 2), (128, 128, 128))  # twice as large: it is scaled
    return Sample(Prompt("p", "brighter", images=(source,), metadata=metadata), image=image)


def test_all_pixels_count_without_a_mask():
    assert build("source_similarity")(edited()) == pytest.approx(1 - 0.25 / 2, abs=1e-6)
    psnr = build("source_similarity", {"measure": "psnr"})(edited())
    assert psnr == pytest.approx(-10 * math.log10(0.25**2 / 2), abs=1e-4)
    assert build("source_similarity", {"measure": "psnr"})(edited(changed=0.0)) == 60.0
    assert build("source_similarity", {"measure": "ssim"})(edited(changed=0.0)) == pytest.approx(1.0, abs=1e-6)


def test_what_may_change_is_left_out(tmp_path):
    left = Image.new("L", (SIZE, SIZE))
    left.paste(255, (0, 0, SIZE // 2, SIZE))
    left.save(tmp_path / "mask.png")
    l1 = build("source_similarity")
    for metadata in ({"mask": left}, {"mask": str(tmp_path / "mask.png")}, {"box": [0, 0, SIZE, 2 * SIZE]}):
        assert l1(edited(**metadata)) == pytest.approx(1.0, abs=1e-6)
    # A quarter may change, the box is in pixels of the source: a quarter of all is brighter, of three that count.
    assert l1(edited(box=[0, 0, SIZE, SIZE])) == pytest.approx(1 - 0.25 / 3, abs=1e-6)
    assert l1(edited(box=[0, 0, 2 * SIZE, 2 * SIZE])) is None


def test_structural_similarity_of_flat_images():
    """Without structure it is (2 a b + c) / (a^2 + b^2 + c); the half that counts is far from the edge but for 5
    pixels."""
    sample = edited(box=[0, 0, SIZE, 2 * SIZE])
    sample.image[:] = GREY + 0.25
    a, b, c = GREY, GREY + 0.25, 1e-4
    expected = (2 * a * b + c) / (a**2 + b**2 + c)
    assert build("source_similarity", {"measure": "ssim"})(sample) == pytest.approx(expected, abs=1e-4)


def test_what_can_not_be_compared_is_one_line(tmp_path):
    l1 = build("source_similarity")
    with pytest.raises(UserError, match="prompt 'p' has no image for source_similarity to compare with"):
        l1(Sample(Prompt("p", "x"), image=torch.zeros(3, 4, 4)))
    with pytest.raises(UserError, match="prompt 'p': its mask cannot be read"):
        l1(edited(mask=str(tmp_path / "none.png")))
    with pytest.raises(UserError, match=r"prompt 'p': its box is \[4, 0, 2, 8\]"):
        l1(edited(box=[4, 0, 2, 8]))
    with pytest.raises(ValueError, match="measure must be l1, psnr or ssim"):
        build("source_similarity", {"measure": "l2"})
    sample = edited()
    sample.image[0, 0, 0] = math.nan
    assert l1(sample) is None
