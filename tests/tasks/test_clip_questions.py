"""Questions about clips by value: what is drawn, what is asked, which clips are held out."""

import numpy as np
import pytest

from mmrl.tasks.data import moving_shapes
from mmrl.tasks.visual_qa.data.kinds import VIDEO_QUESTIONS
from mmrl.tasks.visual_qa.data.videos import VideosSource


def clips(split="train", size=60, seed=3, **more):
    return VideosSource(split, size=size, seed=seed, **more)


def pixels(prompt):
    """[frame, 8, 8] of one prompt, a number a cell."""
    (clip,) = prompt.videos
    return np.stack([np.asarray(frame)[::2, ::2, 0] for frame in clip.frames]) / 255


def top_left(frame):
    rows, columns = frame.nonzero()
    return int(rows.min()), int(columns.min())


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_are_what_the_frames_show(split):
    seen = set()
    for index in range(60):
        prompt = clips(split)[index]
        frames, kind = pixels(prompt), VIDEO_QUESTIONS[index % 3]
        assert frames.shape == (5, 8, 8) and prompt.metadata["kind"] == kind
        assert prompt.metadata["demonstration"] == prompt.answer
        (rows, columns) = zip(*(top_left(frame) for frame in frames), strict=True)
        if kind == "order":
            assert set(rows) == {rows[0]} and set(columns) == {columns[0]}
            first = frames[0, rows[0] : rows[0] + 3, columns[0] : columns[0] + 3]
            drawn = moving_shapes.shape_cells(prompt.answer)[0].numpy()
            assert np.array_equal(first[: drawn.shape[0], : drawn.shape[1]], drawn)
            assert not np.array_equal(frames[1], frames[2])  # the second shape from the middle on
            assert np.array_equal(frames[0], frames[1]) and np.array_equal(frames[2], frames[4])
            continue
        moved = rows[-1] - rows[0], columns[-1] - columns[0]
        way = {name: step for name, step in moving_shapes.DIRECTIONS.items() if np.dot(step, moved) > 0}
        speed = {2: "slowly", 4: "quickly"}[max(map(abs, moved))]
        assert prompt.answer == (speed if kind == "speed" else next(iter(way)))
        seen.add(prompt.answer)
    assert seen >= {"slowly", "quickly", "up", "down", "left", "right"}


def test_what_is_held_out_is_not_trained_on():
    train, heldout = clips(), clips("heldout")
    assert not set(train.pairs) & set(heldout.pairs)
    first = {
        split: {top_left(pixels(source[i])[0]) for i in range(60)}
        for split, source in (("train", train), ("heldout", heldout))
    }
    assert first["train"] and first["heldout"] and not first["train"] & first["heldout"]
    for source in (train, heldout):  # both orders of a pair: that it is there gives no answer away
        assert source.pairs and {pair[::-1] for pair in source.pairs} == set(source.pairs)


def test_options_change_demonstrations_and_frames_and_no_question():
    plain, careless, shuffled = clips(), clips(wrong_share=1.0), clips(shuffled=True)
    for index in range(30):
        prompt, wrong, mixed = plain[index], careless[index], shuffled[index]
        assert (wrong.text, wrong.answer) == (prompt.text, prompt.answer) == (mixed.text, mixed.answer)
        assert wrong.metadata["demonstration"] != prompt.answer
        assert np.array_equal(pixels(wrong), pixels(prompt))
        kept = sorted(frame.tobytes() for frame in pixels(prompt))
        assert kept == sorted(frame.tobytes() for frame in pixels(mixed))
    assert any(not np.array_equal(pixels(plain[i]), pixels(shuffled[i])) for i in range(30))
    assert pixels(clips()[4]).tobytes() == pixels(clips()[4]).tobytes() != pixels(clips(seed=4)[4]).tobytes()
