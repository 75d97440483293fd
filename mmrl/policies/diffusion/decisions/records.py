"""Images and clips as rollouts hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.policies.diffusion.family import ConditionInputs, Shape
from mmrl.rollouts import Prompt, Sample
from mmrl.samplers.chain import gaussian


@dataclass(frozen=True)
class ImageRecord:
    """One image or clip: what it was asked for, and the steps of its chain or the latent itself. fp32, on the CPU."""

    asked: ConditionInputs
    seed: int  # of the noises that the latent is scored with
    data: Tensor  # [...] the final latent
    points: Tensor  # [window] int64, grid points of the steps that were drawn
    x: Tensor  # [window, ...] before each of them
    x_next: Tensor  # [window, ...] after
    prediction: Tensor | None = None  # [window, ...] what the network said before each of them, where it was kept

    @property
    def text(self) -> str:
        return self.asked.text


def predictions_of(records: Sequence[ImageRecord]) -> Tensor | None:
    """[rollout, decision, ...] what the network said when the rollouts were made; None where that was not kept."""
    kept = [record.prediction for record in records if record.prediction is not None]
    return torch.stack(kept) if kept else None


def made_samples(prompts: Sequence[Prompt], pixels: Tensor | None) -> list[Sample]:
    """Samples with what was decoded: images [n, channel, height, width] or clips [n, frame, channel, ...]."""
    if pixels is None:
        return [Sample(prompt) for prompt in prompts]
    clips = pixels.dim() == 5
    return [Sample(p, frames=one) if clips else Sample(p, image=one) for p, one in zip(prompts, pixels, strict=True)]


def noise_of(seeds: Sequence[int], shape: Shape) -> Callable[[int, Tensor], Tensor]:
    """What `run` asks for: the noise of rows at a step, from each row's seed."""

    def noise(step: int, rows: Tensor) -> Tensor:
        return gaussian([int(seeds[i]) for i in rows.tolist()], step, shape)

    return noise


def move(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
