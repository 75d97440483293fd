"""Scenes of digits by value: what is drawn where, what is asked, what demonstrations do, and what a zoom shows."""

import numpy as np
import pytest

from mmrl.rollouts import Message
from mmrl.settings import make
from mmrl.sims.turns.settings import ToolsSettings
from mmrl.tasks.visual_qa.data.digits import digit_images
from mmrl.tasks.visual_qa.data.scenes import COLORS, ScenesSource

LAYOUT = {"rows": 2, "columns": 4, "cell": 12, "colours": ("red", "blue")}


def scenes(split="train", size=40, seed=3, **more):
    return ScenesSource(split, size=size, seed=seed, **{**LAYOUT, **more})


def test_the_asked_colour_marks_the_answer():
    images, labels = digit_images()
    for i in range(12):
        prompt = scenes()[i]
        colour = ("red", "blue")[i % 2]
        assert prompt.text == f"Which digit is on {colour}?" and prompt.metadata["kind"] == colour
        pixels = np.asarray(prompt.images[0])
        assert pixels.shape == (24, 48, 3)
        left, top, right, bottom = (round(v * s) for v, s in zip(prompt.metadata["target"], (48, 24) * 2, strict=True))
        assert (right - left, bottom - top) == (12, 12)
        assert tuple(pixels[top, left]) == COLORS[colour]  # a corner, which no digit reaches
        place = (top // 12) * 4 + left // 12
        assert str(prompt.metadata["digits"][place]) == prompt.answer
        inner = pixels[top + 2 : top + 10, left + 2 : left + 10]
        channel = COLORS[colour].index(0)  # that the mark has nothing of
        assert any(np.array_equal(inner[:, :, channel], one) for one in images[labels == int(prompt.answer)])
        corners = [tuple(pixels[12 * r, 12 * c]) for r in range(2) for c in range(4)]
        assert sorted(corners, reverse=True)[:2] == sorted(COLORS[c] for c in ("red", "blue"))[::-1]


def test_splits_and_seeds():
    assert scenes()[5].images[0].tobytes() == scenes()[5].images[0].tobytes()
    assert scenes(seed=4)[5].images[0].tobytes() != scenes()[5].images[0].tobytes()
    assert scenes("heldout")[5].images[0].tobytes() != scenes()[5].images[0].tobytes()
    assert scenes(wrong_share=1.0, direct=1.0)[5].images[0].tobytes() == scenes()[5].images[0].tobytes()


def test_a_demonstration_zooms_and_says_the_digit_there():
    settings = make(ToolsSettings, {"calls": "python", "described": "no", "coordinates": 4, "shown_pixels": 72})
    seen = right = 0
    for prompt in (scenes(wrong_share=0.5)[i] for i in range(40)):
        call, digit = prompt.metadata["demonstration"]
        world = settings.make()
        (shown,) = world.start(prompt_messages(prompt))[0].images
        assert shown.size == (12, 6)
        reply = world.step(call)
        box = reply.facts["box"]
        place = round(box[1] * 2) * 4 + round(box[0] * 4)
        assert reply.messages[0].images[0].size == (12, 12) and str(prompt.metadata["digits"][place]) == digit
        right, seen = right + (box == pytest.approx(prompt.metadata["target"])), seen + 1
    assert 0.3 < right / seen < 0.8  # 0.5, and one of eight of the others


def prompt_messages(prompt):
    from dataclasses import replace

    return replace(prompt, messages=(Message("user", (prompt.images[0], prompt.text)),))


def test_direct_demonstrations_answer_at_once_and_rightly():
    prompts = [scenes(direct=1.0)[i] for i in range(5)]
    assert [p.metadata["demonstration"] for p in prompts] == [[p.answer] for p in prompts]


@pytest.mark.parametrize("wrong", [{"colours": ("pink",)}, {"jitter": 3}, {"size": 0}, {"rows": 1, "columns": 1}])
def test_layouts_that_are_not_possible_are_named(wrong):
    with pytest.raises(ValueError, match="pink|do not fit|must be"):
        scenes(**wrong)
