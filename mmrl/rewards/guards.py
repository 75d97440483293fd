"""Guards: measures of images and videos that are logged beside a reward and change when a policy exploits its faults
(reward hacking).

Each takes images [rollout, channel, height, width] in 0..1, or videos [rollout, frame, channel, height, width], and
returns [rollout] float32. Pixels are clamped to 0..1, except in `out_of_gamut`. A second, held-out reward model is
configured as a reward of weight 0 instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.rewards.types import Score, image_of, video_of
from mmrl.rollouts import Sample

_LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue (ITU-R BT.601)
_LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


def out_of_gamut(images: Tensor, tolerance: float = 0.0) -> Tensor:
    """Returns the share of values outside [-tolerance, 1 + tolerance] in each of images [rollout, channel, height,
    width], [rollout]; NaN counts as outside."""
    inside = (images >= -tolerance) & (images <= 1 + tolerance)
    return 1 - inside.flatten(1).float().mean(1)


def sharpness(images: Tensor) -> Tensor:
    """Returns the population variance, over the inner pixels, of the luma's up + down + left + right - 4 x centre.

    images: [rollout, channel, height, width] in 0..1; returns [rollout]. A reward that is hacked by blur lowers it, one
    hacked by noise raises it. Raises ValueError below 3 x 3 pixels.
    """
    if min(images.shape[2:]) < 3:
        raise ValueError(f"sharpness needs images of at least 3 x 3 pixels, not {tuple(images.shape[2:])}")
    kernel = torch.tensor(_LAPLACIAN, device=images.device)[None, None]
    return F.conv2d(_luma(images)[:, None], kernel).flatten(1).var(1, correction=0)


def diversity(images: Tensor, group: Tensor) -> Tensor:
    """Returns the mean distance of each image to the others of its group: d_i = mean over j of sqrt(mean over values of
    (x_i - x_j)^2). It is 0 if all are equal.

    images: [rollout, channel, height, width] in 0..1; group: [rollout] integers. Returns [rollout], NaN for a rollout
    that is alone in its group.
    """
    pixels = images.float().clamp(0, 1).flatten(1)
    result = pixels.new_full((len(pixels),), torch.nan)
    for key in group.unique():
        (rows,) = (group == key).nonzero(as_tuple=True)
        if len(rows) > 1:
            members = pixels[rows]
            # From differences: the matrix product would give equal images a distance of 1e-4.
            distance = torch.cdist(members, members, compute_mode="donot_use_mm_for_euclid_dist")
            result[rows] = distance.sum(1) / (len(rows) - 1) / pixels.shape[1] ** 0.5
    return result


def motion(videos: Tensor) -> Tensor:
    """Returns the mean absolute difference of neighbouring frames, [rollout]; 0 for one frame. videos: [rollout, frame,
    channel, height, width] in 0..1."""
    pixels = videos.float().clamp(0, 1)
    if pixels.shape[1] < 2:
        return pixels.new_zeros(len(pixels))
    return pixels.diff(dim=1).abs().flatten(1).mean(1)


def static(videos: Tensor, least: float = 0.01) -> Tensor:
    """Returns 1 if a video stands still, that is, if its `motion` is below `least`, else 0, [rollout].

    Rewards of single frames may favour such videos. videos: as for `motion`.
    """
    return (motion(videos) < least).float()


def flicker(videos: Tensor) -> Tensor:
    """Returns the mean absolute second difference in time of the frames' brightness, [rollout]: light that comes and
    goes. It is 0 for fewer than three frames. videos: [rollout, frame, channel, height, width] in 0..1."""
    pixels = videos.float().clamp(0, 1)
    if pixels.shape[1] < 3:
        return pixels.new_zeros(len(pixels))
    light = _luma(pixels.flatten(0, 1)).mean((1, 2)).view(pixels.shape[:2])
    return light.diff(n=2, dim=1).abs().mean(1)


def brightness(images: Tensor) -> Tensor:
    """Returns the mean luma, 0.299 R + 0.587 G + 0.114 B; an image of one channel is its own luma."""
    return _luma(images).flatten(1).mean(1)


def saturation(images: Tensor) -> Tensor:
    """Returns the mean of HSV's saturation, (max - min) / max over the channels, 0 where max is 0; 0 for one channel.
    images: [rollout, channel, height, width] in 0..1; returns [rollout]."""
    pixels = images.float().clamp(0, 1)
    high, low = pixels.amax(1), pixels.amin(1)
    return ((high - low) / high.where(high > 0, torch.ones_like(high))).flatten(1).mean(1)


def _luma(images: Tensor) -> Tensor:
    """Returns the luma [rollout, height, width] of images [rollout, channel, height, width] with 1 or 3 channels."""
    pixels = images.float().clamp(0, 1)
    if images.shape[1] == 1:
        return pixels[:, 0]
    return torch.einsum("bchw,c->bhw", pixels, torch.tensor(_LUMA, device=images.device))


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "out_of_gamut": out_of_gamut,
    "sharpness": sharpness,
    "brightness": brightness,
    "saturation": saturation,
}
VIDEO_MEASURES: dict[str, Callable[[Tensor], Tensor]] = {"motion": motion, "static": static, "flicker": flicker}


class GuardReward:
    """A guard as a reward. With weight 0 it is only logged, as reward/<label>; a mask of type=band may use it.

    of: name of the guard. For videos, guards of images are averaged over frames. The score is None for NaN or inf.
    """

    scope: Literal["sample"] = "sample"

    def __init__(self, *, of: str) -> None:
        if of not in {**MEASURES, **VIDEO_MEASURES}:
            raise ValueError(f"`of` must be one of {', '.join({**MEASURES, **VIDEO_MEASURES})}, not {of!r}")
        self.of = of

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns the measure of each sample's image or video; None if it has NaN or inf."""
        scores: list[Score] = []
        for sample in samples:  # one by one: sizes may differ
            images = image_of(sample)[None] if sample.frames is None else video_of(sample)  # [image, ...]
            if self.of in VIDEO_MEASURES:
                values = VIDEO_MEASURES[self.of](video_of(sample)[None])
            else:
                values = MEASURES[self.of](images)
            scores.append(float(values.mean()) if bool(images.isfinite().all()) else None)
        return scores
