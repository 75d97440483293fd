"""Views that take away what can be seen: pixel by pixel, on images whose every pixel is another."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.prompts.counterfactual_views import Blank, HiddenRegions, Mirrored, ShuffledFrames, ShuffledPatches
from mmrl.rollouts import Message, Prompt, Video


def image(width=6, height=4):
    pixels = np.arange(1, width * height * 3 + 1, dtype=np.uint8).reshape(height, width, 3)
    return Image.fromarray(pixels)


def prompt(**metadata):
    return Prompt("7", "Where is <image> it?", images=(image(), image(5, 3)), metadata=metadata)


def test_blank():
    changed = Blank(level=9).change(prompt())
    assert [image.size for image in changed.images] == [(6, 4), (5, 3)] and changed.text == prompt().text
    assert all((np.array(image) == 9).all() for image in changed.images)


def test_mirrored():
    clip = Video((image(),) * 2)
    changed = Mirrored().change(Prompt("7", "<image><video>", images=(image(5, 3),), videos=(clip,)))
    assert (np.array(changed.images[0]) == np.array(image(5, 3))[:, ::-1]).all()
    assert (np.array(changed.videos[0].frames[1]) == np.array(image())[:, ::-1]).all()


def test_hidden_regions():
    changed = HiddenRegions().change(prompt(boxes=[[1, 0, 3, 2], [5, 3, 6, 4]]))
    expected = np.array(image())
    expected[0:2, 1:3] = 0
    expected[3, 5] = 0
    assert (np.array(changed.images[0]) == expected).all()
    assert (np.array(changed.images[1]) == np.array(image(5, 3))).all()


def test_the_region_is_hidden_in_a_conversation_too():
    """The first image of the messages is hidden, and the same image among the prompt's own; the second is not."""
    first, second = image(), image(5, 3)
    messages = (Message("system", ("Look.",)), Message("user", ("Where is ", first, "? And ", second)))
    own = Prompt("7", "", messages=messages, metadata={"boxes": [[0, 0, 6, 4]]})
    changed = HiddenRegions().change(own)
    shown = [np.array(each) for each in changed.seen_images]
    assert (shown[0] == 0).all() and (shown[1] == np.array(image(5, 3))).all()
    same = HiddenRegions().change(replace(own, images=(first,)))
    assert (np.array(same.images[0]) == 0).all()


def test_the_prompt_itself_keeps_its_image():
    own = prompt(cues=[[0, 0, 6, 4]])
    assert (np.array(HiddenRegions(boxes="cues").change(own).images[0]) == 0).all()
    assert (np.array(own.images[0]) == np.array(image())).all()


def test_regions_that_are_not_given():
    with pytest.raises(UserError, match="prompt '7' has no metadata 'boxes'"):
        HiddenRegions().change(prompt())


def test_shuffled_patches():
    view = ShuffledPatches(patch=2)
    first, second = view.change(prompt()).images, view.change(prompt()).images
    assert all((np.array(a) == np.array(b)).all() for a, b in zip(first, second, strict=True))

    def patches(image):
        pixels = np.array(image)
        return [pixels[y : y + 2, x : x + 2].tobytes() for y in range(0, 4, 2) for x in range(0, 6, 2)]

    assert sorted(patches(first[0])) == sorted(patches(image())) and patches(first[0]) != patches(image())
    odd = np.array(first[1])  # 5 x 3: the last column and the last row are not a whole patch
    assert (odd[:, 4] == np.array(image(5, 3))[:, 4]).all() and (odd[2] == np.array(image(5, 3))[2]).all()


def test_shuffled_frames():
    frames = tuple(Image.new("RGB", (2, 2), (shade,) * 3) for shade in range(4))
    own = Prompt("7", "What happens?", videos=(Video(frames, 4.0), Video(frames[:1])))
    changed = ShuffledFrames().change(own)
    shades = [frame.getpixel((0, 0))[0] for frame in changed.videos[0].frames]
    assert sorted(shades) == [0, 1, 2, 3] != shades and changed.videos[0].fps == 4.0
    assert changed.videos[1] == own.videos[1]  # one frame has one order
    orders = set()
    for number in range(20):
        video = ShuffledFrames().change(replace(own, id=str(number))).videos[0]
        orders.add(tuple(frame.getpixel((0, 0))[0] for frame in video.frames))
    assert len(orders) > 5  # by chance, not one fixed order such as the reversed one
    assert ShuffledFrames().change(own) == changed
    with pytest.raises(UserError, match="prompt '7' has no video"):
        ShuffledFrames().change(prompt())


def test_frames_are_changed_as_images_are():
    own = Prompt("7", "What happens?", images=(image(),), videos=(Video((image(5, 3), image())),))
    changed = Blank(level=9).change(own)
    assert all((np.array(image) == 9).all() for image in (*changed.images, *changed.videos[0].frames))
    assert [frame.size for frame in changed.videos[0].frames] == [(5, 3), (6, 4)]
