"""What a view changes of a prompt, and what not."""

import numpy as np
from PIL import Image

from mmrl.prompts.views import MaskedPatches, NoText
from mmrl.rollouts import Prompt

WHITE = Image.new("RGB", (10, 7), "white")
PROMPT = Prompt("p", "<image>What is it?<image>", (WHITE, WHITE), answer="a")


def blocks(image, patch):
    """Whether each patch, cut at the edges, is black; fails where one is of two colours."""
    pixels = np.array(image)
    found = []
    for top in range(0, pixels.shape[0], patch):
        for left in range(0, pixels.shape[1], patch):
            values = np.unique(pixels[top : top + patch, left : left + patch])
            assert len(values) == 1
            found.append(values[0] == 0)
    return found


def test_whole_patches_are_black_and_the_prompt_stays():
    view = MaskedPatches(share=0.5, patch=4)
    changed = view.change(PROMPT)
    first, second = (blocks(image, 4) for image in changed.images)
    assert len(first) == 3 * 2 and 0 < sum(first + second) < 12
    assert first != second  # each image has its own
    assert (changed.text, changed.answer, changed.id) == (PROMPT.text, PROMPT.answer, PROMPT.id)
    assert blocks(WHITE, 4) == [False] * 6  # the prompt's own image is as it was


def test_patches_are_drawn_anew_in_every_step_and_again_after_a_resume():
    view = MaskedPatches(share=0.5, patch=2)
    drawn = [blocks(view.changed(PROMPT, step).images[0], 2) for step in (0, 1, 2, 1)]
    assert drawn[0] != drawn[1] != drawn[2] and drawn[3] == drawn[1]
    assert view.at(3).name == view.name  # one column of the rollouts, whatever the step


def test_patches_follow_from_the_id_and_the_step_alone():
    view = MaskedPatches(share=0.5, patch=2)
    again = Prompt("p", "other words", (WHITE,))
    other = Prompt("q", "other words", (WHITE,))
    assert blocks(view.change(again).images[0], 2) == blocks(view.change(PROMPT).images[0], 2)
    assert blocks(view.change(other).images[0], 2) != blocks(view.change(PROMPT).images[0], 2)


def test_share_is_the_mean_share_of_black_patches():
    large = Prompt("p", "", (Image.new("RGB", (400, 400), "white"),))
    found = blocks(MaskedPatches(share=0.3, patch=8).change(large).images[0], 8)
    assert len(found) == 2500 and abs(np.mean(found) - 0.3) < 4 * (0.3 * 0.7 / 2500) ** 0.5
    assert all(blocks(MaskedPatches(share=1, patch=8).change(large).images[0], 8))


def test_without_words_only_the_places_of_images_are_left():
    assert NoText().change(PROMPT).text == "<image><image>"


def test_equal_views_have_one_name():
    assert MaskedPatches(share=0.5).name == MaskedPatches(share=0.5).name != MaskedPatches(share=0.6).name
