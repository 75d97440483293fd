"""Rewards of images, frame by frame, by hand."""

import pytest
import torch

from mmrl.errors import UserError
from mmrl.rewards import RewardSet
from mmrl.rewards.settings import RewardSpec
from mmrl.rewards.visual.framewise import Framewise
from mmrl.rollouts import Prompt, Sample

CLIP = torch.tensor([0.2, 0.6, 1.0]).view(3, 1, 1, 1).expand(3, 1, 3, 3)
BRIGHTNESS = {"reward": "guard", "options": {"of": "brightness"}}


def of(clip):
    return Sample(Prompt("p", "p"), frames=clip)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.6),
        ({"pool": "least"}, 0.2),
        ({"pool": "last"}, 1.0),
        ({"every": 2}, 0.6),
        ({"every": 3}, 0.2),
        ({"pool": "last", "every": 3}, 1.0),
    ],
)
def test_pooling(options, expected):
    (value,) = Framewise(**BRIGHTNESS, **options).score([of(CLIP)])
    assert value == pytest.approx(expected, abs=1e-6)


def test_clips_keep_apart_and_one_bad_frame_is_no_score():
    broken = CLIP.clone()
    broken[1] = torch.nan
    values = Framewise(**BRIGHTNESS).score([of(CLIP), of(broken), of(CLIP[:1])])
    assert values == [pytest.approx(0.6), None, pytest.approx(0.2)]


def test_by_name_through_a_reward_set():
    spec = RewardSpec(name="framewise", options=BRIGHTNESS, label="light")
    rewards = RewardSet([spec])
    assert list(rewards.names) == ["light"]
    assert rewards.score([of(CLIP)], torch.zeros(1, dtype=torch.long)).tolist() == [[pytest.approx(0.6)]]


def test_bad_input():
    with pytest.raises(ValueError, match="pool must be mean, least or last, not 'most'"):
        Framewise(**BRIGHTNESS, pool="most")
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        Framewise(**BRIGHTNESS, every=0)
    with pytest.raises(UserError, match="has no video"):
        Framewise(**BRIGHTNESS).score([Sample(Prompt("p", "p"), image=CLIP[0])])


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_video_without_frames_is_named_before_any_frame_is_scored(pool):
    empty = Sample(Prompt("silent", "p"), frames=CLIP[:0])
    with pytest.raises(UserError, match="the video of prompt 'silent' has no frames"):
        Framewise(**BRIGHTNESS, pool=pool).score([of(CLIP), empty])
