"""Moving shapes: what is drawn is what is tracked; marks by hand; the task through its settings."""

from dataclasses import replace

import pytest
import torch
from mmrl.tasks.moving import (
    CELL,
    DIRECTIONS,
    FRAMES,
    GRID,
    OBJECT,
    SHAPES,
    SIZE,
    STEPS,
    Motion,
    MovingShapes,
    draw,
    motions,
    starts,
    words,
)
from mmrl.tasks.settings import TaskSettings
from mmrl.tasks.video_generation import prompts
from mmrl.tasks.video_generation.tracking import MotionChecked, Track, marks, slope, steady, track

from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Sample
from mmrl.settings import choose

SQUARE = Motion("square", "up", "quickly")


def sample(motion, clip):
    return Sample(Prompt("p", str(motion), metadata={"motion": motion}), frames=clip)


def every():
    """Each motion from each of its starts, in one batch."""
    asked = [(m, top, left) for m in motions("all") for top in starts(m)[0] for left in starts(m)[1]]
    return asked, torch.stack([draw(*one) for one in asked])


def test_a_clip_by_hand():
    clip = draw(Motion("ring", "left", "slowly"), top=1, left=4)
    cells = clip[:, :, ::CELL, ::CELL]
    assert clip.shape == (FRAMES, 1, SIZE, SIZE)
    ring = torch.tensor([[1.0, 1, 1], [1, 0, 1], [1, 1, 1]])
    for frame, left in enumerate([4, 4, 3, 3, 2]):
        expected = torch.zeros(GRID, GRID)
        expected[1:4, left : left + OBJECT] = ring
        assert torch.equal(cells[frame, 0], expected)


def test_every_motion_is_tracked_exactly():
    asked, clips = every()
    for (motion, top, left), found in zip(asked, track(clips), strict=True):
        assert found.shape == motion.shape
        assert (found.rows[0], found.columns[0]) == (top, left) and found.distance < 1e-9
        assert set(marks(motion, found).values()) == {1.0}


def test_noise_and_values_out_of_gamut_do_not_change_what_is_tracked():
    asked, clips = every()
    asked, clips = asked[::7], clips[::7]
    noise = 0.1 * torch.randn(clips.shape, generator=torch.Generator().manual_seed(0))
    for (motion, *_), found in zip(asked, track(clips * 1.3 + noise), strict=True):
        assert set(marks(motion, found).values()) == {1.0}


@pytest.mark.parametrize(
    ("change", "fallen"),
    [
        ({"shape": "cross"}, {"identity"}),
        ({"direction": "down"}, {"direction"}),
        ({"direction": "left"}, {"direction"}),
        ({"speed": "slowly"}, {"speed"}),
    ],
)
def test_one_thing_wrong_and_its_mark_falls(change, fallen):
    shown = replace(SQUARE, **change)
    (found,) = track(draw(shown, *(places[len(places) // 2] for places in starts(shown)))[None])
    given = marks(SQUARE, found)
    assert {name for name, value in given.items() if value == 0} == fallen


def test_a_still_clip_and_an_empty_one():
    still = draw(SQUARE, 4, 2)[:1].repeat(FRAMES, 1, 1, 1)
    (found,) = track(still[None])
    assert marks(SQUARE, found) == {"identity": 1.0, "direction": 0.0, "speed": 0.0, "steady": 1.0}
    (nothing,) = track(torch.zeros(1, FRAMES, 1, SIZE, SIZE))
    assert set(marks(SQUARE, nothing).values()) == {0.0}


def test_slopes_and_steadiness_by_hand():
    # times -2..2, squares sum to 10: (-2 0 - 1 0 + 0 + 1 1 + 2 2) / 10
    assert slope([0, 0, 1, 1, 2]) == pytest.approx(0.5) and slope([4, 3, 2, 1, 0]) == -1
    there_and_back = Track("square", (0, 1, 2, 1, 0), (3,) * 5, 0.0)
    jump = Track("square", (0, 0, 0, 4, 4), (3,) * 5, 0.0)
    assert not steady(there_and_back) and not steady(jump)
    assert steady(Track("square", (0, 0, 1, 1, 2), (3,) * 5, 0.0))


def test_the_reward_in_its_three_forms():
    right, still = draw(SQUARE, 4, 2), draw(SQUARE, 4, 2)[:1].repeat(FRAMES, 1, 1, 1)
    samples = [sample(SQUARE, right), sample(SQUARE, still), sample(SQUARE, right * torch.nan)]
    assert MotionChecked().score(samples) == [1.0, 0.0, None]
    assert MotionChecked(partial=True).score(samples) == [1.0, 0.5, None]
    assert MotionChecked(part="steady").score(samples[:2]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="part must be one of identity, direction, speed, steady, not 'beauty'"):
        MotionChecked(part="beauty")
    with pytest.raises(UserError, match=r"the clip of prompt 'p' is \[4, 1, 16, 16\], expected \[5, 1, 16, 16\]"):
        MotionChecked().score([sample(SQUARE, right[:4])])
    with pytest.raises(UserError, match="the rollout of prompt 'p' holds no clip to score"):
        MotionChecked().score([Sample(Prompt("p", "x"))])


def test_splits_share_no_motion_and_every_part_is_trained_on():
    train, heldout = set(motions("train")), set(motions("heldout"))
    assert not train & heldout and train | heldout == set(motions("all"))
    assert len(motions("all")) == len(SHAPES) * len(DIRECTIONS) * len(STEPS) == 32
    assert len(heldout) == 8
    for part in ("shape", "direction", "speed"):
        assert {vars(m)[part] for m in train} == {vars(m)[part] for m in motions("all")}


def test_prompts_depend_on_seed_and_index_and_careless_ones_show_something_else():
    one, same, other = (MovingShapes("train", size=200, seed=s) for s in (1, 1, 2))
    assert [one[i].text for i in range(9)] == [same[i].text for i in range(9)]
    assert [one[i].text for i in range(9)] != [other[i].text for i in range(9)]
    assert {word for i in range(200) for word in one[i].text.split()} <= set(words())
    careless = MovingShapes("train", size=200, seed=1, careless=1.0)
    shown = [sample(careless[i].metadata["motion"], careless[i].metadata["target"]) for i in range(200)]
    assert MotionChecked().score(shown) == [0.0] * 200
    own = [sample(one[i].metadata["motion"], one[i].metadata["target"]) for i in range(200)]
    assert MotionChecked().score(own) == [1.0] * 200
    with pytest.raises(IndexError):
        one[200]


class TestTask:
    def task(self, **data):
        return choose(TaskSettings, {"type": "video_generation", **data}, ("task",)).build(seed=0)

    def test_rewards_accuracy_and_guards(self):
        task = self.task(data={"type": "moving_shapes", "eval_size": 4})
        right, still = draw(SQUARE, 4, 2), draw(SQUARE, 4, 2)[:1].repeat(FRAMES, 1, 1, 1)
        samples = [sample(SQUARE, right), sample(SQUARE, still)]
        assert list(task.reward_names) == ["parts", "whole"]
        assert task.score(samples).tolist() == [[1.0, 1.0], [0.5, 0.0]]
        assert task.accuracy(samples).tolist() == [1.0, 0.0]
        guards = task.measures(samples)
        assert guards["guard/static"].tolist() == [0.0, 1.0]
        # three cells of a row appear and three vanish at each step, of 64
        assert guards["guard/motion"].tolist() == [pytest.approx(6 / 64), 0.0]
        assert guards["guard/flicker"].abs().max() < 1e-6 and guards["guard/out_of_gamut"].tolist() == [0.0, 0.0]
        assert len(task.evaluation) == 4

    def test_a_users_prompts(self, tmp_path):
        file = tmp_path / "clips.txt"
        file.write_text("a dog runs\n\na cat sits\na bird sings\na fish swims\n")
        checked = {"name": "guard", "options": {"of": "motion"}}
        task = self.task(
            data={"type": "prompts", "train": str(file), "heldout": 0.25}, rewards=[checked], accuracy=checked
        )
        assert [p.text for p in task.evaluation] == ["a fish swims"]
        assert [p.id for p in task.train] == ["clips.txt:1", "clips.txt:3", "clips.txt:4"]

    def test_bad_files(self, tmp_path):
        (tmp_path / "latin.txt").write_bytes("a\na café".encode("latin-1"))
        (tmp_path / "empty.txt").write_text("\n")
        for name, message in (("latin", "latin.txt line 2 is not UTF-8"), ("empty", "empty.txt holds no prompt")):
            with pytest.raises(ValueError, match=message):
                prompts.load(tmp_path / f"{name}.txt")
        with pytest.raises(ValueError, match="none.txt can not be read"):
            prompts.load(tmp_path / "none.txt")
        with pytest.raises(ValueError, match="1 prompts are too few"):
            prompts.hold_out([Prompt("a", "a")], 0.5)
