"""Images to edit that the user's rows name, through the YAML keys to the reward of an image."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.rollouts import Sample
from tests.tasks.choosing import build

LEVELS = {"dark": 51, "light": 204}


@pytest.fixture
def folder(tmp_path):
    for name, level in LEVELS.items():
        Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(tmp_path / f"{name}.png")
    left = np.zeros((8, 8), np.uint8)
    left[:, :4] = 255
    Image.fromarray(left).save(tmp_path / "left.png")
    return tmp_path


def write(folder, *rows, name="rows.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def task(train, held_out, **data):
    data = {"type": "prompts", "train": train, "eval": held_out, "image_field": "image"} | data
    similar = {"name": "source_similarity"}
    return build("image_generation", {"data": data, "rewards": [similar], "accuracy": similar}, 0)


DARK, LIGHT = {"prompt": "make it blue", "image": "dark.png"}, {"prompt": "make it blue", "image": "light.png"}


def test_each_row_has_its_image_and_the_reward_compares_with_that(folder, caplog):
    made = task(write(folder, DARK, LIGHT), write(folder, LIGHT | {"mask": "left.png"}, name="eval.jsonl"))
    assert [made.train[i].images[0].getpixel((3, 3)) for i in (0, 1)] == [(51,) * 3, (204,) * 3]
    drawn = torch.full((3, 8, 8), 0.2)
    drawn[:, :, 4:] = 0.5
    held_out = made.evaluation[0]
    samples = [Sample(prompt, "", image=drawn) for prompt in (made.train[0], made.train[1], held_out)]
    # Half of the pixels at .2 and half at .5, of a source at .2 and at .8; the mask leaves the half at .5.
    assert made.score(samples, torch.zeros(3, dtype=torch.long)).flatten().tolist() == pytest.approx([0.85, 0.55, 0.7])


def test_the_same_words_for_another_image_are_held_out(folder, caplog):
    task(write(folder, DARK), write(folder, LIGHT, name="eval.jsonl"))
    assert caplog.messages == []
    task(write(folder, DARK), write(folder, DARK, LIGHT, name="eval.jsonl"))
    assert caplog.messages == [
        "1 of 2 held-out prompts are training prompts too; remove them from task.data.train or eval"
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "q"},
            r"rows.jsonl, line 2: key 'image' is missing or empty; set task.data.image_field .*keys: prompt\)",
        ),
        (DARK | {"image": "none.png"}, "line 2: cannot read 'none.png'"),
        (DARK | {"image": "../dark.png"}, "line 2: .*contains '\\.\\.'"),
        (DARK | {"image": ["dark.png", "rows.jsonl"]}, "line 2: cannot read 'rows.jsonl': not a PNG"),
        (DARK | {"mask": "none.png"}, "line 2: cannot read 'none.png'"),
    ],
)
def test_a_row_without_an_image_is_named_at_the_start_or_left_out(folder, row, message, caplog):
    rows, held_out = write(folder, DARK, row), write(folder, LIGHT, name="eval.jsonl")
    with pytest.raises(ValueError, match=message):
        task(rows, held_out)
    assert len(task(rows, held_out, max_bad_share=0.5).train) == 1 and "left out" in caplog.text


def test_a_share_is_held_out_and_a_file_that_changes_meanwhile_is_named(folder):
    many = [DARK | {"prompt": f"edit {number}"} for number in range(20)]
    made = task(write(folder, *many), None, heldout=0.5)
    assert len(made.train) + len(made.evaluation) == 20 and made.evaluation[0].images[0].size == (8, 8)
    (folder / "dark.png").write_text("no image")
    with pytest.raises(UserError, match=r"row rows:\d+: cannot read 'dark.png'"):
        made.train[0]
