"""Pairs of images from files, and those of digits."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.tasks.image_generation.data.digits import DigitPromptSource, _digits
from mmrl.tasks.image_generation.settings import PairsData


@pytest.fixture
def folder(tmp_path):
    for name, level, size in (("good", 255, 8), ("bad", 51, 8), ("large", 0, 16)):
        Image.fromarray(np.full((size, size), level, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    (tmp_path / "eval.txt").write_text("a page\n")
    (tmp_path / "broken.png").write_text("no image")
    return tmp_path


def pairs(folder, *rows, **options):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PairsData(train=path, eval=folder / "eval.txt", **options).sources(0)[0]


ROW = {"prompt": "a page", "chosen": "good.png", "rejected": "bad.png"}


def test_a_row_is_two_images(folder):
    source = pairs(folder, ROW, grey=True)
    metadata = source[0].metadata
    assert metadata["target"].shape == metadata["rejected"].shape == (1, 8, 8)
    assert metadata["target"].unique().tolist() == [1.0] and torch.allclose(metadata["rejected"], torch.tensor(0.2))
    assert pairs(folder, ROW)[0].metadata["target"].shape == (3, 8, 8)
    assert len(source) == 1 and source[0].text == "a page"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected": 3}, "row pairs:1: key 'rejected' must be the path of an image"),
        ({"chosen": "../good.png"}, "lies outside of"),
        ({"chosen": "none.png"}, "there is no file"),
    ],
)
def test_bad_rows_are_named_at_the_start(folder, change, message):
    with pytest.raises(ValueError, match=message):
        pairs(folder, ROW | change)


def test_bad_images_are_named(folder):
    with pytest.raises(UserError, match=r"row pairs:1: chosen has the shape \[3, 8, 8\], rejected \[3, 16, 16\]"):
        pairs(folder, ROW | {"rejected": "large.png"})[0]
    with pytest.raises(UserError, match=r"row pairs:1: cannot read the image .*broken.png"):
        pairs(folder, ROW | {"rejected": "broken.png"})[0]
    (folder / "eval2.txt").write_text("x\n")
    with pytest.raises(ValueError, match="row eval2:1: key 'chosen' must be the path of an image"):
        PairsData(train=folder / "eval2.txt", eval=folder / "eval.txt").sources(0)


def test_a_rejected_digit_is_another_one_and_changes_nothing_else():
    plain, paired = (DigitPromptSource(size=60, seed=0, rejected=on) for on in (False, True))
    images, labels = _digits()
    for i in range(60):
        metadata = paired[i].metadata
        assert metadata["image"] == plain[i].metadata["image"] and "rejected" not in plain[i].metadata
        shown = int((images == metadata["rejected"]).flatten(1).all(1).nonzero()[0])
        assert labels[shown] != i % 10
