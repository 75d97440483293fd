"""A reward of a set of images: its distance to a set of real images."""

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
BATCH_SIZE = 512  # images for which features are computed at once


class SetDistance:
    """The distance of a batch of images to a set of real images, by FID or KID (Distribution-wise rewards, arXiv
    2607.02291, reconstructed).

    A model that generates one good image again and again has a large distance. credit: "whole" gives every image minus
    the distance, for evaluation. With "replacement", the i-th images of all prompts form a subset. An image gets the
    mean improvement by its subset: the distance of the batch minus the mean distance of batches in which this subset
    replaces another one. So it needs groups, whose rollouts it compares.

    features: a function from images [n, channel, height, width] in 0..1 to [n, d], or a module. reference: real images
    of the same size. Both are given as package.module:function, which is called without arguments. On several ranks,
    each scores its own rollouts. None for an image with NaN or inf, which is left out of the set.
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
            raise ValueError(
                f"features {features} must return a function or nn.Module, not {type(self._features).__name__}"
            )
        real = load_object(reference)()
        if not isinstance(real, Tensor) or real.dim() != 4 or len(real) < 2:
            actual = list(real.shape) if isinstance(real, Tensor) else type(real).__name__
            raise ValueError(
                f"reference {reference} must return at least two images, [image, channel, height, width], not {actual}"
            )
        self._size = tuple(real.shape[1:])
        self._distance = partial(DISTANCES[metric], reference=self._features_of(real))

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns for each sample minus the distance of the batch, or with credit="replacement" the gain of its subset.
        Raises UserError for an image of another size than the reference's, and for fewer than two samples."""
        images = [image_of(sample) for sample in samples]
        wrong = next((image for image in images if tuple(image.shape) != self._size), None)
        if wrong is not None:
            raise UserError(
                f"an image of shape {list(wrong.shape)} cannot be compared with reference images of "
                f"{list(self._size)}; use reference images of that size"
            )
        if len(samples) < 2:
            raise UserError("a distance between sets of images (fid, kid) needs at least two images in a batch, not 1")
        features = self._features_of(torch.stack(images))
        if self.credit == "whole":
            return [-float(self._distance(features))] * len(samples)
        gains: list[float] = replacement_gains(features, index_in_group(samples), self._distance).tolist()
        return gains

    @torch.no_grad()
    def _features_of(self, images: Tensor) -> Tensor:
        """Computes the features of images [image, channel, height, width], [image, d] fp32 on the CPU."""
        device = device_of(self.device)
        if isinstance(self._features, nn.Module):
            self._features.eval().to(device)
        parts = [self._features(part.clamp(0, 1).to(device)).float().cpu() for part in images.split(BATCH_SIZE)]
        return torch.cat(parts)


def index_in_group(samples: Sequence[Sample]) -> Tensor:
    """Returns for each sample the number of earlier samples of the same prompt, [sample] int64."""
    num_seen: dict[str, int] = {}
    indices = []
    for sample in samples:
        indices.append(num_seen.get(sample.prompt.id, 0))
        num_seen[sample.prompt.id] = indices[-1] + 1
    return torch.tensor(indices)
