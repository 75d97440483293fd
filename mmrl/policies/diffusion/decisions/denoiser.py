"""Chains of a network under guidance, and rollouts of what they lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mmrl.policies.diffusion.decisions.records import ImageRecord, made_samples, noise_of
from mmrl.policies.diffusion.family import ConditionInputs, Shape
from mmrl.policies.diffusion.prediction import GuidedNetwork
from mmrl.policies.diffusion.settings import Denoising, ImageChain
from mmrl.policies.parts import by_parts
from mmrl.rollouts import Prompt, Rollouts
from mmrl.samplers.chain import INITIAL, Chain, Sampler, gaussian, run
from mmrl.samplers.settings import Euler


class Denoiser:
    """Draws latents with a network and decodes them.

    shape: of latents of rollouts. keep_predictions, steps_at_once: see `DiffusionPolicy`.
    """

    def __init__(
        self, network: GuidedNetwork, shape: Shape, *, keep_predictions: bool, steps_at_once: int | None
    ) -> None:
        self.network, self.family, self.denoising, self.shape = network, network.family, network.denoising, shape
        self.keep_predictions, self.steps_at_once = keep_predictions, steps_at_once

    @cached_property
    def sampler(self) -> Sampler:
        """Of rollouts; who learns from demonstrations draws in evaluation alone."""
        settings = self.denoising
        steps = settings.steps if isinstance(settings, Denoising) else settings.evaluation_steps
        return self.sampler_of(steps, self.shape)

    def sampler_of(self, steps: int, shape: Shape) -> Sampler:
        """Of chains of so many steps, with the transition and the tail of the likelihood that has them."""
        likelihood, grid = self.denoising.likelihood, self.family.grid(steps, shape)
        if isinstance(likelihood, ImageChain):
            return Sampler(grid, likelihood.transition, likelihood.tail, self.family.space)
        return Sampler(grid, None, Euler(), self.family.space)

    @property
    def device(self) -> torch.device:
        return self.network.device

    def start(self, seeds: Sequence[int], shape: Shape | None = None) -> Tensor:
        """[row, ...] pure noise, each row's from its seed."""
        return gaussian([int(seed) for seed in seeds], INITIAL, shape or self.shape).to(self.device)

    def draw(
        self,
        sampler: Sampler,
        said: Sequence[ConditionInputs],
        seeds: Sequence[int],
        windows: list[list[int]],
        guidance: float,
        shape: Shape | None = None,
    ) -> Chain:
        """Whole chains. shape: of latents, where it is not that of rollouts."""
        noise, keep = noise_of(seeds, shape or self.shape), self.keep_predictions
        predict = self.network.predictor(sampler, said, guidance)
        return run(predict, self.start(seeds, shape), sampler, windows, noise, keep_predictions=keep)

    def go_on(
        self,
        x: Tensor,
        said: Sequence[ConditionInputs],
        windows: list[list[int]],
        seeds: Sequence[int] = (),
        *,
        start: list[int] | None = None,
        stop: list[int] | None = None,
    ) -> Chain:
        """Parts of chains of rollouts, from latents x at grid points `start` to `stop`; see `run`."""
        predict = self.network.predictor(self.sampler, said, self.denoising.guidance)
        return run(predict, x, self.sampler, windows, noise_of(seeds, self.shape), start=start, stop=stop)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels, on the CPU."""
        return self.family.decode(latents).float().cpu()

    def in_parts(self, compute: Callable[[slice], Tensor], rows: int) -> Tensor:
        """`compute` of all rows, `steps_at_once` at a time, with a gradient and without: so the first ratio is 1."""
        size = self.steps_at_once or rows
        return torch.cat(by_parts(compute, [slice(first, first + size) for first in range(0, rows, size)]))

    def rollouts(
        self,
        asked: Sequence[Prompt],
        said: Sequence[ConditionInputs],
        group_size: int,
        seeds: Sequence[int],
        chain: Chain,
        windows: list[list[int]],
        decisions: int,
        *,
        decode: bool = True,
    ) -> Rollouts:
        """seeds: of the noises that latents are scored with."""
        data, x, x_next = chain.final.cpu(), chain.x.cpu(), chain.x_next.cpu()
        kept = [None] * len(said) if chain.v is None else list(chain.v.cpu())
        inputs = [
            ImageRecord(
                said[i], int(seed), data[i], torch.tensor(windows[i], dtype=torch.long), x[i], x_next[i], kept[i]
            )
            for i, seed in enumerate(seeds)
        ]
        return Rollouts(
            samples=made_samples(asked, self.decode(chain.final) if decode else None),
            inputs=inputs,
            group=torch.arange(len(asked)) // group_size,
            mask=torch.ones(len(asked), decisions, dtype=torch.bool),
        )
