"""Sentences that ask for a thing by name, images of it in one artist's style, and scorers that learned from others.

Things are those of `mmrl.tasks.data.named_images`, made small, mirrored or not, moved a little, on paper of any light
colour. What draws learns them in one style, and what rewards it in another, so that the reward has seen none of the
images that are drawn. What measures learned them in the style that is drawn, and has no part in the reward.
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

SIZE, THING = 16, 14  # pixels a side of an image, and of the thing on it
NAMES = (
    "banana", "basketball", "bear", "candle", "cloud", "door", "dress", "fish", "flamingo", "glasses", "guitar",
    "key", "lion", "pencil", "rainbow", "rooster", "scroll", "shamrock", "star", "sunflower", "taxi", "tractor",
    "tulip", "volcano",
)  # fmt: skip
PHRASINGS = {
    "train": ("an image of {}", "draw {}", "this is {}", "{} on plain paper", "paint me {}", "a small icon of {}"),
    "heldout": ("an image that shows {}", "please sketch {}", "I want to see {}", "a little drawing of {}"),
}
PLURAL = ("glasses",)
SPLITS = ("train", "heldout")
Split = Literal["train", "heldout"]
PAPER = (0.65, 1.0)  # least and greatest of each channel of the colour behind a thing
Judge = Literal["reward", "second"]
JUDGES: dict[str, icons.Style] = {"reward": "fluent", "second": "noto"}  # the style that each learned from
DRAWN: icons.Style = "noto"


def texts(split: str, name: str) -> list[str]:
    """Returns the texts by which a split asks for a thing. No phrasing of training is in the held-out prompts; all
    names are in both."""
    article = "" if name in PLURAL else "an " if name[0] in "aeiou" else "a "
    return [phrasing.format(article + name) for phrasing in PHRASINGS[split]]


@lru_cache(maxsize=4)
def things(style: icons.Style, side: int) -> Tensor:
    """Returns colours times opacity, and opacity, of all NAMES in a style, [name, 4, side, side] float32, 0 to 1."""
    names, sheet = icons.names(), icons.images(style)
    rows = [sheet[names.index(name)].astype(np.float32) / 255 for name in NAMES]
    solid = [np.concatenate([row[..., :3] * row[..., 3:], row[..., 3:]], -1) for row in rows]
    return torch.stack([torch.stack([_resized(row[..., c], side) for c in range(4)]) for row in solid])


def _resized(plane: np.ndarray, side: int) -> Tensor:
    return torch.from_numpy(np.array(Image.fromarray(plane).resize((side, side), Image.Resampling.BOX)))


def draw(name: int, rng: np.random.Generator) -> Tensor:
    """Draws one of a thing's many images, [3, SIZE, SIZE] float32, 0 to 1; name: its index in NAMES."""
    thing = things(DRAWN, THING)[name]
    if rng.random() < 0.5:
        thing = thing.flip(-1)
    top, left = rng.integers(SIZE - THING + 1, size=2).tolist()
    room = SIZE - THING
    placed = F.pad(thing, (left, room - left, top, room - top))
    paper = torch.from_numpy(rng.uniform(*PAPER, size=(3, 1, 1)).astype(np.float32))
    return placed[:3] + paper * (1 - placed[3:])


class NamedSource:
    """`size` prompts for things; item i asks for thing i % 24 and depends on (split, seed, i) and `careless` only.

    The answer is the thing's index in NAMES. metadata["target"] is an image for supervised training, [3, SIZE, SIZE]
    float32, 0 to 1, which for the share `careless` shows another thing, as clean as the right one.
    """

    def __init__(self, split: Split = "train", *, size: int, seed: int, careless: float = 0.0):
        self.split, self.size, self.seed, self.careless = split, size, seed, careless

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.size:
            raise IndexError(f"item {index} of {self.size}")
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        name = index % len(NAMES)
        text = str(rng.choice(texts(self.split, NAMES[name])))
        other = (name + int(rng.integers(1, len(NAMES)))) % len(NAMES)
        shown = other if rng.random() < self.careless else name
        metadata: dict[str, Any] = {"name": NAMES[name], "target": draw(shown, rng)}
        return Prompt(id=f"named-{self.split}-{self.seed}-{index}", text=text, answer=name, metadata=metadata)


# --- the scorers ---

_STEPS, _BATCH = 300, 96
_AFFINE = {"scale": (0.7, 1.05), "turn": (-0.2, 0.2), "shift": (-0.15, 0.15)}


@lru_cache(maxsize=2)
def scorer(judge: Judge) -> nn.Module:
    """Returns one of two networks that name images [image, 3, SIZE, SIZE] of 0 to 1, logits [image, name], trained once
    a process.

    `reward` learned from one style, `second` from the one that is drawn; both from images that are turned, scaled,
    moved, recoloured, faded and made noisy, for what a generator draws is never clean.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(list(JUDGES).index(judge))
        network = _convolutions(32 if judge == "reward" else 24)
        optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, _STEPS)
        for _ in range(_STEPS):
            named = torch.randint(len(NAMES), (_BATCH,))
            shown = spoiled(things(JUDGES[judge], icons.SIDE)[named])
            loss = F.cross_entropy(network(shown), named, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval().requires_grad_(False)


def _convolutions(width: int) -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        *block(3, width), nn.MaxPool2d(2), *block(width, 2 * width), nn.MaxPool2d(2), *block(2 * width, 2 * width),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(2 * width * (SIZE // 4) ** 2, len(NAMES)),
    )  # fmt: skip


def spoiled(solid: Tensor) -> Tensor:
    """Augments things [image, 4, 2 SIZE, 2 SIZE] for the training of a scorer, [image, 3, SIZE, SIZE], with torch's
    generator."""
    count = len(solid)

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *size)

    zoom, turn = 1 / uniform(*_AFFINE["scale"]), uniform(*_AFFINE["turn"])
    mirror = 2.0 * (torch.rand(count) < 0.5) - 1
    rows = [zoom * mirror * turn.cos(), -zoom * mirror * turn.sin(), uniform(*_AFFINE["shift"])]
    columns = [zoom * turn.sin(), zoom * turn.cos(), uniform(*_AFFINE["shift"])]
    affine = torch.stack([torch.stack(rows, -1), torch.stack(columns, -1)], 1)
    grid = F.affine_grid(affine, list(solid.shape), align_corners=False)
    placed = F.avg_pool2d(F.grid_sample(solid, grid, align_corners=False), 2)
    image = placed[:, :3] * uniform(0.75, 1.25, 3, 1, 1) + uniform(0.5, 1.0, 3, 1, 1) * (1 - placed[:, 3:])
    grey = image.mean(1, keepdim=True)
    faded = grey + uniform(0.4, 1.3, 1, 1, 1) * (image - grey)
    return (faded + uniform(0, 0.2, 1, 1, 1) * torch.randn_like(faded)).clamp(0, 1)


def real_images(count: int) -> list[Sample]:
    """Returns real images, in the style that is drawn, of what the first `count` held-out prompts ask for."""
    source = NamedSource("heldout", size=count, seed=0)
    return [Sample(prompt, image=prompt.metadata["target"]) for prompt in (source[index] for index in range(count))]


class Recognised:
    """Reward: 1 where a scorer takes the image, clamped to 0..1, for the requested thing (prompt.answer), else 0;
    with `soft` the probability that it gives it.

    None for an image that holds NaN or inf. Scoring raises UserError for images that are not [3, SIZE, SIZE].
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, judge: Judge = "second", soft: bool = False):
        if judge not in JUDGES:
            raise ValueError(f"judge must be one of {', '.join(JUDGES)}, not {judge!r}")
        self._scorer, self._soft = scorer(judge), soft

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        logits = self._scorer(stack_images(samples, (3, SIZE, SIZE)).clamp(0, 1))
        labels = torch.tensor([sample.prompt.answer for sample in samples])
        if self._soft:
            return logits.softmax(-1).gather(1, labels[:, None])[:, 0].tolist()
        return (logits.argmax(-1) == labels).float().tolist()
