"""Rewards of images: JPEG sizes, a classifier's log-probability, and text that is really rendered and really read."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.visual.images import edit_distance
from mmrl.rollouts import Prompt, Sample

HERE = __name__


def sample(image, answer=None, text="an image", metadata=None):
    return Sample(Prompt("p", text, answer=answer, metadata=metadata or {}), image=image)


def noise(seed=0, channels=3):
    return torch.rand(channels, 32, 32, generator=torch.Generator().manual_seed(seed))


def test_jpeg_size_is_that_of_the_file(tmp_path):
    pixels = (noise() * 255).round().to(torch.uint8)
    path = tmp_path / "image.jpg"
    Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())).save(path, quality=95)
    kilobytes = path.stat().st_size / 1000
    assert build("jpeg_incompressibility")(sample(pixels / 255)) == kilobytes > 1
    assert build("jpeg_compressibility")(sample(pixels / 255)) == -kilobytes


def test_jpeg_prefers_what_it_should():
    smooth, rough = sample(torch.full((3, 32, 32), 0.5)), sample(noise())
    assert build("jpeg_compressibility")(smooth) > build("jpeg_compressibility")(rough)
    assert build("jpeg_incompressibility")(smooth) < build("jpeg_incompressibility")(rough)
    assert build("jpeg_compressibility", {"quality": 20})(rough) > build("jpeg_compressibility")(rough)
    # what lies outside the gamut is not seen; one channel is grey
    assert build("jpeg_compressibility")(sample(torch.full((1, 32, 32), 7.0))) == build("jpeg_compressibility")(
        sample(torch.ones(3, 32, 32))
    )
    with pytest.raises(ValueError, match="reward 'jpeg_compressibility': quality"):
        build("jpeg_compressibility", {"quality": 0})


@pytest.mark.parametrize("name", ["jpeg_compressibility", "jpeg_incompressibility", "classifier_logp", "ocr"])
def test_broken_and_missing_images(name):
    options = {"classifier_logp": {"classifier": f"{HERE}:brightness_classifier"}}.get(name, {})
    rewards = RewardSet([RewardSpec(name=name, options=options)])
    broken = noise()
    broken[0, 0, 0] = math.nan
    good = sample(noise(), 1, 'a sign that says "A"')
    scores = rewards.score([sample(broken, 1, '"A"'), good, sample(broken * math.inf, 1, '"A"')])
    assert scores.isnan().flatten().tolist() == [True, False, True]
    with pytest.raises(UserError, match=f"reward '{name}': the rollout of prompt 'p' has no image"):
        rewards.score([good, sample(None, 1, '"A"')])


class Brightness(nn.Module):
    """Logits (0, 4 x mean); a dropout that only training would feel."""

    def __init__(self):
        super().__init__()
        self.scale, self.dropout = nn.Parameter(torch.tensor(4.0)), nn.Dropout(0.9)

    def forward(self, images):
        bright = self.dropout(images.mean((1, 2, 3)) * self.scale)
        return torch.stack([torch.zeros_like(bright), bright], 1)


BUILT = []


def brightness_classifier():
    BUILT.append(1)
    return Brightness()


def no_classifier():
    return "a classifier"


def test_classifier_log_probability():
    BUILT.clear()
    rewards = RewardSet([RewardSpec(name="classifier_logp", options={"classifier": f"{HERE}:brightness_classifier"})])
    half, over = torch.full((1, 4, 4), 0.5), torch.full((1, 4, 4), 3.0)  # clamped to 1
    scores = rewards.score([sample(half, 0), sample(half, 1), sample(over, 1)])
    expected = [-math.log(1 + math.exp(2)), -math.log(1 + math.exp(-2)), -math.log(1 + math.exp(-4))]
    torch.testing.assert_close(scores[:, 0], torch.tensor(expected))
    spec = RewardSpec(name="classifier_logp", options={"classifier": f"{HERE}:brightness_classifier"}, batch_size=2)
    parts = RewardSet([spec])
    torch.testing.assert_close(parts.score([sample(half, 0), sample(half, 1), sample(over, 1)]), scores)
    assert len(BUILT) == 2  # once a reward, never a call


@pytest.mark.parametrize("answer", [None, 2, -1, "1", 0.0])
def test_a_class_the_classifier_does_not_have(answer):
    rewards = RewardSet([RewardSpec(name="classifier_logp", options={"classifier": f"{HERE}:brightness_classifier"})])
    with pytest.raises(UserError, match="answer of prompt 'p' is .*not a class in 0 .. 1"):
        rewards.score([sample(noise(), answer)])


def test_classifiers_that_are_none():
    with pytest.raises(ValueError, match="must return an nn.Module, not str"):
        build("classifier_logp", {"classifier": f"{HERE}:no_classifier"})
    with pytest.raises(ValueError, match="did you mean 'no_classifier'"):
        build("classifier_logp", {"classifier": f"{HERE}:no_classifer"})
    rewards = RewardSet([RewardSpec(name="classifier_logp", options={"classifier": f"{HERE}:brightness_classifier"})])
    with pytest.raises(UserError, match="images of one size"):
        rewards.score([sample(noise(), 0), sample(noise()[:, :8], 0)])


@pytest.mark.parametrize(
    "a, b, distance",
    [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("abcd", "abcd", 0)],
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == distance


def rendered(text, size=(320, 96)):
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).text((16, 24), text, fill="black", font=ImageFont.load_default(40))
    return torch.tensor(np.asarray(image)).permute(2, 0, 1).float() / 255


@pytest.fixture(scope="module")
def ocr():
    return build("ocr")


def test_ocr_reads_rendered_text(ocr):
    image = rendered("Hello World")
    assert ocr(sample(image, text='A sign that says "Hello World"')) == 1
    assert ocr(sample(image, text="A sign that says “hello  WORLD”, outdoors")) == 1
    assert ocr(sample(image, text="A sign", metadata={"text": "Hello World"})) == 1
    assert ocr(sample(image, text='A "Hello"', metadata={"text": "Help World"})) == pytest.approx(1 - 2 / 9)  # lo for p
    assert ocr(sample(image, text='It says "World"')) == 1  # stands in what was read
    assert ocr(sample(image, text='It says "xyz"')) == 0  # never below 0, however long the text read
    assert ocr(sample(rendered(""), text='It says "Hello"')) == 0


def test_ocr_does_not_depend_on_order(ocr):
    samples = [
        sample(rendered(word), text=f'It says "{asked}"') for word, asked in (("STOP", "STOP"), ("EXIT", "EDIT"))
    ]
    rewards = RewardSet([RewardSpec(name="ocr")])
    scores = rewards.score(samples)
    assert scores.flatten().tolist() == [1, 0.75]
    assert torch.equal(rewards.score(samples[::-1]), scores.flip(0))


@pytest.mark.parametrize("text, metadata", [("A sign", {}), ('A sign ""', {}), ('A "sign"', {"text": " "})])
def test_ocr_needs_a_text(ocr, text, metadata):
    with pytest.raises(UserError, match="prompt 'p' asks for no text"):
        ocr(sample(rendered("STOP"), text=text, metadata=metadata))
