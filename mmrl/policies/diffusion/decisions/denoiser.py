"""Denoising chains of a guided network, and rollouts of the latents that they end in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mmrl.policies.diffusion.decisions.records import ImageRecord, decoded_samples, noise_of
from mmrl.policies.diffusion.family import ConditionInputs, Shape
from mmrl.policies.diffusion.prediction import GuidedNetwork
from mmrl.policies.diffusion.settings import Denoising, ImageChain
from mmrl.policies.parts import map_with_checkpointing
from mmrl.rollouts import Prompt, Rollouts
from mmrl.samplers.chain import INITIAL, Chain, Sampler, gaussian, run
from mmrl.samplers.settings import Euler


class Denoiser:
    """Draws latents with a network and decodes them.

    shape: the latents' shape in rollouts. keep_predictions, steps_at_once: see `DiffusionPolicy`.
    """

    def __init__(
        self, network: GuidedNetwork, shape: Shape, *, keep_predictions: bool, steps_at_once: int | None
    ) -> None:
        self.network, self.family, self.denoising, self.shape = network, network.family, network.denoising, shape
        self.keep_predictions, self.steps_at_once = keep_predictions, steps_at_once

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler of rollouts; a policy that learns from demonstrations samples in evaluation only."""
        settings = self.denoising
        steps = settings.steps if isinstance(settings, Denoising) else settings.evaluation_steps
        return self.sampler_of(steps, self.shape)

    def sampler_of(self, steps: int, shape: Shape) -> Sampler:
        """Builds the sampler of chains of `steps` steps, with the likelihood's transition and tail where it has
        them."""
        likelihood, grid = self.denoising.likelihood, self.family.grid(steps, shape)
        if isinstance(likelihood, ImageChain):
            return Sampler(grid, likelihood.transition, likelihood.tail, self.family.space)
        return Sampler(grid, None, Euler(), self.family.space)

    @property
    def device(self) -> torch.device:
        return self.network.device

    def start(self, seeds: Sequence[int], shape: Shape | None = None) -> Tensor:
        """Returns pure noise [row, ...], each row's from its seed."""
        return gaussian([int(seed) for seed in seeds], INITIAL, shape or self.shape).to(self.device)

    def draw(
        self,
        sampler: Sampler,
        inputs: Sequence[ConditionInputs],
        seeds: Sequence[int],
        windows: list[list[int]],
        guidance: float,
        shape: Shape | None = None,
    ) -> Chain:
        """Draws whole chains. shape: the latents' shape where it differs from that of rollouts."""
        noise, keep = noise_of(seeds, shape or self.shape), self.keep_predictions
        predict = self.network.predictor(sampler, inputs, guidance)
        return run(predict, self.start(seeds, shape), sampler, windows, noise, keep_predictions=keep)

    def denoise(
        self,
        x: Tensor,
        inputs: Sequence[ConditionInputs],
        windows: list[list[int]],
        seeds: Sequence[int] = (),
        *,
        start: list[int] | None = None,
        stop: list[int] | None = None,
    ) -> Chain:
        """Runs parts of chains, from latents x [row, ...] at grid points `start` to `stop`; see
        `samplers.chain.run`."""
        predict = self.network.predictor(self.sampler, inputs, self.denoising.guidance)
        return run(predict, x, self.sampler, windows, noise_of(seeds, self.shape), start=start, stop=stop)

    def decode(self, latents: Tensor) -> Tensor:
        """Returns pixels in fp32, on the CPU; see `Family.decode`."""
        return self.family.decode(latents).float().cpu()

    def in_parts(self, compute: Callable[[slice], Tensor], rows: int) -> Tensor:
        """Returns `compute` of all rows, `steps_at_once` at a time, with and without a gradient, so that the first
        ratio is 1."""
        size = self.steps_at_once or rows
        return torch.cat(
            map_with_checkpointing(compute, [slice(first, first + size) for first in range(0, rows, size)])
        )

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        condition_inputs: Sequence[ConditionInputs],
        group_size: int,
        seeds: Sequence[int],
        chain: Chain,
        windows: list[list[int]],
        decisions: int,
        *,
        decode: bool = True,
    ) -> Rollouts:
        """Builds rollouts of finished chains. seeds: of the noises that the latents are scored with."""
        data, x, x_next = chain.final.cpu(), chain.x.cpu(), chain.x_next.cpu()
        predictions = [None] * len(condition_inputs) if chain.v is None else list(chain.v.cpu())
        records = [
            ImageRecord(
                condition_inputs[i],
                int(seed),
                data[i],
                torch.tensor(windows[i], dtype=torch.long),
                x[i],
                x_next[i],
                predictions[i],
            )
            for i, seed in enumerate(seeds)
        ]
        return Rollouts(
            samples=decoded_samples(prompts, self.decode(chain.final) if decode else None),
            inputs=records,
            group=torch.arange(len(prompts)) // group_size,
            mask=torch.ones(len(prompts), decisions, dtype=torch.bool),
        )
