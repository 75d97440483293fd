"""Pairs of videos from files: which of two was preferred, frame by frame."""

import json

import pytest
import torch
from PIL import Image

from mmrl.algorithms.preference.pairs import with_rejected_answer
from mmrl.errors import UserError
from mmrl.tasks.video_generation.settings import VideoPairsData

ROW = {"prompt": "a square moves", "chosen": "good.gif", "rejected": "bad.gif"}


@pytest.fixture
def folder(tmp_path):
    for name, levels, size in (
        ("good", (0, 51, 102, 153), 8),
        ("bad", (255, 204, 153, 102), 8),
        ("large", (0, 255), 16),
    ):
        frames = [Image.new("L", (size, size + 2), level) for level in levels]
        frames[0].save(tmp_path / f"{name}.gif", save_all=True, append_images=frames[1:], duration=100)
    (tmp_path / "eval.txt").write_text("a circle moves\n")
    (tmp_path / "broken.gif").write_bytes(b"GIF89a")
    return tmp_path


def pairs(folder, *rows, **options):
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return VideoPairsData(train=folder / "pairs.jsonl", eval=folder / "eval.txt", **{"frames": 4} | options).sources(0)


def test_a_row_is_two_videos_in_the_order_of_their_frames(folder):
    train, held_out = pairs(folder, ROW, grey=True)
    metadata = train[0].metadata
    assert torch.equal(with_rejected_answer(train[0]).metadata["target"], metadata["rejected"])
    assert metadata["target"].shape == metadata["rejected"].shape == (4, 1, 10, 8)
    torch.testing.assert_close(metadata["target"].mean((1, 2, 3)), torch.tensor([0.0, 0.2, 0.4, 0.6]))
    torch.testing.assert_close(metadata["rejected"].mean((1, 2, 3)), torch.tensor([1.0, 0.8, 0.6, 0.4]))
    assert [prompt.text for prompt in held_out] == ["a circle moves"]
    assert pairs(folder, ROW)[0][0].metadata["target"].shape == (4, 3, 10, 8)
    spread = pairs(folder, ROW, grey=True, frames=2)[0][0].metadata["target"]
    torch.testing.assert_close(spread.mean((1, 2, 3)), torch.tensor([0.0, 0.4]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected": "large.gif"}, "large.gif has 2 frames, fewer than task.data.frames=4"),
        ({"chosen": "broken.gif"}, "row pairs:1: cannot read .*broken.gif"),
    ],
)
def test_videos_that_can_not_be_used_are_named(folder, change, message):
    with pytest.raises(UserError, match=message):
        pairs(folder, ROW | change)[0][0]
    with pytest.raises(ValueError, match="row pairs:1: key 'chosen' must be the path of a video"):
        pairs(folder, ROW | {"chosen": None})
