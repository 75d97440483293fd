"""The records of images and videos in rollouts."""

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
    """One image or video: the inputs of its condition, the stochastic steps of its chain, and the final latents. All
    tensors are fp32, on the CPU."""

    condition_inputs: ConditionInputs
    seed: int  # of the noises with which the latents are scored
    data: Tensor  # [...], the final latents
    points: Tensor  # [step] int64, the stochastic steps in the window, as grid points
    x: Tensor  # [step, ...], the latents before each of these steps
    x_next: Tensor  # [step, ...], the latents after each
    prediction: Tensor | None = None  # [step, ...], the guided prediction at `x`, if it was kept

    @property
    def text(self) -> str:
        """The text of the prompt."""
        return self.condition_inputs.text


def stacked_predictions(records: Sequence[ImageRecord]) -> Tensor | None:
    """Returns the predictions that sampling kept, [rollout, decision, ...]; None if it kept none."""
    predictions = [record.prediction for record in records if record.prediction is not None]
    return torch.stack(predictions) if predictions else None


def decoded_samples(prompts: Sequence[Prompt], pixels: Tensor | None) -> list[Sample]:
    """Returns one sample per prompt. pixels: images [n, channel, height, width] or videos [n, frame, channel, height,
    width]; None: the samples have no image."""
    if pixels is None:
        return [Sample(prompt) for prompt in prompts]
    if pixels.dim() == 5:
        return [Sample(prompt, frames=video) for prompt, video in zip(prompts, pixels, strict=True)]
    return [Sample(prompt, image=image) for prompt, image in zip(prompts, pixels, strict=True)]


def noise_function(seeds: Sequence[int], shape: Shape) -> Callable[[int, Tensor], Tensor]:
    """Returns the function `noise` that `samplers.chain.run` calls: (step, row indices) to standard normal noise [row,
    ...], from the seeds of the rows."""

    def noise(step: int, rows: Tensor) -> Tensor:
        """Samples the noise of a denoising step for the rows with these indices, [row, ...]."""
        return gaussian_noise([int(seeds[i]) for i in rows.tolist()], step, shape)

    return noise


def move(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Moves a tensor to a device; None stays None."""
    return None if tensor is None else tensor.to(device)
