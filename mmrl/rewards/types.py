"""The types of rewards, and access to a sample's image and video."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmrl.errors import UserError, describe_error
from mmrl.rollouts import Prompt, Sample, Spans
from mmrl.runtime.devices import device_name

Score = float | None  # None: could not be scored
Reward = Callable[[Sample], Score | Spans]


@runtime_checkable
class BatchReward(Protocol):
    """A reward that scores many samples in one call, one value for each, in order.

    scope: "sample": no value depends on the other samples. "group": one call gets exactly the samples that answer one
    prompt. "batch": one call gets all samples that are scored together.
    """

    @property
    def scope(self) -> Literal["sample", "group", "batch"]: ...

    def score(self, samples: Sequence[Sample]) -> Sequence[Score | Spans]: ...


@runtime_checkable
class SavingReward(Protocol):
    """A reward that returns a state."""

    def state(self) -> Mapping[str, Any]:
        """Returns its state: numbers, strings, lists, dicts and tensors."""


@runtime_checkable
class StatefulReward(SavingReward, Protocol):
    """A reward that learns or counts. Checkpoints keep its state on each rank, so that a resumed run continues
    exactly."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""


@runtime_checkable
class DifferentiableReward(Protocol):
    """A reward of images that is differentiable with respect to pixels."""

    def differentiable(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Returns rewards [rollout] of decoded images [rollout, channel, height, width], with gradients to the
        images."""


def device_of(device: str | None) -> torch.device:
    """Returns the device of a reward's model: its option `device`, else the current GPU, else the CPU.

    Call it when scoring, not when building: a reward may be built before the GPU of its process is set.
    """
    return torch.device(device or (device_name("cuda") if torch.cuda.is_available() else "cpu"))


def image_of(sample: Sample) -> Tensor:
    """Returns the generated image, [channel, height, width]. Raises UserError if the rollout has none."""
    if sample.image is None:
        raise UserError(
            f"the rollout of prompt {sample.prompt.id!r} has no image: this reward scores generated images; use it "
            "with a task that generates images"
        )
    return sample.image


def video_of(sample: Sample) -> Tensor:
    """Returns the generated video, [frame, channel, height, width]. Raises UserError if the rollout has none."""
    if sample.frames is None:
        raise UserError(
            f"the rollout of prompt {sample.prompt.id!r} has no video: this reward scores generated videos; use it "
            "with a task that generates videos"
        )
    return sample.frames


def as_pil(image: Tensor) -> Image.Image:
    """Converts an image [channel, height, width] in 0..1 to PIL: clamped, rounded to 8 bits, always RGB."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def score_finite(samples: Sequence[Sample], score: Callable[[list[Sample]], Sequence[Score]]) -> list[Score]:
    """Scores the samples whose images are finite, with `score`; None for images with NaN or inf. The order is kept."""
    finite = [bool(image_of(sample).isfinite().all()) for sample in samples]
    scored = [sample for sample, is_finite in zip(samples, finite, strict=True) if is_finite]
    values = iter(score(scored) if scored else [])
    return [next(values) if is_finite else None for is_finite in finite]


def to_scores(values: Any, num_samples: int) -> list[Score]:
    """Converts what a reward returned to one score for each sample: a float, or None for None, NaN and infinity.

    True is 1, False 0, and an array or tensor with one number is that number. Raises UserError unless these are
    `num_samples` numbers; a string is not a number, not even "0.5".
    """
    try:
        scores = [None if value is None else _finite(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise UserError(f"expected one number for each sample: {' '.join(str(error).split())}") from None
    if len(scores) != num_samples:
        raise UserError(f"it returned {len(scores)} values for {num_samples} samples")
    return scores


def _finite(value: Any) -> Score:
    """Converts a number, or an array or tensor with one number, to a float; None for NaN and infinity.

    Raises ValueError for strings and for values of spans, and TypeError, ValueError or RuntimeError for values that
    `float` does not convert.
    """
    if isinstance(value, str | bytes | bytearray):
        raise ValueError(f"{value!r:.40} is a string, not a number")
    if isinstance(value, Spans):
        raise ValueError("a reward of spans cannot be used here; return a number")
    if isinstance(value, np.ndarray):
        value = value.item()
    try:
        number = float(value)
    except OverflowError:  # an integer that no float can hold
        return None
    return number if math.isfinite(number) else None


def load_object(path: str) -> Any:
    """Imports the object at 'package.module:name'. Raises ValueError if there is none."""
    module_name, _, attribute = path.partition(":")
    try:
        members = vars(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"no function {path!r}: {error}; install that module, or add its folder to PYTHONPATH"
        ) from error
    except Exception as error:  # any fault of a module of the user's own
        raise ValueError(f"no function {path!r}: {module_name} cannot be imported: {describe_error(error)}") from error
    if attribute not in members:
        raise ValueError(f"no function {path!r}: {module_name} has no {attribute!r}{nearest(attribute, members)}")
    return members[attribute]


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns " (did you mean '...'?)" with the most similar of `names`; "" if none is similar."""
    close = difflib.get_close_matches(word, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
