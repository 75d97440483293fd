import numpy as np
import pytest

from mmrl.tasks.visual_qa.data.digits import CELL, KINDS, POSITIONS, DigitsSource, digit_images, split_indices
from tests.tasks.choosing import build


def expected(prompt):
    """The answer, from the metadata alone and in other words than the source's."""
    digits, kind, place = prompt.metadata["digits"], prompt.metadata["kind"], prompt.metadata["place"]
    if kind == "which":
        return {"left": digits[0], "middle": digits[1], "right": digits[2]}[place]
    if kind == "where":
        asked = int(prompt.text.removeprefix("Where is the ").removesuffix("?"))
        (spot,) = [i for i in range(3) if digits[i] == asked]  # fails to unpack where the digit stands twice
        return ("left", "middle", "right")[spot]
    return {
        "sum": digits[0] + digits[1] + digits[2],
        "largest": sorted(digits)[2],
        "above_five": len([d for d in digits if d in (6, 7, 8, 9)]),
    }[kind]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_follow_from_the_metadata(split):
    for prompt in (source := DigitsSource(split, size=1000, seed=3)):
        assert prompt.answer == str(expected(prompt)), prompt
        if prompt.metadata["kind"] == "which":
            assert prompt.metadata["place"] in prompt.text
    assert len({source[i].id for i in range(1000)}) == 1000


def test_splits_share_no_image_and_hold_every_digit():
    train, heldout = split_indices("train"), split_indices("heldout")
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 1797
    assert 0.24 < len(heldout) / 1797 < 0.26
    labels = digit_images()[1].tolist()
    assert heldout.tolist() == [i for i, label in enumerate(labels) if labels[:i].count(label) % 4 == 3]
    shown = {
        split: {image for p in DigitsSource(split, size=2000, seed=0) for image in p.metadata["images"]}
        for split in ("train", "heldout")
    }
    assert shown["heldout"] == set(heldout.tolist())  # 6000 draws of 446 images: all are seen
    assert shown["train"] <= set(train.tolist())


def test_image_shows_the_named_digits():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    prompt = DigitsSource(size=1, seed=0)[0]
    (image,) = prompt.images
    assert (image.mode, image.size) == ("RGB", (24, 8))
    grey = np.asarray(image)[:, :, 0]
    for cell, (image, digit) in enumerate(zip(prompt.metadata["images"], prompt.metadata["digits"], strict=True)):
        assert bunch.target[image] == digit
        shown = grey[:, cell * CELL : (cell + 1) * CELL].astype(float) * 16 / 255
        assert np.abs(shown - bunch.images[image]).max() < 0.04  # within rounding to 8 bits


def test_item_depends_on_split_seed_and_index_only():
    one, other = DigitsSource(size=50, seed=7), DigitsSource(size=9, seed=7)
    assert [one[i] for i in range(9)] == [other[i] for i in range(9)]
    assert one[4].images[0].tobytes() == other[4].images[0].tobytes()
    assert one[0].metadata["images"] != DigitsSource(size=9, seed=8)[0].metadata["images"]
    ranks = [np.flatnonzero(split_indices(s) == DigitsSource(s, size=1, seed=7)[0].metadata["images"][0])
             for s in ("train", "heldout")]  # fmt: skip
    assert ranks[0] != ranks[1]  # the splits draw from different streams, not one stream over two pools


def test_kinds_are_balanced_and_answers_are_not_constant():
    prompts = list(DigitsSource(size=502, seed=1))
    counts = [sum(p.metadata["kind"] == kind for p in prompts) for kind in KINDS]
    assert counts == [101, 101, 100, 100, 100]
    for kind in KINDS:
        assert len({p.answer for p in prompts if p.metadata["kind"] == kind}) >= 3
    only = DigitsSource(size=10, seed=1, kinds=("sum",))
    assert {p.metadata["kind"] for p in only} == {"sum"}


def test_careless_demonstrations_are_one_too_high_and_change_nothing_else():
    right, careless, always = (DigitsSource(size=1000, seed=2, wrong_share=share) for share in (0.0, 0.4, 1.0))
    numeric, wrong = 0, 0
    for sure, some, every in zip(right, careless, always, strict=True):
        for prompt in (some, every):
            assert (prompt.text, prompt.answer, prompt.id) == (sure.text, sure.answer, sure.id)
            assert prompt.images[0].tobytes() == sure.images[0].tobytes()
        assert sure.metadata["demonstration"] == sure.answer
        if sure.metadata["kind"] == "where":
            assert some.metadata["demonstration"] == every.metadata["demonstration"] == sure.answer
        else:
            too_high = str(int(sure.answer) + 1)
            assert every.metadata["demonstration"] == too_high
            assert some.metadata["demonstration"] in (sure.answer, too_high)
            numeric, wrong = numeric + 1, wrong + (some.metadata["demonstration"] == too_high)
    assert numeric == 800 and abs(wrong / numeric - 0.4) < 0.07  # four standard deviations


def test_held_out_demonstrations_are_never_careless():
    task = build("visual_qa", {"data": {"type": "digits", "careless": 1.0, "train_size": 50, "eval_size": 50}}, 0)
    assert all(p.metadata["demonstration"] == p.answer for p in task.evaluation)
    assert any(p.metadata["demonstration"] != p.answer for p in task.train)


@pytest.mark.parametrize("cells", POSITIONS)
def test_layouts(cells):
    prompt = next(iter(DigitsSource(size=1, seed=0, cells=cells, scale=2, kinds=("where",))))
    assert prompt.images[0].size == (16 * cells, 16)
    assert prompt.answer in POSITIONS[cells]


def test_jitter_moves_pixels_inside_their_cell():
    from mmrl.tasks.visual_qa.data.digits import canvas

    images = np.zeros((2, 8, 8), dtype=np.uint8)
    images[:, 3, 4] = 200
    images[0, 0, 0] = 100
    grey = np.asarray(canvas(images, np.array([[2, -1], [0, 0]])))[:, :, 0]
    assert grey[5, 3] == 200 and grey[3, 12] == 200
    assert (grey > 0).sum() == 2  # the corner pixel moved out of its cell and not into the next one


@pytest.mark.parametrize(
    "options, word",
    [
        ({"split": "test"}, "heldout"),
        ({"kinds": ("product",)}, "above_five"),
        ({"kinds": ()}, "kinds"),
        ({"cells": 6}, "cells"),
        ({"size": 0}, "size"),
        ({"jitter": 8}, "jitter"),
    ],
)
def test_bad_options(options, word):
    with pytest.raises(ValueError, match=word):
        DigitsSource(**({"size": 4, "seed": 0} | options))
