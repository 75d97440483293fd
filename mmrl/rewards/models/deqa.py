"""DeQA-Score (You et al. 2025, arXiv:2501.11561): the quality of an image by mPLUG-Owl2, whose code comes with its
weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from mmrl.rewards.types import Score, as_pil, device_of, image_of, score_finite
from mmrl.rollouts import Sample

BATCH_SIZE = 8  # images that are scored at once


class DeQA:
    """The published quality of an image, 1 (bad) to 5 (excellent): the mean of five levels, weighted by the
    probabilities that the model gives to their words. The prompt is not read.

    model: a folder or a hub name. Its code is run (`trust_remote_code`), so the reward runs only under an interpreter
    of its own, the key `python`. It needs transformers 4.36, which `mmrl rewards install deqa` installs. revision: the
    commit of the hub. None for an image with NaN or inf. Raises ValueError if the model cannot be loaded.
    """

    scope: Literal["sample"] = "sample"

    def __init__(
        self,
        *,
        model: str = "zhiyuanyou/DeQA-Score-Mix3",
        revision: str | None = None,
        dtype: Literal["float32", "float16"] = "float16",
        device: str | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM
        try:
            self.model = loaded.from_pretrained(
                model,
                revision=revision or "main",
                trust_remote_code=True,
                attn_implementation="eager",
                torch_dtype=vars(torch)[dtype],
            )
        except OSError as error:
            raise ValueError(f"model {model!r} cannot be loaded: {' '.join(str(error).split()):.200}") from None
        self.model = self.model.to(device_of(device)).eval().requires_grad_(False)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_finite(samples, self._score)

    @torch.no_grad()
    def _score(self, samples: list[Sample]) -> list[float]:
        """Returns the quality of each sample's image, 1 to 5, computed for BATCH_SIZE images at once."""
        images = [as_pil(image_of(sample)) for sample in samples]
        scores: list[float] = []
        for first in range(0, len(images), BATCH_SIZE):
            scores += self.model.score(images[first : first + BATCH_SIZE]).float().flatten().tolist()
        return scores
