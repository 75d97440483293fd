"""Prompts that ask for a thing by name, images for supervised training, and two classifiers of images.

The images are those of `mmrl.tasks.data.named_images`, reduced, randomly mirrored and moved, on a light background. The
generator is trained on one style (noto). The reward's classifier is trained on another style (fluent), so that it has
seen none of the generator's training images. The classifier of accuracy is trained on noto, and is no part of the
reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from mmrl.rewards.types import score_finite
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.data.named_images import images as icons
from mmrl.tasks.image_generation.data.images import stack_images

SIZE, THING_SIZE = 16, 14  # pixels along a side of an image, and of the thing in it
NAMES = (
    "banana", "basketball", "bear", "candle", "cloud", "door", "dress", "fish", "flamingo", "glasses", "guitar",
    "key", "lion", "pencil", "rainbow", "rooster", "scroll", "shamrock", "star", "sunflower", "taxi", "tractor",
    "tulip", "volcano",
)  # fmt: skip
PHRASINGS = {
    "train": ("an image of {}", "draw {}", "this is {}", "{} on plain paper", "paint me {}", "a small icon of {}"),
    "heldout": ("an image that shows {}", "please sketch {}", "I want to see {}", "a little drawing of {}"),
}
PLURAL = ("glasses",)  # names without an article
SPLITS = ("train", "heldout")
Split = Literal["train", "heldout"]
BACKGROUND = (0.65, 1.0)  # minimum and maximum of each channel of the background
Judge = Literal["reward", "second"]
# The style of the images that each classifier is trained on
JUDGES: dict[str, icons.Style] = {"reward": "fluent", "second": "noto"}
GENERATOR_STYLE: icons.Style = "noto"  # the style of the generator's training images


def texts(split: str, name: str) -> list[str]:
    """Returns the prompts of a split for a thing. The splits have the same names, but no phrasing in common."""
    article = "" if name in PLURAL else "an " if name[0] in "aeiou" else "a "
    return [phrasing.format(article + name) for phrasing in PHRASINGS[split]]


@lru_cache(maxsize=4)
def things(style: icons.Style, side: int) -> Tensor:
    """Returns the images of NAMES in a style: premultiplied RGB (color times opacity) and opacity, [name, 4, side,
    side] float32, 0 to 1."""
    names, sheet = icons.names(), icons.images(style)
    rgba = [sheet[names.index(name)].astype(np.float32) / 255 for name in NAMES]
    premultiplied = [np.concatenate([image[..., :3] * image[..., 3:], image[..., 3:]], -1) for image in rgba]
    return torch.stack([torch.stack([_resize(image[..., c], side) for c in range(4)]) for image in premultiplied])


def _resize(plane: np.ndarray, side: int) -> Tensor:
    """Resizes a plane [height, width] float32 to [side, side] by averaging."""
    return torch.from_numpy(np.array(Image.fromarray(plane).resize((side, side), Image.Resampling.BOX)))


def draw(name: int, rng: np.random.Generator) -> Tensor:
    """Draws a random image of a thing, [3, SIZE, SIZE] float32, 0 to 1. name: its index in NAMES."""
    thing = things(GENERATOR_STYLE, THING_SIZE)[name]  # premultiplied RGB and opacity
    if rng.random() < 0.5:
        thing = thing.flip(-1)
    margin = SIZE - THING_SIZE
    top, left = rng.integers(margin + 1, size=2).tolist()
    placed = F.pad(thing, (left, margin - left, top, margin - top))
    background = torch.from_numpy(rng.uniform(*BACKGROUND, size=(3, 1, 1)).astype(np.float32))
    return placed[:3] + background * (1 - placed[3:])


class NamedSource:
    """`size` prompts for things; item i asks for thing i % 24 and depends on (split, seed, i) and `wrong_share` only.

    The answer is the thing's index in NAMES. metadata["target"] is an image for supervised training, [3, SIZE, SIZE]
    float32, 0 to 1, which in the share `wrong_share` shows another thing.
    """

    def __init__(self, split: Split = "train", *, size: int, seed: int, wrong_share: float = 0.0):
        self.split, self.size, self.seed, self.wrong_share = split, size, seed, wrong_share

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        """Returns prompt `index`, which asks for thing `index` % 24. Its text and image are random, but determined by
        the split, the seed and `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is out of range: there are {self.size} prompts")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        name = index % len(NAMES)
        text = str(rng.choice(texts(self.split, NAMES[name])))
        wrong_name = (name + int(rng.integers(1, len(NAMES)))) % len(NAMES)
        target = wrong_name if rng.random() < self.wrong_share else name
        metadata: dict[str, Any] = {"name": NAMES[name], "target": draw(target, rng)}
        return Prompt(id=f"named-{self.split}-{self.seed}-{index}", text=text, answer=name, metadata=metadata)


# --- the classifiers ---

_STEPS, _BATCH = 300, 96  # training steps, and images of a batch
# Ranges of the augmentation: size, rotation in radians, and shift in half sides of the image
_AFFINE = {"scale": (0.7, 1.05), "turn": (-0.2, 0.2), "shift": (-0.15, 0.15)}


@lru_cache(maxsize=2)
def classifier(judge: Judge) -> nn.Module:
    """Returns a classifier that maps images [image, 3, SIZE, SIZE], 0 to 1, to logits [image, name].

    "reward" is trained on the style fluent, "second" on noto, the style of the generator's training images. Both see
    augmented images, since generated images are never clean. The first call in a process trains it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(list(JUDGES).index(judge))  # the classifiers have different seeds
        network = _convolutions(32 if judge == "reward" else 24)
        optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, _STEPS)
        for _ in range(_STEPS):
            labels = torch.randint(len(NAMES), (_BATCH,))
            images = augment(things(JUDGES[judge], icons.SIDE)[labels])
            loss = F.cross_entropy(network(images), labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval().requires_grad_(False)


def _convolutions(width: int) -> nn.Module:
    """Builds a convolutional network from images [image, 3, SIZE, SIZE] to logits [image, name]. width: channels of the
    first layer."""

    def block(in_channels: int, out_channels: int) -> list[nn.Module]:
        """Returns a convolution that leaves the image size unchanged, with normalization and activation."""
        return [nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels), nn.ReLU()]

    return nn.Sequential(
        *block(3, width), nn.MaxPool2d(2), *block(width, 2 * width), nn.MaxPool2d(2), *block(2 * width, 2 * width),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(2 * width * (SIZE // 4) ** 2, len(NAMES)),
    )  # fmt: skip


def augment(premultiplied: Tensor) -> Tensor:
    """Augments images for the training of a classifier: affine transform, color, background, saturation and noise.

    premultiplied: [image, 4, 2 SIZE, 2 SIZE], see `things`. Returns [image, 3, SIZE, SIZE], 0 to 1. Uses torch's global
    generator.
    """
    num_images = len(premultiplied)

    def uniform(low: float, high: float, *size: int) -> Tensor:
        """Samples uniform numbers, [image, *size]."""
        return low + (high - low) * torch.rand(num_images, *size)

    zoom, angle = 1 / uniform(*_AFFINE["scale"]), uniform(*_AFFINE["turn"])
    mirror = 2.0 * (torch.rand(num_images) < 0.5) - 1
    # for each image, the two rows of the matrix that maps positions in the result to positions in the input: the
    # first computes the column of the input, the second its row
    rows = [zoom * mirror * angle.cos(), -zoom * mirror * angle.sin(), uniform(*_AFFINE["shift"])]
    columns = [zoom * angle.sin(), zoom * angle.cos(), uniform(*_AFFINE["shift"])]
    affine = torch.stack([torch.stack(rows, -1), torch.stack(columns, -1)], 1)
    grid = F.affine_grid(affine, list(premultiplied.shape), align_corners=False)
    placed = F.avg_pool2d(F.grid_sample(premultiplied, grid, align_corners=False), 2)
    image = placed[:, :3] * uniform(0.75, 1.25, 3, 1, 1) + uniform(0.5, 1.0, 3, 1, 1) * (1 - placed[:, 3:])
    gray = image.mean(1, keepdim=True)
    saturated = gray + uniform(0.4, 1.3, 1, 1, 1) * (image - gray)
    return (saturated + uniform(0, 0.2, 1, 1, 1) * torch.randn_like(saturated)).clamp(0, 1)


def real_images(num_images: int) -> list[Sample]:
    """Returns the first `num_images` held-out prompts, each with a real image of the thing that it asks for."""
    source = NamedSource("heldout", size=num_images, seed=0)
    prompts = [source[index] for index in range(num_images)]
    return [Sample(prompt, image=prompt.metadata["target"]) for prompt in prompts]


class Recognised:
    """Reward: 1 if a classifier recognises the requested thing (prompt.answer) in the image, clamped to 0..1, else 0;
    with `soft` the probability that it gives to that thing.

    None for an image that holds NaN or inf. Scoring raises UserError for images that are not [3, SIZE, SIZE].
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, judge: Judge = "second", soft: bool = False):
        if judge not in JUDGES:
            raise ValueError(f"judge must be one of {', '.join(JUDGES)}, not {judge!r}")
        self._classifier, self._soft = classifier(judge), soft

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns the rewards of samples whose images are finite: 1 if the requested thing is recognised, else 0; with
        `soft` its probability."""
        logits = self._classifier(stack_images(samples, (3, SIZE, SIZE)).clamp(0, 1))
        labels = torch.tensor([sample.prompt.answer for sample in samples])
        if self._soft:
            return logits.softmax(-1).gather(1, labels[:, None])[:, 0].tolist()
        return (logits.argmax(-1) == labels).float().tolist()
