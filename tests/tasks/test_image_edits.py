"""Instructions for drawn scenes: exact targets, what was changed and what was kept, by hand."""

import pytest
import torch

from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Sample
from mmrl.settings import choose
from mmrl.tasks.image_generation.data.edits import (
    CELL,
    COLORS,
    SIZE,
    Edit,
    EditChecked,
    EditedShapes,
    Item,
    RegionKept,
    cell_accuracies,
    combinations,
    draw,
    unintended_changes,
    words,
)
from mmrl.tasks.settings import TaskSettings

SCENE = [Item("square", "red", 0, 0), Item("bar", "green", 4, 6)]


def sample(edit, image, scene=SCENE):
    told = {"source": draw(scene), "expected": draw(edit.apply(scene))}
    return Sample(Prompt("p", str(edit), metadata=told), image=image)


def test_an_edit_by_hand():
    assert str(Edit("square", "blue")) == "make the square blue" and str(Edit("bar", None)) == "remove the bar"
    assert Edit("square", "blue").apply(SCENE) == [Item("square", "blue", 0, 0), SCENE[1]]
    assert Edit("bar", None).apply(SCENE) == SCENE[:1]
    cells = draw(Edit("square", "yellow").apply(SCENE))[:, ::CELL, ::CELL]
    assert cells[:, :2, :2].tolist() == [[[1.0, 1], [1, 1]], [[1, 1], [1, 1]], [[0, 0], [0, 0]]]
    assert cells[1, 4].tolist() == [0, 0, 0, 0, 0, 0, 1, 1] and not cells[:, 5].any()


@pytest.mark.parametrize(
    ("made", "changed", "kept"),
    [
        (Edit("square", "blue").apply(SCENE), 1, 1),
        (SCENE, 0, 1),  # nothing was done
        (Edit("bar", None).apply(Edit("square", "blue").apply(SCENE)), 1, 58 / 60),  # the bar's two cells too
        (Edit("square", None).apply(SCENE), 0, 1),
        ([Item("bar", "blue", 0, 0), SCENE[1]], 1 / 2, 1),  # two of the four cells
    ],
)
def test_what_was_changed_and_what_was_kept(made, changed, kept):
    one = sample(Edit("square", "blue"), draw(made))
    found = cell_accuracies(one.image[None], one.prompt.metadata["source"][None], one.prompt.metadata["expected"][None])
    assert [float(part) for part in found] == [pytest.approx(changed), pytest.approx(kept)]
    assert EditChecked().score([one]) == [float(changed == kept == 1)]
    assert EditChecked(part="changed").score([one]) == [pytest.approx(changed)]
    assert EditChecked(part="kept").score([one]) == [pytest.approx(kept)]


def test_untouched_pixels_that_moved():
    edit = Edit("square", "blue")
    right = draw(edit.apply(SCENE))
    smeared = right.clone()
    smeared[:, 15, :8] = 0.3  # eight pixels of the 240 that should stay
    samples = [sample(edit, right), sample(edit, smeared), sample(edit, right + 0.2)]
    assert unintended_changes(samples).tolist() == [0.0, pytest.approx(8 / 240), 0.0]
    assert RegionKept().score(samples[:2]) == [0.0, pytest.approx(-8 * 0.09 / 240)]


def test_prompts_carry_their_source_and_its_edit():
    source = EditedShapes("train", size=300, seed=3)
    for i in range(0, 300, 13):
        prompt = source[i]
        (image,) = prompt.images
        assert image.size == (SIZE, SIZE) and prompt.text == source[i].text
        pixels = torch.tensor(list(image.getdata()), dtype=torch.float32).T.view(3, SIZE, SIZE) / 255
        assert torch.equal(pixels, prompt.metadata["source"])
        assert torch.equal(prompt.metadata["target"], prompt.metadata["expected"])
        assert not torch.equal(prompt.metadata["source"], prompt.metadata["expected"])
        assert set(prompt.text.split()) <= set(words())
    careless = EditedShapes("train", size=100, seed=3, wrong_share=1.0)
    shown = [Sample(careless[i], image=careless[i].metadata["target"]) for i in range(100)]
    assert EditChecked().score(shown) == [0.0] * 100


def test_splits_share_no_edit():
    train, heldout = set(combinations("train")), set(combinations("heldout"))
    assert (
        not train & heldout
        and train | heldout == set(combinations("all"))
        and len(combinations("all")) == 6 * 4 * 4 * 4
    )
    assert {kind[4] for kind in heldout} == {*COLORS, None}


def test_bad_input():
    with pytest.raises(UserError, match=r"prompt 'p' has no metadata\['source'\]; rewards of edits need"):
        EditChecked().score([Sample(Prompt("p", "x"), image=draw(SCENE))])
    with pytest.raises(UserError, match="the image of prompt 'p' has the shape"):
        EditChecked().score([sample(Edit("bar", None), draw(SCENE)[:, :8])])
    with pytest.raises(ValueError, match="part must be changed or kept, not 'both'"):
        EditChecked(part="both")
    assert EditChecked().score([sample(Edit("bar", None), draw(SCENE) * torch.nan)]) == [None]


def test_the_task():
    settings = {"type": "image_generation", "data": {"type": "edits", "eval_size": 3}}
    task = choose(TaskSettings, settings, ("task",)).build(seed=0)
    edit = Edit("square", "blue")
    samples = [sample(edit, draw(edit.apply(SCENE))), sample(edit, draw(SCENE))]
    assert list(task.reward_names) == ["changed", "kept", "whole"]
    assert task.score(samples).tolist() == [[1, 1, 1], [0, 1, 0]]
    assert task.measures(samples)["guard/untouched_moved"].tolist() == [0.0, 0.0]


def test_columns_of_the_user_s_are_no_edits(tmp_path):
    """Whatever a file of prompts calls its columns, the guard of edits looks at drawn edits alone."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a red house", "expected": "red", "source": "grey"}\n' * 4)
    data = {"type": "prompts", "train": tmp_path / "prompts.jsonl", "eval": tmp_path / "prompts.jsonl"}
    settings = {"type": "image_generation", "data": data, "rewards": [{"name": "jpeg_compressibility"}]}
    settings["accuracy"] = {"name": "jpeg_compressibility"}
    task = choose(TaskSettings, settings, ("task",)).build(seed=0)
    found = task.measures([Sample(task.train[0], image=draw(SCENE))])
    assert "guard/sharpness" in found and "guard/untouched_moved" not in found
