"""Moving shapes: what is drawn is what is tracked; marks by hand; the task through its settings."""

from dataclasses import replace

import pytest
import torch

from mmrl.errors import UserError
from mmrl.rollouts import Prompt, Sample
from mmrl.settings import choose
from mmrl.tasks.data.moving_shapes import (
    DIRECTIONS,
    GENERATION_CANVAS,
    QUESTION_CANVAS,
    SHAPES,
    SPEEDS,
    Motion,
    MovingShapes,
    draw_video,
    motions,
    start_positions,
    vocabulary,
)
from mmrl.tasks.data.prompt_files import load_prompts
from mmrl.tasks.settings import TaskSettings
from mmrl.tasks.video_generation import prompts
from mmrl.tasks.video_generation.tracking import MotionChecked, Track, is_steady, part_scores, slope, track

SQUARE = Motion("square", "up", "quickly")


def sample(motion, clip):
    return Sample(Prompt("p", str(motion), metadata={"motion": motion}), frames=clip)


def every():
    """Each motion from each of its starts, in one batch."""
    asked = [
        (m, top, left)
        for m in motions("all")
        for top in start_positions(GENERATION_CANVAS, m)[0]
        for left in start_positions(GENERATION_CANVAS, m)[1]
    ]
    return asked, torch.stack([draw_video(GENERATION_CANVAS, *one) for one in asked])


@pytest.mark.parametrize(
    ("canvas", "speed", "lefts", "size"),
    [
        (GENERATION_CANVAS, "slowly", [3, 3, 2, 2, 1], 12),
        (GENERATION_CANVAS, "quickly", [3, 2, 1, 0, 0], 12),
        (QUESTION_CANVAS, "slowly", [5, 5, 4, 4, 3], 16),
        (QUESTION_CANVAS, "quickly", [5, 4, 3, 2, 1], 16),
    ],
)
def test_clips_by_hand(canvas, speed, lefts, size):
    clip = draw_video(canvas, Motion("ring", "left", speed), top=1, left=lefts[0])
    assert clip.shape == (5, 1, size, size)
    ring = torch.tensor([[1.0, 1, 1], [1, 0, 1], [1, 1, 1]])
    for frame, left in enumerate(lefts):
        expected = torch.zeros(size // 2, size // 2)
        expected[1:4, left : left + 3] = ring
        assert torch.equal(clip[frame, 0], expected.repeat_interleave(2, 0).repeat_interleave(2, 1))


def test_places_to_start_from_by_hand():
    assert start_positions(GENERATION_CANVAS, Motion("ring", "left", "quickly")) == (range(4), range(3, 4))
    assert start_positions(GENERATION_CANVAS, Motion("ring", "down", "slowly")) == (range(2), range(4))
    assert start_positions(QUESTION_CANVAS, Motion("ring", "left", "quickly")) == (range(6), range(4, 6))


def test_every_motion_is_tracked_exactly():
    asked, clips = every()
    for (motion, top, left), found in zip(asked, track(clips), strict=True):
        assert found.shape == motion.shape
        assert (found.rows[0], found.columns[0]) == (top, left) and found.distance < 1e-9
        assert set(part_scores(motion, found).values()) == {1.0}


def test_noise_and_values_out_of_gamut_do_not_change_what_is_tracked():
    asked, clips = every()
    asked, clips = asked[::7], clips[::7]
    noise = 0.1 * torch.randn(clips.shape, generator=torch.Generator().manual_seed(0))
    for (motion, *_), found in zip(asked, track(clips * 1.3 + noise), strict=True):
        assert set(part_scores(motion, found).values()) == {1.0}


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
    (found,) = track(
        draw_video(
            GENERATION_CANVAS,
            shown,
            *(places[len(places) // 2] for places in start_positions(GENERATION_CANVAS, shown)),
        )[None]
    )
    given = part_scores(SQUARE, found)
    assert {name for name, value in given.items() if value == 0} == fallen


def test_a_still_clip_and_an_empty_one():
    still = draw_video(GENERATION_CANVAS, SQUARE, 3, 2)[:1].repeat(GENERATION_CANVAS.num_frames, 1, 1, 1)
    (found,) = track(still[None])
    assert part_scores(SQUARE, found) == {"identity": 1.0, "direction": 0.0, "speed": 0.0, "steady": 1.0}
    (nothing,) = track(torch.zeros(1, GENERATION_CANVAS.num_frames, 1, GENERATION_CANVAS.size, GENERATION_CANVAS.size))
    assert set(part_scores(SQUARE, nothing).values()) == {0.0}


def test_slopes_and_steadiness_by_hand():
    # times -2..2, squares sum to 10: (-2 0 - 1 0 + 0 + 1 1 + 2 2) / 10
    assert slope([0, 0, 1, 1, 2]) == pytest.approx(0.5) and slope([4, 3, 2, 1, 0]) == -1
    there_and_back = Track("square", (0, 1, 2, 1, 0), (3,) * 5, 0.0)
    jump = Track("square", (0, 0, 0, 4, 4), (3,) * 5, 0.0)
    assert not is_steady(there_and_back) and not is_steady(jump)
    assert is_steady(Track("square", (0, 0, 1, 1, 2), (3,) * 5, 0.0))
    # (-2 0 - 1 1 + 0 2 + 1 3 + 2 3) / 10, and one cell less in the middle takes nothing away
    assert slope([0, 1, 2, 3, 3]) == pytest.approx(0.8) and slope([0, 1, 2, 2, 3]) == pytest.approx(0.7)
    quick = Motion("square", "down", "quickly")
    for rows, speed in (((0, 1, 2, 2, 3), 1.0), ((0, 1, 1, 2, 2), 0.0)):
        assert part_scores(quick, Track("square", rows, (3,) * 5, 0.0))["speed"] == speed


def test_the_reward_in_its_three_forms():
    right, still = (
        draw_video(GENERATION_CANVAS, SQUARE, 3, 2),
        draw_video(GENERATION_CANVAS, SQUARE, 3, 2)[:1].repeat(GENERATION_CANVAS.num_frames, 1, 1, 1),
    )
    samples = [sample(SQUARE, right), sample(SQUARE, still), sample(SQUARE, right * torch.nan)]
    assert MotionChecked().score(samples) == [1.0, 0.0, None]
    assert MotionChecked(partial=True).score(samples) == [1.0, 0.5, None]
    assert MotionChecked(part="steady").score(samples[:2]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="part must be one of identity, direction, speed, steady, not 'beauty'"):
        MotionChecked(part="beauty")
    with pytest.raises(
        UserError, match=r"the video of prompt 'p' has the shape \[4, 1, 12, 12\], expected \[5, 1, 12, 12\]"
    ):
        MotionChecked().score([sample(SQUARE, right[:4])])
    with pytest.raises(UserError, match="the rollout of prompt 'p' has no video"):
        MotionChecked().score([Sample(Prompt("p", "x"))])


def test_splits_share_no_motion_and_every_part_is_trained_on():
    train, heldout = set(motions("train")), set(motions("heldout"))
    assert not train & heldout and train | heldout == set(motions("all"))
    assert len(motions("all")) == len(SHAPES) * len(DIRECTIONS) * len(SPEEDS) == 32
    assert len(heldout) == 8
    for part in ("shape", "direction", "speed"):
        assert {vars(m)[part] for m in train} == {vars(m)[part] for m in motions("all")}


def test_prompts_depend_on_seed_and_index_and_careless_ones_show_something_else():
    one, same, other = (MovingShapes("train", size=200, seed=s) for s in (1, 1, 2))
    assert [one[i].text for i in range(9)] == [same[i].text for i in range(9)]
    assert [one[i].text for i in range(9)] != [other[i].text for i in range(9)]
    assert {word for i in range(200) for word in one[i].text.split()} <= set(vocabulary())
    careless = MovingShapes("train", size=200, seed=1, wrong_share=1.0)
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
        right, still = (
            draw_video(GENERATION_CANVAS, SQUARE, 3, 2),
            draw_video(GENERATION_CANVAS, SQUARE, 3, 2)[:1].repeat(GENERATION_CANVAS.num_frames, 1, 1, 1),
        )
        samples = [sample(SQUARE, right), sample(SQUARE, still)]
        assert list(task.reward_names) == ["parts", "whole"]
        assert task.score(samples).tolist() == [[1.0, 1.0], [0.5, 0.0]]
        assert task.accuracy(samples).tolist() == [1.0, 0.0]
        guards = task.measures(samples)
        assert guards["guard/static"].tolist() == [0.0, 1.0]
        # three cells of a row appear and three vanish, of 36, at three of the four steps
        assert guards["guard/motion"].tolist() == [pytest.approx(6 / 36 * 3 / 4), 0.0]
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
        assert [p.id for p in task.train] == ["clips:1", "clips:3", "clips:4"]

    def test_bad_files(self, tmp_path):
        (tmp_path / "latin.txt").write_bytes("a\na café".encode("latin-1"))
        (tmp_path / "empty.txt").write_text("\n")
        for name, message in (
            ("latin", "latin.txt, line 2: not UTF-8"),
            ("empty", "empty.txt: the file holds no prompt"),
        ):
            with pytest.raises(ValueError, match=message):
                load_prompts(tmp_path / f"{name}.txt")
        with pytest.raises(ValueError, match="leaves 1 training and 0 held-out prompts"):
            prompts.hold_out([Prompt("a", "a")], 0.5)
