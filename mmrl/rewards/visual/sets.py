"""A reward of a whole set of images: its distance to a set of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from mmrl.core.distances import frechet, kernel_distance, replacement_gains
from mmrl.errors import UserError
from mmrl.rewards.types import Score, device_of, image_of, load_object, score_finite
from mmrl.rollouts import Sample

DISTANCES = {"fid": frechet, "kid": kernel_distance}
MOST = 512  # images that features are computed of at once


class SetDistance:
    """The distance of a batch of images to `reference`, by FID or KID (Distribution-wise rewards, arXiv 2607.02291,
    reconstructed). A model that generates one good image again and again is far.

    With credit `replacement` the i-th images of all prompts are a subset, and an image earns what its subset adds: the
    distance of the batch less the mean distance that the batch has when the subset takes the place of another one. So
    it needs groups; rollouts of a group are compared by it. With `whole` all get minus the distance, for evaluation.

    features: a callable of images [n, channel, height, width] of 0 to 1 that gives [n, d], or a module without its
    options; reference: what gives real images like those, both as package.module:function that is called. On several
    ranks each scores its own rollouts. None for an image that holds NaN or inf, which is left out of the set.
    """

    scope: Literal["batch"] = "batch"

    def __init__(
        self,
        *,
        features: str,
        reference: str,
        metric: Literal["fid", "kid"] = "fid",
        credit: Literal["replacement", "whole"] = "replacement",
        device: str | None = None,
    ):
        if metric not in DISTANCES:
            raise ValueError(f"metric must be fid or kid, not {metric!r}")
        if credit not in ("replacement", "whole"):
            raise ValueError(f"credit must be replacement or whole, not {credit!r}")
        self.credit, self.device = credit, device
        self._features = load_object(features)()
        if not callable(self._features):
            raise ValueError(f"features {features} gives {type(self._features).__name__}, which can not be called")
        real = load_object(reference)()
        if not isinstance(real, Tensor) or real.dim() != 4 or len(real) < 2:
            raise ValueError(f"reference {reference} must give images [image, channel, height, width], two at least")
        self._size = tuple(real.shape[1:])
        self._distance = partial(DISTANCES[metric], reference=self._of(real))

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        images = [image_of(sample) for sample in samples]
        wrong = next((p for p in images if tuple(p.shape) != self._size), None)
        if wrong is not None:
            raise UserError(f"an image of {list(wrong.shape)} can not be compared with those of {list(self._size)}")
        if len(samples) < 2:
            raise UserError("a distance between sets needs two images in a batch at least")
        features = self._of(torch.stack(images))
        if self.credit == "whole":
            return [-float(self._distance(features))] * len(samples)
        gains: list[float] = replacement_gains(features, members(samples), self._distance).tolist()
        return gains

    @torch.no_grad()
    def _of(self, images: Tensor) -> Tensor:
        """Computes features, [image, d] fp32 on the CPU."""
        device = device_of(self.device)
        if isinstance(self._features, nn.Module):
            self._features.eval().to(device)
        parts = [self._features(part.clamp(0, 1).to(device)).float().cpu() for part in images.split(MOST)]
        return torch.cat(parts)


def members(samples: Sequence[Sample]) -> Tensor:
    """Returns the number of earlier samples of the same prompt, [sample] int64."""
    following: dict[str, int] = {}
    counts = []
    for sample in samples:
        counts.append(following.get(sample.prompt.id, 0))
        following[sample.prompt.id] = counts[-1] + 1
    return torch.tensor(counts)
