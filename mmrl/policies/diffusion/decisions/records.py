"""Images and videos as rollouts hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.policies.diffusion.family import ConditionInputs, Shape
from mmrl.rollouts import Prompt, Sample
from mmrl.samplers.chain import gaussian_noise


@dataclass(frozen=True)
class ImageRecord:
    """One image or video: the inputs of its condition, the drawn steps of its chain, and the final latent. fp32, on the
    CPU."""

    condition_inputs: ConditionInputs
    seed: int  # seeds the noises that the latent is scored with
    data: Tensor  # [...] the final latent
    points: Tensor  # [window] int64, grid points of the steps that were drawn
    x: Tensor  # [window, ...] before each of them
    x_next: Tensor  # [window, ...] after
    prediction: Tensor | None = None  # [window, ...] the network's output at `x`, where it was kept

    @property
    def text(self) -> str:
        return self.condition_inputs.text


def predictions_of(records: Sequence[ImageRecord]) -> Tensor | None:
    """Returns the predictions [rollout, decision, ...] that were kept while sampling; None where there are none."""
    predictions = [record.prediction for record in records if record.prediction is not None]
    return torch.stack(predictions) if predictions else None


def decoded_samples(prompts: Sequence[Prompt], pixels: Tensor | None) -> list[Sample]:
    """Returns samples with decoded images [n, channel, height, width] or videos [n, frame, channel, height, width]."""
    if pixels is None:
        return [Sample(prompt) for prompt in prompts]
    videos = pixels.dim() == 5
    return [Sample(p, frames=one) if videos else Sample(p, image=one) for p, one in zip(prompts, pixels, strict=True)]


def noise_of(seeds: Sequence[int], shape: Shape) -> Callable[[int, Tensor], Tensor]:
    """Returns the function `noise` of `samplers.chain.run`: standard normal noise of rows at a step, from their
    seeds."""

    def noise(step: int, rows: Tensor) -> Tensor:
        return gaussian_noise([int(seeds[i]) for i in rows.tolist()], step, shape)

    return noise


def move(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
